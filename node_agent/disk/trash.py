"""Deletes files in the background: one rename moves them to the trash, and a thread at idle priority deletes them.

Discarded files may come from root in a job's container, which may still have them open: no link is followed, and each
step goes from an open folder to a name in it.
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
_DEEPEST: Final = 64  # folders open at once; deeper folders are moved up
_PASSES: Final = (
    100  # through one folder: some file systems omit names from a scan during deletions, and a job may add names
)
_AGAIN_SECONDS: Final = 60.0  # until the next try of failed deletions, and of what another node discarded


class Trash:
    """A folder on the same file system as the files discarded into it. A context manager, which runs the thread.

    After ``kill -9`` or a power cut at any step a directory is whole under its own name or absent there. The next
    process that opens the trash deletes what is in it. Several nodes may share it.
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
        """Remove a file or a directory from its place, durably; its parents are the agent's. Blocking.

        A link itself is discarded, not its target. Constant cost, whatever the size. Returns False if the name does not
        exist. Raises ``DiskFailedError``.
        """
        with disk_errors(path):
            try:
                with open_folder(path.parent) as parent:
                    return self.discard_in(parent, path.name)
            except FileNotFoundError:
                return False

    def discard_in(self, folder: int, name: str) -> bool:
        """Like ``discard``, for a name in an open folder: for paths whose parts a job may have written."""
        with disk_errors(self._folder / name):
            make_folder(self._folder, _OURS, is_durable=True)
            with open_folder(self._folder) as trash:
                is_found = _move(folder, name, trash)
                os.fsync(trash)
            os.fsync(folder)  # always: an earlier process may have been killed before this line
        self._wake.set()
        return is_found

    def sweep(self) -> None:
        """Delete the contents. Blocking. Failures are logged once and retried later. Raises ``DiskFailedError``."""
        with disk_errors(self._folder), suppress(FileNotFoundError), opened(self._folder, _FOLDER) as trash:
            sweep = _Sweep(trash, os.fstat(trash).st_dev, self._stop)
            while sweep.empty(trash, 0):
                pass  # folders that were too deep are at the top now
            if sweep.complaint not in ("", self._complaint):
                logger.warning(
                    "cannot delete everything in %s; retrying once a minute: %s", self._folder, sweep.complaint
                )
            self._complaint = sweep.complaint

    def _run(self) -> None:
        prefer_others()
        while not self._stop.is_set():
            self._wake.clear()
            try:
                self.sweep()
            except DiskFailedError as error:
                logger.warning("cannot empty the trash %s; retrying once a minute: %s", self._folder, error)
            self._wake.wait(_AGAIN_SECONDS)


@dataclass
class _Sweep:
    """One pass through ``trash``, an open folder on ``device``. ``complaint``: why something is left."""

    trash: int
    device: int
    stop: threading.Event
    complaint: str = ""

    def empty(self, folder: int, depth: int) -> bool:
        """Delete a folder's contents. Returns whether anything was deleted or moved up."""
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
                    pass  # another node deleted it first
                except OSError as error:
                    self.complaint = self.complaint or str(error)
        return is_changed

    def _delete_folder(self, folder: int, name: str, depth: int) -> None:
        _open_up(folder, name)
        if depth >= _DEEPEST:
            _move(folder, name, self.trash)
            return
        with opened(name, _FOLDER, folder) as below:
            if os.fstat(below).st_dev == self.device:  # otherwise a mount, which is not ours to delete
                for _ in range(_PASSES):
                    if not self.empty(below, depth + 1):
                        break
        os.rmdir(name, dir_fd=folder)


def _move(folder: int, name: str, trash: int) -> bool:
    """Move into the trash, under a fresh random name. Returns False if there is nothing to move."""
    fresh = secrets.token_hex(16)
    try:
        with suppress(NotADirectoryError, PermissionError):
            _open_up(folder, name)  # moving a folder elsewhere requires write permission on the folder
        os.rename(name, fresh, src_dir_fd=folder, dst_dir_fd=trash)
    except FileNotFoundError:
        return False
    return True


def _open_up(folder: int, name: str) -> None:
    """Give the agent access to a folder that denies it, if the agent owns the folder."""
    with opened(name, _PLACE, folder) as place:
        if os.fstat(place).st_mode & _OURS != _OURS:
            Path(f"/proc/self/fd/{place}").chmod(_OURS)  # this very folder, even if its name now belongs to another
