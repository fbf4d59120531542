"""Progress of a request's fills: bytes by the tier that they came from, and their rate."""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from bdn.core.cache.digest_table import DigestTable
from bdn.core.chunk import Digest
from bdn.core.layout import Manifest
from bdn.traces.spans import NO_BATCHES
from bdn.transfer.under_way import UnderWay
from bdn.wire.operation_schema import Tier
from bdn.wire.stage_schema import BytesFrom, ChunkStep, Transfer
from node_agent.fetch.fill_context import RetryBudget

_WINDOW_SECONDS: Final = 5.0


class Rate:
    """Bytes per second over the last five seconds. The caller passes monotonic times."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self.total = 0

    def add(self, size: int, now: float) -> None:
        if self._began is None:
            self._began = now
        self.total += size
        self._samples.append((now, size))
        self._drop_old(now)

    def per_second(self, now: float) -> float | None:
        if self._began is None:
            return None
        self._drop_old(now)
        span = min(_WINDOW_SECONDS, now - self._began)
        return sum(size for _, size in self._samples) / max(span, 0.1)

    def _drop_old(self, now: float) -> None:
        while self._samples and self._samples[0][0] < now - _WINDOW_SECONDS:
            self._samples.popleft()


class FillProgress:
    """Counts arriving bytes. Content is fetched once; further paths and mounts have it from this node.

    ``manifests`` belong to the mounts, and are not stored; ``missing`` are the contents to fetch. ``budget`` limits
    retries and hedges. ``on_bytes`` is called whenever bytes arrived.
    """

    def __init__(self, manifests: Sequence[Manifest], missing: Collection[Digest], budget: RetryBudget) -> None:
        self.budget = budget
        self.on_bytes: Callable[[], None] = lambda: None
        self.traced = NO_BATCHES
        self._mounts: list[Counter[Tier]] = []
        self._first = DigestTable(width=4)  # content to come -> the first mount that has it
        self._again: dict[Digest, Counter[int]] = {}  # content to come -> further mounts, and how often each has it
        for mount, manifest in enumerate(manifests):
            to_come = 0
            for entry in manifest.files:
                if entry.digest not in missing:
                    continue
                to_come += entry.size
                if entry.digest in self._first:
                    self._again.setdefault(entry.digest, Counter())[mount] += 1
                else:
                    self._first[entry.digest] = mount
            self._mounts.append(Counter({"node": manifest.bytes_total - to_come}))
        self._coming: dict[Digest, Counter[Tier]] = {}
        self._awaited: dict[Digest, tuple[int, Callable[[], UnderWay | None]]] = {}
        self.rate = Rate()

    def report(self, content: Digest, tier: Tier, size: int) -> None:
        self.rate.add(size, time.monotonic())
        self._coming.setdefault(content, Counter())[tier] += size
        self._mounts[self._first[content]][tier] += size
        self.traced.add(size, tier)
        self.on_bytes()

    def restart(self, content: Digest) -> None:
        self._mounts[self._first[content]] -= self._coming.pop(content, Counter())

    def finish(self, content: Digest, size: int) -> None:
        """The content is whole, also under its other paths. Idempotent, since fills may restart."""
        first, coming = self._first.pop(content, None), self._coming.pop(content, None)
        if first is None:
            return
        self._mounts[first]["node"] += size - (sum(coming.values()) if coming else 0)
        for mount, count in self._again.pop(content, Counter()).items():
            self._mounts[mount]["node"] += size * count

    @contextmanager
    def awaiting(self, content: Digest, size: int, under_way: Callable[[], UnderWay | None]) -> Iterator[None]:
        """During the block, ``under_way`` returns the reads of this content and of its slab, ``size`` bytes in all."""
        self._awaited[content] = size, under_way
        try:
            yield
        finally:
            del self._awaited[content]

    def bytes_under_way(self) -> list[int]:
        """Bytes of each mount that arrived and were not reported yet."""
        came = [0] * len(self._mounts)
        for content, (size, under_way) in self._awaited.items():
            mount, reads = self._first.get(content), under_way()
            if mount is not None and reads is not None:
                came[mount] += min(reads.received, size)  # a slab may include other files
        return came

    def transfer(self) -> Transfer:
        """Retries and hedges spent so far, and the current step of each chunk."""
        reads = {reads for _, under_way in self._awaited.values() if (reads := under_way()) is not None}
        steps = sum((Counter(one.steps) for one in reads), Counter[ChunkStep]())
        return self.budget.document().model_copy(update={"chunks_at": dict(steps)})

    def bytes_from(self) -> list[BytesFrom]:
        return [BytesFrom(node=came["node"], cluster=came["cluster"], mirror=came["mirror"]) for came in self._mounts]
