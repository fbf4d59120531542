"""One stage while the agent runs: its record, its progress, who waits for it; and the registry of all stages."""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from bdn.core.chunk import Digest, Manifest
from bdn.core.errors import NotFoundError
from bdn.wire import stage_schema
from bdn.wire.operation_schema import Tier
from bdn.wire.shapes import moment
from bdn.wire.stage_schema import TERMINAL, BytesFrom, StageMount, Warm, WarmState
from node_agent.fetch.fill_context import RetryBudget
from node_agent.stage.record import MountRecord, StageRecord
from node_agent.stage.view.destination import Earlier

_WINDOW_SECONDS: Final = 5.0


class Rate:
    """Bytes per second over the last seconds. Times are monotonic and given by the caller."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self.total = 0

    def add(self, size: int, now: float) -> None:
        """Bytes that came at ``now``."""
        if self._began is None:
            self._began = now
        self.total += size
        self._samples.append((now, size))
        self._drop_old(now)

    def per_second(self, now: float) -> float | None:
        """The rate now; None before the first bytes."""
        if self._began is None:
            return None
        self._drop_old(now)
        span = min(_WINDOW_SECONDS, now - self._began)
        return sum(size for _, size in self._samples) / max(span, 0.1)

    def _drop_old(self, now: float) -> None:
        while self._samples and self._samples[0][0] < now - _WINDOW_SECONDS:
            self._samples.popleft()


class StageProgress:
    """Counts what arrives. Content is fetched once; under every further path and mount it comes from this node."""

    def __init__(self, manifests: Sequence[Manifest], missing: Collection[Digest]) -> None:
        self._paths = [
            Counter(entry.digest for entry in manifest.files if entry.digest in missing) for manifest in manifests
        ]
        self._first = {digest: mount for mount, paths in reversed([*enumerate(self._paths)]) for digest in paths}
        self._mounts: list[Counter[Tier]] = []
        for manifest, paths in zip(manifests, self._paths, strict=True):
            to_come = sum(manifest.contents[digest] * count for digest, count in paths.items())
            self._mounts.append(Counter({"node": manifest.bytes_total - to_come}))
        self._coming: dict[Digest, Counter[Tier]] = {}
        self.rate = Rate()

    def report(self, content: Digest, tier: Tier, size: int) -> None:
        """Bytes of a content that is coming."""
        self.rate.add(size, time.monotonic())
        self._coming.setdefault(content, Counter())[tier] += size
        self._mounts[self._first[content]][tier] += size

    def restart(self, content: Digest) -> None:
        """What was reported of it is void."""
        self._mounts[self._first[content]] -= self._coming.pop(content, Counter())

    def finish(self, content: Digest, size: int) -> None:
        """It is whole; its other paths have it, too."""
        coming = self._coming.pop(content, None)
        self._mounts[self._first[content]]["node"] -= sum(coming.values()) if coming else 0
        for tiers, paths in zip(self._mounts, self._paths, strict=True):
            tiers["node"] += size * paths[content]

    def bytes_from(self, mount: int) -> BytesFrom:
        """The bytes of one mount so far."""
        tiers = self._mounts[mount]
        return BytesFrom(node=tiers["node"], cluster=tiers["cluster"], mirror=tiers["mirror"])


@dataclass
class Warming:
    """State in memory; the task that works on it ends it. After a restart it begins anew."""

    bytes_total: int
    state: WarmState = "WARMING"
    bytes_read: int = 0
    reason: str | None = None
    task: asyncio.Task[None] | None = None
    _began: float = field(default_factory=time.monotonic)
    _seconds: float | None = None

    @property
    def is_going_on(self) -> bool:
        """Whether files are being read, or will be."""
        return self.state == "WARMING"

    def end(self, state: WarmState, reason: str | None = None) -> None:
        """The first end counts."""
        if self.is_going_on:
            self.state, self.reason, self._seconds = state, reason, time.monotonic() - self._began

    async def stop(self) -> None:
        """Cancel the work and wait until no file of the view is open any more."""
        if self.task and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])
        self.end("STOPPED", "the stage was released")

    def document(self) -> Warm:
        """What the wire shows."""
        seconds = time.monotonic() - self._began if self._seconds is None else self._seconds
        return Warm(
            state=self.state,
            bytes=self.bytes_read,
            bytes_total=self.bytes_total,
            seconds=seconds,
            reason=self.reason,
        )


class NodeStage:
    """State in memory. Transitions are asked for one at a time under ``lock``; records are written under ``saving``.

    A READY stage that lacks files stays READY while these are brought again (``is_mending``): whoever asks for it waits.
    One whose release failed half-way stays READY, too, but may show nothing (``is_ending``): who asks for it begins it anew.
    """

    def __init__(self, record: StageRecord) -> None:
        self.record = record
        self.progress: StageProgress | None = None
        self.budget: RetryBudget | None = None
        self.earlier: Earlier | None = None
        self.warming: Warming | None = None
        self.deadline: float | None = None  # in seconds of the agent's clock that nobody sets
        self.is_mending = False
        self.is_ending = False  # it is being taken down, or was: from then on it takes no lease, until it begins anew
        self.mend_at: float | None = None  # by the same clock; None while nothing is known to be lacking
        self.lock = asyncio.Lock()
        self.saving = asyncio.Lock()
        self.stop = threading.Event()
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def is_working(self) -> bool:
        """Whether a task works on it."""
        return self.task is not None and not self.task.done()

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.record.state in TERMINAL and not self.is_mending

    def begin(self, progress: StageProgress, budget: RetryBudget) -> None:
        """The bytes to come are known, and what may be spent on sources that fail."""
        self.progress = progress
        self.budget = budget

    def notify(self) -> None:
        """Wake who waits for a change of state."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until the state is terminal; False when the time ran out."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self.is_terminal:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def document(self, path_of: Callable[[MountRecord], str]) -> stage_schema.StageDocument:
        """The stage as the wire shows it."""
        record = self.record
        mounts = [self._mount(index, mount, path_of(mount)) for index, mount in enumerate(record.mounts)]
        rate = record.bytes_per_second
        if not self.is_terminal:
            rate = self.progress.rate.per_second(time.monotonic()) if self.progress else None
        left = sum(mount.bytes_total - mount.bytes_done for mount in mounts if mount.bytes_total is not None)
        is_known = not self.is_terminal and all(mount.bytes_total is not None for mount in mounts)
        return stage_schema.StageDocument(
            id=record.id,
            job_id=record.job_id,
            state="STAGING" if self.is_mending else record.state,
            created_at=moment(record.created_at),
            ready_at=moment(record.ready_at) if record.ready_at is not None else None,
            expires_at=moment(record.expires_at) if record.expires_at is not None else None,
            mounts=mounts,
            bytes_per_second=rate,
            eta_seconds=left / rate if rate and is_known else None,
            transfer=self.budget.document() if self.budget and not self.is_terminal else record.transfer,
            warm=self.warming.document() if self.warming else None,
            error=record.error,
        )

    def _mount(self, index: int, mount: MountRecord, path: str) -> StageMount:
        came = self.progress.bytes_from(index) if self.progress else mount.bytes_from
        return StageMount(
            mount_location=mount.mount_location,
            path=path,
            manifest=mount.manifest,
            source=mount.source,
            view=mount.view,
            view_reason=mount.view_reason,
            exposure=mount.exposure,
            files_total=mount.files_total,
            bytes_total=mount.bytes_total,
            bytes_done=came.total,
            bytes_from=came,
        )


class StageRegistry:
    """Stages by id, in memory; their records are on disk."""

    def __init__(self) -> None:
        self._stages: dict[str, NodeStage] = {}

    def all(self) -> list[NodeStage]:
        """Every stage, newest first; released ones are known for a week, the newest ten thousand of them."""
        return sorted(self._stages.values(), key=lambda stage: stage.record.created_at, reverse=True)

    def get(self, stage_id: str) -> NodeStage | None:
        """The stage, or None."""
        return self._stages.get(stage_id)

    def find(self, stage_id: str) -> NodeStage:
        """The stage, or ``NotFoundError``."""
        stage = self.get(stage_id)
        if stage is None:
            raise NotFoundError(f"stage {stage_id}")
        return stage

    def enter(self, stage: NodeStage) -> NodeStage:
        """Enter a stage; the one that is there already, if any, stays and is returned."""
        return self._stages.setdefault(stage.record.id, stage)

    def strike(self, stage: NodeStage) -> None:
        """Forget a stage."""
        if self._stages.get(stage.record.id) is stage:
            del self._stages[stage.record.id]

    def count_by_state(self) -> Counter[str]:
        """How many there are in each state."""
        return Counter(stage.record.state for stage in self._stages.values())
