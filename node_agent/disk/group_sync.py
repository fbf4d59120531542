"""Syncs many small files at once: syncing one after the other costs a trip to the disk for each."""

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from bdn.core.errors import DiskFailedError
from bdn.disk.durable import disk_errors, opened
from bdn.disk.syscalls import file_system_magic, sync_file_system
from bdn.disk.threads import in_thread

FEW: Final = 8  # below this, files are synced one by one, without waiting for other programs' dirty pages

# File systems whose syncfs(2) is known to write everything back and to report failures: ext4, xfs, btrfs, f2fs, and
# tmpfs, which has nothing to write. Not overlayfs, which hides errors of the file system below, nor FUSE, where syncfs
# may not reach the server at all.
_TRUSTED: Final = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
_TELLS_ERRORS: Final = (5, 8)  # Linux; before, syncfs succeeded even if pages were lost (its manual page)


class GroupSync:
    """One file system's ``syncfs``, shared by concurrent callers. A context manager.

    A call during a running syncfs waits for the next one, since the running one may have passed its pages already. One
    syncfs serves all waiting callers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1
        self._is_trusted = False
        self._lock = asyncio.Lock()
        self._begun = self._done = self._failures = 0

    def __enter__(self) -> Self:
        with disk_errors(self._folder):
            self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._is_trusted = is_trusted(self._descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def mark(self) -> int:
        """Call before the first byte is written, and pass the result to ``sync``."""
        return self._failures

    async def sync(self, paths: Sequence[str | os.PathLike[str]], mark: int) -> None:
        """Make durable what was written to these files and folders since ``mark``.

        Raises:
            DiskFailedError: the data may not be durable. The kernel reports each failure once, to the first caller; so
                any failure since ``mark`` counts for all callers.
        """
        if len(paths) < FEW or not self._is_trusted:
            await in_thread(_sync_each, paths)
            return
        wanted = self._begun + 1
        async with self._lock:
            if self._done < wanted:
                self._begun += 1
                await in_thread(self._call, self._begun)
        if self._done < wanted:  # the kernel or a sandbox refused syncfs
            await in_thread(_sync_each, paths)
        if self._failures != mark:
            raise DiskFailedError(str(self._folder), "the kernel could not write earlier files back to the disk")

    def _call(self, number: int) -> None:
        """Records the outcome here, because a canceled caller does not see it, and the kernel reports it once."""
        try:
            with disk_errors(self._folder):
                self._is_trusted = sync_file_system(self._descriptor)
        except DiskFailedError:
            self._failures += 1
            raise
        if self._is_trusted:
            self._done = number


def _sync_each(paths: Sequence[str | os.PathLike[str]]) -> None:
    """The files may be closed: a descriptor opened later gets failures that were not reported yet."""
    for path in paths:
        with disk_errors(Path(path)), opened(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)


def is_trusted(descriptor: int) -> bool:
    """Whether ``syncfs`` on the folder's file system writes everything back, and reports failures."""
    return kernel_version() >= _TELLS_ERRORS and file_system_magic(descriptor) in _TRUSTED


def kernel_version() -> tuple[int, int]:
    """``(0, 0)`` if the release has another form."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
