"""What the disk holds, and not what the page cache remembers of it: rot shows in the one and not in the other."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from bdn.disk.direct import BLOCK


class PastCacheFile:
    """A file that is read from the disk itself: directly or, where the file system refuses that, after its pages were dropped.

    A context manager. Methods raise ``OSError``. Pages that are not written back yet are written first, and then read. What
    somebody has mapped cannot be dropped: there the page cache may answer after all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = self._direct = -1

    def __enter__(self) -> Self:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags)
        with suppress(OSError):  # then the other way, which tells what is wrong with it
            self._direct = os.open(self._path, flags | os.O_DIRECT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for descriptor in (self._direct, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)

    @property
    def status(self) -> os.stat_result:
        """The file's size, mode and times."""
        return os.fstat(self._descriptor)

    def read(self, buffer: memoryview, offset: int, size: int) -> int:
        """Up to ``size`` bytes from ``offset``, a multiple of a block; fewer only at the end of the file.

        ``buffer`` is page-aligned and has room for whole blocks.
        """
        if self._direct >= 0:
            try:
                return min(size, self._read(self._direct, buffer[: -(-size // BLOCK) * BLOCK], offset))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)
                self._direct = -1
        self._drop(offset, size)
        try:
            return self._read(self._descriptor, buffer[:size], offset)
        finally:
            self._drop(offset, size)  # what jobs read shall not be pushed out by what nobody will read again

    @staticmethod
    def _read(descriptor: int, buffer: memoryview, offset: int) -> int:
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            done += count
            if not count or done % BLOCK:  # the end of the file
                break
        return done

    def _drop(self, offset: int, size: int) -> None:
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)
