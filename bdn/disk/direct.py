"""Files written and read past the page cache (``O_DIRECT``), where the file system allows it.

Writing through the cache reaches a third of a disk's throughput, copies each byte once more, and evicts what jobs read
(docs/adr/0011). Reading through it hides what the disk has become.
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

# Offsets, lengths and memory are multiples of it, which is enough for every disk Linux boots from.
BLOCK: Final = mmap.PAGESIZE
_NOT_DIRECT: Final = REFUSED | {errno.EINVAL}
LEAST_BYTES: Final = 256 * 1024  # writing less through the cache costs less than waiting for the disk


class DirectWrites:
    """Whether the files of one directory are written directly and, if not, why. Shared by threads."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_proven = False

    @property
    def are_direct(self) -> bool:
        """Whether the next file is opened for direct writes."""
        return self.reason is None

    def probe(self, folder: Path) -> None:
        """Write one block below ``folder``, so that the result is known before the first real file.

        A disk that is full or broken leaves the question open; then the first write answers it.
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
        """The file system takes no direct writes: logged once, and not tried again.

        After a successful probe ``EINVAL`` says that this one buffer is not page-aligned, and nothing about the file system.
        """
        if self.reason is None and not self._is_proven:
            self.reason = f"{path.parent}: the file system takes no direct writes ({error.strerror})"
            logger.warning("files are written through the page cache, which is slower: %s", self.reason)


class DirectFile:
    """A file that several threads write at different offsets: whole blocks directly, the rest through the page cache.

    ``descriptor`` goes through the page cache, for everything else that is done with the file. Methods raise ``OSError``.
    """

    def __init__(self, path: Path, writes: DirectWrites) -> None:
        self.descriptor = -1
        self.path = path
        self._writes = writes
        self._direct = -1

    def open(self) -> None:
        """Open or create it, mode 0600. ``close`` is needed after a failure, too."""
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._writes.are_direct:
            try:
                self._direct = os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self._writes.refused(self.path, error)

    def write(self, content: memoryview, offset: int, *, least: int = LEAST_BYTES) -> None:
        """Write all of ``content``; less than ``least`` bytes go through the page cache. Durable after a sync, either way."""
        done = self._write_blocks(content, offset) if len(content) >= least else 0
        write_all(self.descriptor, content[done:], offset + done)

    def _write_blocks(self, content: memoryview, offset: int) -> int:
        """Write whole blocks for as long as the file system takes them; returns the bytes written."""
        done, stop = 0, len(content) - len(content) % BLOCK
        while self._direct >= 0 and self._writes.are_direct and done < stop and (offset + done) % BLOCK == 0:
            try:
                count = os.pwrite(self._direct, content[done:stop], offset + done)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self._writes.refused(self.path, error)
                break
            if not count:  # the write through the page cache fails with a reason
                break
            done += count
        return done

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
        for descriptor in (self._direct, self.descriptor):
            if descriptor >= 0:
                with suppress(OSError):  # some file systems report lost pages here; whoever synced knows already
                    os.close(descriptor)
        self._direct = self.descriptor = -1


class UncachedFile:
    """A file read from the disk itself: directly or, where the file system refuses that, after its pages were dropped.

    A context manager. Methods raise ``OSError``. Dirty pages are written back first. Mapped pages cannot be dropped, and none
    in a sandbox that refuses direct reads and advice: there the page cache may answer after all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = self._direct = -1

    def __enter__(self) -> Self:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags)
        with suppress(OSError):  # reading through the cache then reports what is wrong
            self._direct = os.open(self._path, flags | os.O_DIRECT)
        return self

    def __exit__(self, *_: object) -> None:
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
        with suppress(OSError):  # a sandbox refuses it: the page cache answers
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)
