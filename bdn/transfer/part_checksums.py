"""Whole-file checksums out of those of the chunks, which come in any order: no byte is read twice, and nobody waits."""

from __future__ import annotations

import threading

from bdn.core.chunk import chunk_count, chunk_range
from bdn.core.ports import Buffer
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.transfer.checksums import check_equal
from bdn.transfer.cyclic_checksums import CYCLIC


def part_checksum(kind: ChecksumKind, content: Buffer) -> int:
    """The checksum of one chunk, for ``PartChecksums``. Releases the GIL: for byte threads, while the chunk is hot."""
    return CYCLIC[kind].go_on(content, 0)


class PartChecksums:
    """Takes the checksums of a file's chunks in any order and from any thread, and combines them when all are there."""

    def __init__(self, expected: Checksum, size: int) -> None:
        if not expected.kind.is_combinable:
            msg = f"{expected.kind} of a whole does not follow from those of its parts"
            raise ValueError(msg)
        self._expected = expected
        self._size = size
        self._parts: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def kind(self) -> ChecksumKind:
        """What to compute for each chunk."""
        return self._expected.kind

    @property
    def missing(self) -> tuple[int, ...]:
        """The chunks that were not offered: those that an earlier attempt stored have to be read again."""
        with self._lock:
            return tuple(index for index in range(chunk_count(self._size)) if index not in self._parts)

    def offer(self, index: int, part: int) -> None:
        """The checksum of chunk ``index``; the last word counts where a chunk was fetched twice."""
        chunk_range(self._size, index)  # ValueError: the file has no such chunk
        with self._lock:
            self._parts[index] = part

    def check(self, subject: str) -> None:
        """All chunks were offered: raise ``ChecksumMismatchError`` when they do not make up the file."""
        if missing := self.missing:
            msg = f"{len(missing)} chunks of {subject} were not offered"
            raise ValueError(msg)
        cyclic, whole = CYCLIC[self._expected.kind], 0
        for index in range(chunk_count(self._size)):
            whole = cyclic.combine(whole, self._parts[index], chunk_range(self._size, index).size)
        check_equal(self._expected, cyclic.format(whole), subject)
