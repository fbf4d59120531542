"""Content written past the page cache, where the file system allows it.

Through the cache a disk takes a third of what it can take, each byte is copied once more, and what jobs read is pushed out.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from bdn.disk.durable import write_all

logger = logging.getLogger(__name__)

BLOCK: Final = (
    mmap.PAGESIZE
)  # places, lengths and memory are whole multiples: enough for every disk that Linux boots from
LEAST_BYTES: Final = 256 * 1024  # below that a trip through the cache costs less than waiting for the disk


class DirectWrites:
    """Whether the files of one cache directory are written directly, and if not, why. Shared by threads."""

    def __init__(self) -> None:
        self.reason: str | None = None

    @property
    def are_direct(self) -> bool:
        """Whether the next file is opened for direct writes."""
        return self.reason is None

    def probe(self, folder: Path) -> None:
        """Find out by writing one block below ``folder``, so that people can see it before the first fill.

        A disk that is full or broken tells nothing about that; then the first write finds out.
        """
        file = PlacedFile(folder / "direct.probe", self)
        with suppress(OSError):
            try:
                file.open()
                file.write(memoryview(mmap.mmap(-1, BLOCK)), 0, least=BLOCK)
            finally:
                file.close()
                file.path.unlink(missing_ok=True)

    def refused(self, path: Path, error: OSError) -> None:
        """The file system does not take direct writes, and nobody tries again: said once, in the log."""
        if self.reason is None:
            self.reason = f"{path.parent}: the file system takes no direct writes ({error.strerror})"
            logger.warning("files are written through the page cache, which is slower: %s", self.reason)


class PlacedFile:
    """A file that several threads write at places of their own: whole blocks directly, the rest through the page cache.

    ``descriptor`` is the one for the page cache, for everything else that is done with a file. Methods raise ``OSError``.
    """

    def __init__(self, path: Path, writes: DirectWrites) -> None:
        self.descriptor = -1
        self.path = path
        self._writes = writes
        self._direct = -1

    def open(self) -> None:
        """Open it, and make it where it is absent. After a failure, ``close`` is still due."""
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._writes.are_direct:
            try:
                self._direct = os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._writes.refused(self.path, error)

    def write(self, content: memoryview, offset: int, *, least: int = LEAST_BYTES) -> None:
        """All of it. What is on the disk afterwards is known after a sync, whichever way it went."""
        done = self._write_blocks(content, offset) if len(content) >= least else 0
        write_all(self.descriptor, content[done:], offset + done)

    def _write_blocks(self, content: memoryview, offset: int) -> int:
        """Whole blocks, for as long as the file system takes them; how many bytes that were."""
        done, stop = 0, len(content) - len(content) % BLOCK
        while self._direct >= 0 and self._writes.are_direct and done < stop and (offset + done) % BLOCK == 0:
            try:
                count = os.pwrite(self._direct, content[done:stop], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._writes.refused(self.path, error)
                break
            if not count:  # the other way fails with a reason
                break
            done += count
        return done

    def close(self) -> None:
        """Let go of it. Idempotent."""
        for descriptor in (self._direct, self.descriptor):
            if descriptor >= 0:
                with suppress(
                    OSError
                ):  # closing tells of lost pages on some file systems; whoever synced knows already
                    os.close(descriptor)
        self._direct = self.descriptor = -1
