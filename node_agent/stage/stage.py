"""One stage: its record on disk, what is decided about it, its progress and who waits for it; and the registry of all."""

import asyncio
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel

from bdn.core.cache.index import Holder
from bdn.core.chunk import Digest, Manifest
from bdn.core.errors import Fact, NotFoundError
from bdn.core.events import Ending, Event
from bdn.disk.durable import disk_errors, write_at_once, write_durably
from bdn.wire.operation_schema import Tier
from bdn.wire.shapes import ErrorBody, moment
from bdn.wire.stage_schema import (
    TERMINAL,
    BytesFrom,
    MountFacts,
    StageDocument,
    StageMount,
    StageState,
    Transfer,
    Warm,
    WarmState,
)
from node_agent.cache.cache_events import about_holder
from node_agent.cache.records import Held
from node_agent.disk.places import Places
from node_agent.fetch.fill_context import RetryBudget
from node_agent.stage.view.destination import Earlier

_WINDOW_SECONDS: Final = 5.0


class MountRecord(MountFacts):
    """One mount of a stage."""

    @property
    def digest(self) -> Digest:
        """The manifest's name."""
        return Digest.parse(self.manifest)


class StageRecord(BaseModel):
    """One stage. Times are seconds since the epoch. The grant makes the file private.

    ``expires_at`` is what people are told. What counts is ``ttl_seconds``, from the last renewal or the start of the agent.

    ``destination`` is set for a pulled view; ``inode`` then tells its directory from another one at the same path.
    """

    id: str
    job_id: str
    organisation: str
    grant: str
    state: StageState
    created_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    ttl_seconds: float | None = None
    bytes_per_second: float | None = None
    transfer: Transfer | None = None
    error: ErrorBody | None = None
    destination: Path | None = None
    inode: int | None = None
    warm: bool = False
    mounts: list[MountRecord]

    @property
    def lifetime(self) -> float | None:
        """Seconds that it lives without being renewed; None means until it is released."""
        if self.ttl_seconds is None and self.expires_at is not None:  # of an agent that recorded no ttl
            return max(0.0, self.expires_at - self.created_at)
        return self.ttl_seconds

    @property
    def holder(self) -> Holder:
        """The lease's holder."""
        return Holder(self.id, self.job_id, self.expires_at, self.organisation)

    @property
    def manifests(self) -> dict[Digest, None]:
        """The manifests it names, each once, in order."""
        return dict.fromkeys(mount.digest for mount in self.mounts)


@dataclass(frozen=True)
class StageRecords:
    """Reads and writes the folder ``stages``. Blocking."""

    places: Places

    def save(self, record: StageRecord) -> None:
        """Make it durable. Raises ``DiskFailedError``."""
        path = self.places.stage(record.id)
        with disk_errors(path):
            write_durably(path, record.model_dump_json().encode())

    def note(self, record: StageRecord) -> None:
        """Let it outlive this process, for a stage that is only begun; a warm one would wait longest for the disk.

        A power cut may take it back: whoever waits for the stage hears of that, and asks again. Raises ``DiskFailedError``.
        """
        path = self.places.stage(record.id)
        with disk_errors(path):
            write_at_once(path, record.model_dump_json().encode())

    def forget(self, stage_id: str) -> None:
        """Remove it."""
        with disk_errors(self.places.stage(stage_id)):
            self.places.stage(stage_id).unlink(missing_ok=True)

    def load_all(self) -> Iterator[StageRecord]:
        """Every record that can be read; one that cannot goes to the quarantine."""
        with disk_errors(self.places.stages):
            for path in sorted(self.places.stages.iterdir()):
                if path.suffix != ".json":
                    path.unlink()  # a record that was being written; the one before it, if any, is whole
                    continue
                try:
                    yield StageRecord.model_validate_json(path.read_bytes())
                except ValueError:
                    path.rename(self.places.quarantine / path.name)


Decision = Literal["arrived", "failed", "not_mended", "renewed", "resumed", "ended"]


def decisions(kind: Decision, record: StageRecord, ending: Ending | None = None) -> list[Event]:
    """What was decided about a stage, with what its record says, once for each of its manifests."""
    return [
        about_holder(kind, manifest, record.holder, _facts(kind, record, manifest, ending))
        for manifest in record.manifests
    ]


def _facts(kind: Decision, record: StageRecord, manifest: Digest, ending: Ending | None) -> Mapping[str, Fact]:
    match kind:
        case "arrived":  # over all mounts of the manifest
            came = [mount.bytes_from for mount in record.mounts if mount.digest == manifest]
            return {tier: sum(getattr(one, tier) for one in came) for tier in ("node", "cluster", "mirror")}
        case "failed" | "not_mended":
            error = record.error
            code, problem = (error.code, error.message) if error else ("INTERNAL", "it is not known why")
            return {"code": code, "problem": problem}
        case "renewed":
            return {"expires_at": record.expires_at}
        case "resumed":
            return {"state": record.state}
        case "ended":
            return {"ending": ending, "expires_at": record.expires_at}


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
    """Counts what arrives, and says so. Content is fetched once; under every further path and mount it comes from this node."""

    def __init__(
        self, manifests: Sequence[Manifest], missing: Collection[Digest], on_bytes: Callable[[], None] = lambda: None
    ) -> None:
        self._paths = [
            Counter(entry.digest for entry in manifest.files if entry.digest in missing) for manifest in manifests
        ]
        self._first = {digest: mount for mount, paths in reversed([*enumerate(self._paths)]) for digest in paths}
        self._mounts: list[Counter[Tier]] = []
        for manifest, paths in zip(manifests, self._paths, strict=True):
            to_come = sum(manifest.contents[digest] * count for digest, count in paths.items())
            self._mounts.append(Counter({"node": manifest.bytes_total - to_come}))
        self._coming: dict[Digest, Counter[Tier]] = {}
        self._on_bytes = on_bytes
        self.rate = Rate()

    def report(self, content: Digest, tier: Tier, size: int) -> None:
        """Bytes of a content that is coming."""
        self.rate.add(size, time.monotonic())
        self._coming.setdefault(content, Counter())[tier] += size
        self._mounts[self._first[content]][tier] += size
        self._on_bytes()

    def restart(self, content: Digest) -> None:
        """What was reported of it is void."""
        self._mounts[self._first[content]] -= self._coming.pop(content, Counter())

    def finish(self, content: Digest, size: int) -> None:
        """It is whole; its other paths have it, too."""
        coming = self._coming.pop(content, None)
        self._mounts[self._first[content]]["node"] -= sum(coming.values()) if coming else 0
        for tiers, paths in zip(self._mounts, self._paths, strict=True):
            tiers["node"] += size * paths[content]

    def bytes_from(self) -> list[BytesFrom]:
        """The bytes of each mount so far."""
        return [BytesFrom(node=came["node"], cluster=came["cluster"], mirror=came["mirror"]) for came in self._mounts]


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

    def begin(self, held: Iterable[Held], missing: frozenset[Digest], budget: RetryBudget) -> StageProgress:
        """The bytes to come are known, and what may be spent on sources that fail. Returns who is told of the rest."""
        manifests = self.manifests(held)
        for mount in self.record.mounts:
            mount.files_total = len(manifests[mount.mount_location].files)
            mount.bytes_total = manifests[mount.mount_location].bytes_total
        self.progress, self.budget = StageProgress(list(manifests.values()), missing), budget
        return self.progress

    def manifests(self, held: Iterable[Held]) -> dict[str, Manifest]:
        """The manifest of each mount, by its location."""
        known = {one.manifest.digest: one.manifest for one in held}
        return {mount.mount_location: known[mount.digest] for mount in self.record.mounts}

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

    def document(self, path_of: Callable[[MountRecord], str]) -> StageDocument:
        """The stage as the wire shows it."""
        record = self.record
        mounts = [
            StageMount(
                **mount.model_dump(exclude={"bytes_from"}),
                path=path_of(mount),
                bytes_done=bytes_from.total,
                bytes_from=bytes_from,
            )
            for mount, bytes_from in zip(record.mounts, self.bytes_from(), strict=True)
        ]
        rate = record.bytes_per_second
        if not self.is_terminal:
            rate = self.progress.rate.per_second(time.monotonic()) if self.progress else None
        left = sum(mount.bytes_total - mount.bytes_done for mount in mounts if mount.bytes_total is not None)
        is_known = not self.is_terminal and all(mount.bytes_total is not None for mount in mounts)
        return StageDocument(
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

    def bytes_from(self) -> list[BytesFrom]:
        """Where the bytes of each mount came from."""
        return self.progress.bytes_from() if self.progress else [mount.bytes_from for mount in self.record.mounts]


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

    def sources(self) -> dict[str, list[str]]:
        """Where manifests come from, as far as stages say so."""
        found: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for stage in self.all():
            for mount in stage.record.mounts:
                found[mount.manifest][mount.source] = None
        return {manifest: list(sources) for manifest, sources in found.items()}

    async def until_idle(self) -> None:
        """Wait until no stage brings files: what is read in the background lets them go first."""
        while busy := [stage for stage in self._stages.values() if not stage.is_terminal]:
            await busy[0].wait(None)
