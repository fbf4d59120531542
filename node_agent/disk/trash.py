"""What is deleted in the background: one rename takes it away from where it stood, and a thread at idle priority deletes it later.

What is discarded may have been written by root in a job's container, who may still have it open: nothing follows a link, and each step goes from
an open folder to a name in it.
"""

import logging
import os
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from bdn.core.errors import DiskFailedError
from bdn.disk.durable import disk_errors, make_folder, open_folder, opened
from bdn.disk.syscalls import prefer_others

logger = logging.getLogger(__name__)
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PLACE: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_OURS: Final = 0o700
_DEEPEST: Final = 64  # folders that are open at once; what lies deeper is moved up
_PASSES: Final = (
    100  # through one folder: some file systems leave out names while others are deleted, and a job may add some
)
_AGAIN_SECONDS: Final = 60.0  # until what could not be deleted, or what another node discarded, is looked at


class Trash:
    """A folder of rubbish, beside what is discarded into it: on the same file system. A context manager, in which the thread runs.

    After ``kill -9`` or a power cut at any step a directory is whole under its own name or absent there, and what is in the folder is deleted
    by whoever opens it next. Several nodes may share it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trash", daemon=True)
        self._complaint = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def discard(self, path: Path) -> bool:
        """Take a file or a directory away, durably; its parents are ours. False: nothing has this name. Blocking.

        A link goes itself, and not what it leads to. Costs the same whatever is below. Raises ``DiskFailedError``.
        """
        with disk_errors(path):
            try:
                with open_folder(path.parent) as parent:
                    return self.discard_in(parent, path.name)
            except FileNotFoundError:
                return False

    def discard_in(self, folder: int, name: str) -> bool:
        """As ``discard``, of a name in an open folder: for a path of which a job may have written each part."""
        with disk_errors(self._folder / name):
            make_folder(self._folder, _OURS, is_durable=True)
            with open_folder(self._folder) as trash:
                is_found = _move(folder, name, trash)
                os.fsync(trash)
            os.fsync(folder)  # also for whoever was killed before this line, and asks again
        self._wake.set()
        return is_found

    def sweep(self) -> None:
        """Delete what is there. Blocking. What cannot be deleted stays, and is named in the log once. Raises ``DiskFailedError``."""
        with disk_errors(self._folder), suppress(FileNotFoundError), opened(self._folder, _FOLDER) as trash:
            sweep = _Sweep(trash, os.fstat(trash).st_dev, self._stop)
            while sweep.empty(trash, 0):
                pass  # what lay too deep is here by now
            if sweep.complaint not in ("", self._complaint):
                logger.warning(
                    "something in %s cannot be deleted, and is tried again: %s", self._folder, sweep.complaint
                )
            self._complaint = sweep.complaint

    def _run(self) -> None:
        prefer_others()
        while not self._stop.is_set():
            self._wake.clear()
            try:
                self.sweep()
            except DiskFailedError as error:
                logger.warning("the trash is not emptied: %s", error)
            self._wake.wait(_AGAIN_SECONDS)


@dataclass
class _Sweep:
    """One time through a trash, an open folder on a device. ``complaint`` is the first reason why something is left."""

    trash: int
    device: int
    stop: threading.Event
    complaint: str = ""

    def empty(self, folder: int, depth: int) -> bool:
        """Delete what is in a folder; whether anything was deleted or moved up."""
        is_changed = False
        with os.scandir(folder) as entries:
            for entry in entries:
                if self.stop.is_set():
                    return False
                try:
                    if entry.is_dir(follow_symlinks=False):
                        self._delete_folder(folder, entry.name, depth)
                    else:
                        os.unlink(entry.name, dir_fd=folder)
                    is_changed = True
                except FileNotFoundError:
                    pass  # another node was faster
                except OSError as error:
                    self.complaint = self.complaint or str(error)
        return is_changed

    def _delete_folder(self, folder: int, name: str, depth: int) -> None:
        _open_up(folder, name)
        if depth >= _DEEPEST:
            _move(folder, name, self.trash)
            return
        with opened(name, _FOLDER, folder) as below:
            if os.fstat(below).st_dev == self.device:  # else something is mounted there, which is not ours to delete
                for _ in range(_PASSES):
                    if not self.empty(below, depth + 1):
                        break
        os.rmdir(name, dir_fd=folder)


def _move(folder: int, name: str, trash: int) -> bool:
    """Into the trash, under a name that nobody has. False: there is nothing to move."""
    fresh = secrets.token_hex(16)
    try:
        with suppress(NotADirectoryError, PermissionError):
            _open_up(folder, name)  # to move a folder elsewhere takes the right to write to it
        os.rename(name, fresh, src_dir_fd=folder, dst_dir_fd=trash)
    except FileNotFoundError:
        return False
    return True


def _open_up(folder: int, name: str) -> None:
    """Let us list and change a folder that may forbid it, where its owner is who we are."""
    with opened(name, _PLACE, folder) as place:
        if os.fstat(place).st_mode & _OURS != _OURS:
            Path(f"/proc/self/fd/{place}").chmod(_OURS)  # of that very folder, whatever has its name by now
