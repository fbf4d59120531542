"""Counts bytes received but not yet counted as present, for progress reports. In memory only."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from bdn.wire.stage_schema import ChunkStep


@dataclass(eq=False, slots=True)
class Arriving:
    """One read. ``received`` counts bytes that were neither dropped nor counted by the requesting task.

    Its byte thread writes the number while bytes arrive; then the requesting task counts them and sets it to 0. So no
    lock is needed. ``step`` is what the read is waiting for or doing; set by agents only.
    """

    received: int = 0
    step: ChunkStep | None = None


class UnderWay:
    """The reads in progress. They begin, end and are summed up on the event loop."""

    def __init__(self) -> None:
        self._reads: set[Arriving] = set()

    @contextmanager
    def read(self) -> Iterator[Arriving]:
        arriving = Arriving()
        self._reads.add(arriving)
        try:
            yield arriving
        finally:
            self._reads.remove(arriving)

    @property
    def received(self) -> int:
        return sum(read.received for read in self._reads)

    @property
    def steps(self) -> Mapping[ChunkStep, int]:
        return Counter(read.step for read in self._reads if read.step is not None)
