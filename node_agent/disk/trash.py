"""What is removed goes from its name at once, and its bytes later: a job of a million files holds up nobody."""

import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from bdn.disk.durable import disk_errors, make_folder, opened, sync_folder
from bdn.disk.syscalls import prefer_others

logger = logging.getLogger(__name__)
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PLACE: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_NAMES_AT_ONCE: Final = 10_000
_NAME_BYTES: Final = 16


class Trash:
    """A folder, private to the agent, whose content is deleted by one thread in the background. A context manager.

    What lies in it was renamed into it, and may still be written by whoever has it open. So nothing in it is looked at by a path, and
    no link is followed. Its depth does not matter: folders are renamed up into the trash before they are emptied.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trash", daemon=True)

    def __enter__(self) -> Self:
        """Make the folder, and go on with what an earlier run left. Raises ``DiskFailedError``."""
        with disk_errors(self.folder):
            make_folder(self.folder, 0o700)
            self.folder.chmod(0o700)
        self._wake.set()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._wake.set()
        self._thread.join()

    def discard(self, path: Path) -> None:
        """Take a file or a folder away, durably; one that is absent changes nothing. Blocking, and short.

        It lies on the trash's file system, and is no link. Raises ``DiskFailedError``: it stands where it was.
        """
        with disk_errors(path), suppress(FileNotFoundError):
            path.rename(self.folder / _fresh())
            sync_folder(path.parent)
        self._wake.set()

    def _run(self) -> None:
        prefer_others()
        while not self._is_closing.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                self._sweep()
            except OSError as error:
                logger.warning("%s cannot be emptied: %s", self.folder, error)

    def _sweep(self) -> None:
        failed: set[str] = set()
        with opened(self.folder, _FOLDER) as trash:
            while not self._is_closing.is_set():
                left = [name for name in _some_names(trash, len(failed)) if name not in failed]
                if not left:
                    return
                for name in left:
                    try:
                        self._delete(trash, name)
                    except OSError as error:
                        failed.add(name)
                        logger.warning("%s in %s cannot be deleted: %s", name, self.folder, error.strerror)

    def _delete(self, trash: int, name: str) -> None:
        if not stat.S_ISDIR(os.stat(name, dir_fd=trash, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=trash)
            return
        with _to_be_emptied(trash, name) as folder:
            while names := _some_names(folder):
                for one in names:
                    if self._is_closing.is_set():
                        return
                    _take_out(trash, folder, one)
        os.rmdir(name, dir_fd=trash)


def _take_out(trash: int, folder: int, name: str) -> None:
    """A file is deleted, and a folder becomes one of the trash itself. Whoever still writes there may have been faster."""
    with suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=folder)
        except (IsADirectoryError, PermissionError):
            with _writable(folder, name):
                os.rename(name, _fresh(), src_dir_fd=folder, dst_dir_fd=trash)


@contextmanager
def _to_be_emptied(trash: int, name: str) -> Iterator[int]:
    with _writable(trash, name), opened(name, _FOLDER, trash) as folder:
        yield folder


@contextmanager
def _writable(folder: int, name: str) -> Iterator[None]:
    """With a folder that its owner may list and move, whatever the job made of its mode."""
    with opened(name, _PLACE, folder) as place:
        with suppress(PermissionError):  # somebody else's: root needs no mode, and others cannot help it
            Path(f"/proc/self/fd/{place}").chmod(0o700)
        yield


def _some_names(folder: int, more: int = 0) -> list[str]:
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) >= _NAMES_AT_ONCE + more:
                break
    return names


def _fresh() -> str:
    return secrets.token_hex(_NAME_BYTES)
