"""Small files and folders that survive a power cut, and the one place where the disk's errors become ours."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bdn.core.errors import DiskFailedError


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Around disk work on ``path``: an ``OSError`` is DISK_FAILED with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise DiskFailedError(os.fsdecode(error.filename or path), error.strerror or str(error)) from error


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a small file: written aside, synced, renamed, and the folder synced. Old or new, never half."""
    aside = path.with_name(f"{path.name}.tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            write_all(descriptor, memoryview(content), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
    sync_folder(path.parent)


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of it at ``offset``, however many calls the kernel takes."""
    while content:
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, mode: int) -> None:
    """A folder, and those above it, with exactly this mode whatever the umask. One that is there stays as it is."""
    if folder.is_dir():
        return
    make_folder(folder.parent, mode)
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)


def remove_tree(root: Path) -> None:
    """Remove a folder and everything below it, or a file or link; an absent one changes nothing."""
    if root.is_symlink() or root.is_file():
        root.unlink(missing_ok=True)
    elif root.exists():
        shutil.rmtree(root)


def remove_empty(folder: Path, stop: Path) -> None:
    """Remove ``folder`` and its parents below ``stop`` as far as they are empty or absent."""
    while folder != stop and stop in folder.parents:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return  # not empty: something else needs it
        folder = folder.parent


class DurableFolders:
    """Makes folders that survive a power cut, and remembers which do. Shared by threads.

    A makes a folder and has not synced its parent yet; B finds the folder and commits a file in it; the power goes, and
    B's file with it. So B waits for A here, although the folder exists.
    """

    def __init__(self) -> None:
        self._durable: set[Path] = set()
        self._lock = threading.Lock()

    def make(self, folder: Path, above: Path) -> None:
        """Make ``folder``, which lies below ``above``, and every folder between."""
        if folder in self._durable:
            return
        with self._lock:
            for path in (*reversed(folder.parents), folder):
                if above in path.parents and path not in self._durable:
                    path.mkdir(mode=0o755, exist_ok=True)
                    sync_folder(path.parent)
                    self._durable.add(path)

    def make_unsynced(self, folders: Iterable[Path], above: Path) -> list[Path]:
        """Make many at once; returns those, from the top down, that may not be durable: sync their parents, ``remember``."""
        fresh: dict[Path, None] = {}
        for folder in folders:
            missing: list[Path] = []
            while folder != above and folder not in self._durable and folder not in fresh:
                missing.append(folder)
                folder = folder.parent  # noqa: PLW2901 - upwards, until one that is there
            for path in reversed(missing):
                path.mkdir(mode=0o755, exist_ok=True)
                fresh[path] = None
        return list(fresh)

    def remember(self, folders: Iterable[Path]) -> None:
        """These folders' parents were synced since the folders were made."""
        with self._lock:
            self._durable.update(folders)
