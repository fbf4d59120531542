"""Files written and read with ``O_DIRECT``, past the page cache, if the file system supports it.

Writes through the cache reach a third of a disk's throughput, copy each byte once more, and evict what jobs read
(docs/adr/0011). Reads through it hide damage of the disk.
"""

import errno
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from bdn.disk.durable import write_all
from bdn.disk.syscalls import REFUSED

logger = logging.getLogger(__name__)

# Offsets, lengths and memory are multiples of a page, which suits every disk that Linux boots from.
BLOCK: Final = mmap.PAGESIZE
_NOT_DIRECT: Final = REFUSED | {errno.EINVAL}
LEAST_BYTES: Final = 256 * 1024  # fewer bytes through the cache cost less than waiting for the disk


class DirectWrites:
    """Whether the files of one directory are written directly and, if not, why. Thread-safe."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_proven = False

    @property
    def are_direct(self) -> bool:
        return self.reason is None

    @property
    def is_known(self) -> bool:
        """Whether ``probe`` had a result: False on a full or broken disk."""
        return self._is_proven or self.reason is not None

    def probe(self, folder: Path) -> None:
        """Write one block below ``folder``, so that the result is known before the first real file.

        A full or broken disk leaves the result open; the first write decides then.
        """
        file = DirectFile(folder / f"direct.probe-{os.getpid()}", self)
        with suppress(OSError):
            try:
                file.open()
                file.write(memoryview(mmap.mmap(-1, BLOCK)), 0, least=BLOCK)
                self._is_proven = self.are_direct
            finally:
                file.close()
                file.path.unlink(missing_ok=True)

    def refused(self, path: Path, error: OSError) -> None:
        """The file system refuses direct writes: log it once, and do not try again.

        After a successful probe, ``EINVAL`` only means that this buffer is not page-aligned.
        """
        if self.reason is None and not self._is_proven:
            self.reason = f"{path.parent}: the file system refuses direct writes ({error.strerror})"
            logger.warning("writing files through the page cache, which is slower: %s", self.reason)


class DirectFile:
    """A file that several threads write at different offsets: whole blocks directly, others through the page cache.

    ``descriptor`` uses the page cache, for all other operations. Methods raise ``OSError``.
    """

    def __init__(self, path: Path, writes: DirectWrites) -> None:
        self.descriptor = -1
        self.path = path
        self._writes = writes
        self._direct = -1

    def open(self) -> None:
        """Open or create the file, mode 0600. Call ``close`` also after a failure."""
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._writes.are_direct:
            try:
                self._direct = os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self._writes.refused(self.path, error)

    def write(self, content: memoryview, offset: int, *, least: int = LEAST_BYTES) -> None:
        """Write ``content``; fewer than ``least`` bytes through the page cache. Durable after a sync, either way."""
        done = self._write_blocks(content, offset) if len(content) >= least else 0
        write_all(self.descriptor, content[done:], offset + done)

    def _write_blocks(self, content: memoryview, offset: int) -> int:
        """Write whole blocks until the file system refuses. Returns the number of bytes written."""
        done, stop = 0, len(content) - len(content) % BLOCK
        while self._direct >= 0 and self._writes.are_direct and done < stop and (offset + done) % BLOCK == 0:
            try:
                count = os.pwrite(self._direct, content[done:stop], offset + done)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self._writes.refused(self.path, error)
                break
            if not count:  # the write through the page cache will fail with a reason
                break
            done += count
        return done

    def close(self) -> None:
        for descriptor in (self._direct, self.descriptor):
            if descriptor >= 0:
                with suppress(OSError):  # some file systems report lost pages here; a sync has reported them before
                    os.close(descriptor)
        self._direct = self.descriptor = -1


def write_read_only(path: Path, content: memoryview, writes: DirectWrites) -> None:
    """Write a whole file that does not change any more. Durable, except for its name. Raises ``OSError``."""
    file = DirectFile(path, writes)
    try:
        file.open()
        file.write(content, 0)
        os.fchmod(file.descriptor, 0o444)
        os.fdatasync(file.descriptor)
    finally:
        file.close()


class UncachedFile:
    """Reads a file from the disk itself: directly or, if the file system refuses that, after dropping its pages.

    A context manager. Methods raise ``OSError``. Dirty pages are written back first. Mapped pages cannot be dropped,
    nor can any in a sandbox that refuses direct reads and advice; the page cache may then answer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = self._direct = -1

    def __enter__(self) -> Self:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags)
        with suppress(OSError):  # reads through the cache then report the problem
            self._direct = os.open(self._path, flags | os.O_DIRECT)
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._direct, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)

    def read(self, buffer: memoryview, offset: int, size: int) -> int:
        """Read up to ``size`` bytes at ``offset``, a multiple of a block; fewer only at the end of the file.

        ``buffer`` is page-aligned and has room for whole blocks.
        """
        if self._direct >= 0:
            try:
                return min(size, self._read(self._direct, buffer[: -(-size // BLOCK) * BLOCK], offset))
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                os.close(self._direct)
                self._direct = -1
        self._drop(offset, size)
        try:
            return self._read(self._descriptor, buffer[:size], offset)
        finally:
            self._drop(offset, size)  # do not evict what jobs read

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
        with suppress(OSError):  # refused by a sandbox: the page cache answers
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)
