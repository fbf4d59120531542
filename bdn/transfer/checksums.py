"""Whole-file checksums of upstreams: over bytes in order, over chunks nearly in order, and over chunks in any order.

The last is for cyclic checksums (CRC): the value of a whole follows from its parts' values. Measured on 8 MiB, one
thread: CRC32 by zlib 7.1 GB/s (awscrt 3.5), CRC32C by awscrt 66 GB/s (google-crc32c 31, and it takes no memoryview),
CRC64NVME by awscrt 67 GB/s. zlib and awscrt release the GIL.
"""

import hashlib
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from awscrt import checksums

from bdn.core.chunk import Buffer, chunk_count, chunk_range
from bdn.core.errors import ChecksumMismatchError
from bdn.core.source.upstream import Checksum, ChecksumKind


@dataclass(frozen=True, slots=True)
class Cyclic:
    """A kind of cyclic checksum. The value of zero bytes is 0."""

    bits: int
    go_on: Callable[[Buffer, int], int]  # content, value of the bytes before it
    combine: Callable[[int, int, int], int]  # value of a part, value of the next part, its size

    def format(self, value: int) -> str:
        """In the form of upstreams: big-endian hexadecimal, all digits."""
        return f"{value:0{self.bits // 4}x}"


CYCLIC: Final[Mapping[ChecksumKind, Cyclic]] = MappingProxyType(
    {
        ChecksumKind.CRC32: Cyclic(32, zlib.crc32, checksums.combine_crc32),
        ChecksumKind.CRC32C: Cyclic(32, checksums.crc32c, checksums.combine_crc32c),
        ChecksumKind.CRC64NVME: Cyclic(64, checksums.crc64nvme, checksums.combine_crc64nvme),
    }
)


class _Hasher(Protocol):
    def update(self, content: Buffer, /) -> None: ...
    def hexdigest(self) -> str: ...


class _RunningCyclic:
    def __init__(self, cyclic: Cyclic) -> None:
        self._cyclic = cyclic
        self._value = 0

    def update(self, content: Buffer, /) -> None:
        self._value = self._cyclic.go_on(content, self._value)

    def hexdigest(self) -> str:
        return self._cyclic.format(self._value)


class RunningChecksum:
    """The checksum of a file's bytes, given in order from the first to the last."""

    def __init__(self, expected: Checksum, size: int) -> None:
        self._expected = expected
        self._hasher = _new_hasher(expected.kind, size)

    def update(self, content: Buffer) -> None:
        """Add the next bytes. Releases the GIL for large pieces."""
        self._hasher.update(content)

    def check(self, subject: str) -> None:
        """Call after the last byte. Raises ``ChecksumMismatchError`` if the checksum differs."""
        check_equal(self._expected, self._hasher.hexdigest(), subject)


def check_equal(expected: Checksum, actual: str, subject: str) -> None:
    """Raises ``ChecksumMismatchError`` with both values if they differ."""
    if actual != expected.hex:
        raise ChecksumMismatchError(subject, f"{expected.kind}:{expected.hex}", f"{expected.kind}:{actual}")


def _new_hasher(kind: ChecksumKind, size: int) -> _Hasher:
    match kind:
        case ChecksumKind.SHA256:
            return hashlib.sha256()
        case ChecksumKind.SHA1:
            return hashlib.sha1(usedforsecurity=False)
        case ChecksumKind.GIT_BLOB:
            return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        case ChecksumKind.MD5:
            return hashlib.md5(usedforsecurity=False)
        case ChecksumKind.CRC32 | ChecksumKind.CRC32C | ChecksumKind.CRC64NVME:
            return _RunningCyclic(CYCLIC[kind])


class OrderedChecksum:
    """A checksum over bytes in order, of chunks that arrive out of order. Chunks are numbered from 0.

    A chunk that arrives at its turn is hashed while it is in memory. An early chunk may wait briefly for its turn, in
    its byte thread and with its buffer. If that takes too long, it is left out, and so are all chunks after it: in the
    end the caller reads these chunks back from the store. So the common case reads nothing twice, and no thread is
    blocked for long. Shared by the byte threads that fetch one file's chunks.
    """

    def __init__(self, expected: Checksum, size: int) -> None:
        self._running = RunningChecksum(expected, size)
        self._next = 0
        self._is_busy = False  # a thread is hashing chunk ``_next``, without holding the lock
        self._is_over = False
        self._turn = threading.Condition()

    @property
    def next_index(self) -> int:
        with self._turn:
            return self._next

    def offer(self, index: int, content: Buffer, wait_seconds: float) -> bool:
        """Hash chunk ``index`` if its turn is now or comes within ``wait_seconds``; returns whether it is hashed.

        A chunk that was hashed before, and fetched again because it could not be stored, is not hashed twice. The GIL
        is released during hashing; other threads may offer, wait and leave meanwhile.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._is_over or index <= self._next, wait_seconds)
            # Two threads may have the same chunk, when a fetch was wrongly given up as lost: the second thread waits.
            while self._is_busy and index == self._next:
                self._turn.wait()
            if index < self._next:
                return True
            if self._is_over or index != self._next:
                return False
            self._is_busy = True
        taken = 0
        try:
            self._running.update(content)
            taken = 1
        finally:
            with self._turn:
                self._is_busy = False
                self._next += taken
                self._turn.notify_all()
        return True

    def hand_over(self) -> tuple[int, RunningChecksum]:
        """Stop accepting and waiting. The caller continues with the returned chunk and the chunks after it.

        If the index equals the number of chunks, only the check is left.
        """
        with self._turn:
            self._is_over = True
            self._turn.notify_all()
            while self._is_busy:
                self._turn.wait()
            return self._next, self._running


def part_checksum(kind: ChecksumKind, content: Buffer) -> int:
    """Checksum of one chunk, for ``PartChecksums``. Releases the GIL. Cheap while the chunk is in the CPU cache."""
    return CYCLIC[kind].go_on(content, 0)


class PartChecksums:
    """Combines checksums of a file's chunks, offered in any order and from any thread."""

    def __init__(self, expected: Checksum, size: int) -> None:
        if not expected.kind.is_combinable:
            raise ValueError(f"{expected.kind} of a file cannot be computed from the checksums of its parts")
        self._expected = expected
        self._size = size
        self._parts: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def kind(self) -> ChecksumKind:
        return self._expected.kind

    @property
    def missing(self) -> tuple[int, ...]:
        """Chunks not offered: those that an earlier attempt stored have to be read again."""
        with self._lock:
            return tuple(index for index in range(chunk_count(self._size)) if index not in self._parts)

    def offer(self, index: int, part: int) -> None:
        """Add the checksum of chunk ``index``; if it is offered twice, the last one counts."""
        chunk_range(self._size, index)  # ValueError: the file has no such chunk
        with self._lock:
            self._parts[index] = part

    def check(self, subject: str) -> None:
        """Call after the last chunk. Raises ``ChecksumMismatchError`` if the chunks do not make up the file."""
        if missing := self.missing:
            raise ValueError(f"{len(missing)} chunks of {subject} were not offered")
        cyclic, whole = CYCLIC[self._expected.kind], 0
        for index in range(chunk_count(self._size)):
            whole = cyclic.combine(whole, self._parts[index], chunk_range(self._size, index).size)
        check_equal(self._expected, cyclic.format(whole), subject)
