"""Bytes that have come and do not count as here yet: for those who watch a transfer, in memory alone."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from bdn.wire.stage_schema import ChunkStep


@dataclass(eq=False, slots=True)
class Arriving:
    """One read: ``received`` bytes of it have come and were neither thrown away nor counted by whoever asked for them.

    Its byte thread writes the number while bytes come; then whoever counts them sets it to 0. So there is no lock.
    ``step`` is what the read waits for now, or does; of an agent's chunks alone.
    """

    received: int = 0
    step: ChunkStep | None = None


class UnderWay:
    """The reads that are under way. They begin, end and are added up on the event loop."""

    def __init__(self) -> None:
        self._reads: set[Arriving] = set()

    @contextmanager
    def read(self) -> Iterator[Arriving]:
        """One more, until the block ends."""
        arriving = Arriving()
        self._reads.add(arriving)
        try:
            yield arriving
        finally:
            self._reads.remove(arriving)

    @property
    def received(self) -> int:
        """Bytes of all reads together."""
        return sum(read.received for read in self._reads)

    @property
    def steps(self) -> Mapping[ChunkStep, int]:
        """How many reads are at each step."""
        return Counter(read.step for read in self._reads if read.step is not None)
