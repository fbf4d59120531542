"""The right bytes at the place of wrong ones: in the same file, so that views, open files and mappings of jobs heal with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from bdn.core.errors import DiskFailedError
from bdn.core.store.layout import PlacedChunk
from bdn.disk.durable import disk_errors, write_all
from bdn.disk.past_cache import PastCacheFile
from bdn.transfer.buffers import BufferPool

_READ_ONLY: Final = 0o444
_OURS: Final = 0o644


@dataclass(frozen=True)
class Mending:
    """Changes files that others see. Blocking; each method raises ``DiskFailedError``."""

    buffers: BufferPool

    def check(self, path: Path) -> None:
        """Whether anything can be written to the file at all: otherwise nothing need be fetched for it."""
        with disk_errors(path), _found(path) as found:
            os.close(_reopened(found))

    def put_back(self, path: Path, chunk: PlacedChunk, content: memoryview) -> None:
        """Write a verified chunk at its place, durably, and read it back from the disk.

        Through the page cache, so that who has the file mapped sees the right bytes at once. A kill on the way leaves a
        chunk that is wrong, as it was.
        """
        with disk_errors(path):
            with _writable(path) as descriptor:
                write_all(descriptor, content, chunk.range.start)
            with self.buffers.take(CHUNK_SIZE) as buffer, PastCacheFile(path) as file:
                count = file.read(buffer, chunk.range.start, chunk.range.size)
                is_right = count == chunk.range.size and digest_of(buffer[:count]) == chunk.digest
        if not is_right:
            raise DiskFailedError(str(path), f"chunk {chunk.index} is not what was just written there")

    def cut(self, path: Path, size: int) -> None:
        """Take away what stands beyond the end."""
        with disk_errors(path), _writable(path) as descriptor:
            os.ftruncate(descriptor, size)


@contextmanager
def _writable(path: Path) -> Iterator[int]:
    """Our own file, which is read-only for everybody, open for writing; synced at the end, and as old as it was.

    A copy in a view is told from a file that somebody wrote to by its age (``view.check``), so the age stays.
    """
    with _found(path) as found:
        descriptor = _reopened(found)
        try:
            before = os.fstat(descriptor)
            yield descriptor
            os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _found(path: Path) -> Iterator[int]:
    found = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield found
    finally:
        os.close(found)


def _reopened(found: int) -> int:
    """The very file that was found, whatever stands under its name by now."""
    os.fchmod(found, _OURS)
    try:
        return os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.fchmod(found, _READ_ONLY)
