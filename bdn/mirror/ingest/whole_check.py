"""A file's checksum while its chunks pass through byte threads in whatever order they come.

Hashing a chunk while it is hot costs nothing but the hashing; reading a large file back afterwards would cost as much disk
as writing it did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from bdn.core.chunk import chunk_count, chunk_range
from bdn.core.digest import Digest
from bdn.core.ports import Buffer
from bdn.core.source.upstream import Checksum
from bdn.transfer.checksums import OrderedChecksum, PartChecksums, RunningChecksum, part_checksum

TURN_SECONDS: Final = 1.0  # how long a byte thread that holds a chunk waits for the chunk before it

ReadBack = Callable[[Digest, memoryview], None]


class WholeCheck(Protocol):
    """Takes chunks, then says whether the file is the right one."""

    def take(self, index: int, digest: Digest, buffer: memoryview) -> None:
        """A chunk that is stored, while it is hot. Called in byte threads, in any order; ``buffer`` may be used up."""
        ...

    def left(self) -> Sequence[int]:
        """Once every chunk is stored: the chunks that have to be read back, in this order, and given to ``take_back``."""
        ...

    def take_back(self, index: int, content: Buffer) -> None:
        """A chunk that was read back."""
        ...

    def check(self, subject: str) -> None:
        """Raise ``ChecksumMismatchError`` unless it is the right file."""
        ...

    def stop(self) -> None:
        """Nobody waits for the outcome any more, so threads stop waiting, too."""
        ...


def check_at_once(expected: Checksum, content: Buffer, subject: str) -> None:
    """For a file whose bytes are all in one buffer: raise ``ChecksumMismatchError`` unless it is the right file."""
    checksum = RunningChecksum(expected, len(content))
    checksum.update(content)
    checksum.check(subject)


def whole_check(expected: Checksum, size: int, stored: Mapping[int, Digest], read_back: ReadBack) -> WholeCheck:
    """The check for a file of ``size`` bytes of which the chunks ``stored`` will not be fetched."""
    if expected.kind.is_combinable:
        return _Parts(expected, size)
    return _InOrder(expected, size, stored, read_back)


class _Parts:
    """Each chunk's checksum by itself; they are combined at the end."""

    def __init__(self, expected: Checksum, size: int) -> None:
        self._parts = PartChecksums(expected, size)

    def take(self, index: int, digest: Digest, buffer: memoryview) -> None:  # noqa: ARG002 - nothing is read back here
        self.take_back(index, buffer)

    def left(self) -> Sequence[int]:
        return self._parts.missing

    def take_back(self, index: int, content: Buffer) -> None:
        self._parts.offer(index, part_checksum(self._parts.kind, content))

    def check(self, subject: str) -> None:
        self._parts.check(subject)

    def stop(self) -> None:
        """Nobody ever waits."""


class _InOrder:
    """One after the other: a chunk that arrives too early waits a moment for the chunk before it, in its thread.

    Then it is passed over, and a later caller reads it back, as it does chunks that were stored before.
    """

    def __init__(self, expected: Checksum, size: int, stored: Mapping[int, Digest], read_back: ReadBack) -> None:
        self._size = size
        self._ordered = OrderedChecksum(expected, size)
        self._passed_over = dict(stored)
        self._read_back = read_back
        self._catching_up = threading.Lock()
        self._stopped = False
        self._rest: RunningChecksum | None = None

    def take(self, index: int, digest: Digest, buffer: memoryview) -> None:
        wait_seconds = 0.0 if self._ordered.next_index in self._passed_over else TURN_SECONDS
        if not self._ordered.offer(index, buffer, wait_seconds):
            self._passed_over[index] = digest
        # A passes 5 over; B has just taken 4, and saw no 5. So both look, and at the end ``left`` does.
        if self._catching_up.acquire(blocking=False):
            try:
                self._catch_up(buffer)
            finally:
                self._catching_up.release()

    def _catch_up(self, buffer: memoryview) -> None:
        while not self._stopped and (index := self._ordered.next_index) in self._passed_over:
            size = chunk_range(self._size, index).size
            if size > len(buffer):  # that of the last chunk, which is shorter: somebody else will come by
                return
            self._read_back(self._passed_over[index], buffer[:size])
            self._ordered.offer(index, buffer[:size], 0)

    def left(self) -> Sequence[int]:
        start, self._rest = self._ordered.hand_over()
        return range(start, chunk_count(self._size))

    def take_back(self, index: int, content: Buffer) -> None:  # noqa: ARG002 - they come in order
        if self._rest is not None:
            self._rest.update(content)

    def check(self, subject: str) -> None:
        if self._rest is not None:
            self._rest.check(subject)

    def stop(self) -> None:
        self._stopped = True
        self._ordered.hand_over()
