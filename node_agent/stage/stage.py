"""One stage: its record, progress and waiters; and the registry of all stages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from bdn.core.cache.index import Holder
from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError
from bdn.core.layout import Manifest
from bdn.core.source.uri import parse_source
from bdn.local.hub_cache import HubRepository
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
from node_agent.stage.view.destination import Earlier

if TYPE_CHECKING:
    from node_agent.fill.progress import FillProgress  # imports all that a fill needs; reading a record does not


class MountRecord(MountFacts):
    @property
    def digest(self) -> Digest:
        return Digest.parse(self.manifest)

    @property
    def repository(self) -> HubRepository:
        """The repository in the hub's cache, with the requested revision. Raises ``InvalidRequestError``."""
        return HubRepository.of(parse_source(self.source), Path("/"))


class StageRecord(BaseModel):
    """One stage. Times are seconds since the epoch. The file contains a grant, so it must stay private.

    ``expires_at`` is for display. Expiry counts ``ttl_seconds`` from the last renewal or the start of the agent.

    ``destination`` is set for a pull; ``inode`` then distinguishes its directory from another at the same path. With
    ``link`` its files are hard links to the cache where possible; with ``hub`` it is a snapshot in the cache of the
    hub's client. A stage with ``hub`` and without ``destination`` shows repositories as that cache has them.
    """

    id: str
    job_id: str
    organisation: str
    mirror_id: str | None = None
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
    link: bool = False
    hub: bool = False
    warm: bool = False
    mounts: list[MountRecord]

    # Where a stage has something, below its own directory:

    def shown_at(self, mount: MountRecord) -> str:
        """What the job gets. Mounts of one repository of a hub share the place."""
        return str(mount.repository.folder) if self.hub else mount.mount_location

    def files_at(self, mount: MountRecord) -> str:
        """The files of a mount by their paths; in a hub's cache these are links."""
        return str(mount.repository.snapshot(mount.commit)) if self.hub else mount.mount_location

    def contents_at(self, mount: MountRecord) -> str:
        """The folder that has the bytes of a mount."""
        return str(mount.repository.folder / "blobs") if self.hub else mount.mount_location

    @property
    def stamp(self) -> int:
        """Modification time of a pull's copied files, in nanoseconds since the epoch."""
        return round(self.created_at * 1e9)

    def is_linked(self, wanted: bool) -> bool:
        """Whether the pull used links as ``wanted``; where links are impossible, copies count as links."""
        return self.link == wanted and (wanted or all(mount.view != "hardlink" for mount in self.mounts))

    @property
    def holder(self) -> Holder:
        return Holder(self.id, self.job_id, self.organisation)

    @property
    def manifests(self) -> dict[Digest, None]:
        return dict.fromkeys(mount.digest for mount in self.mounts)


@dataclass
class Warming:
    """In memory only: after a restart warming begins anew. The task that warms ends it."""

    bytes_total: int
    state: WarmState = "WARMING"
    bytes_read: int = 0
    reason: str | None = None
    task: asyncio.Task[None] | None = None
    _began: float = field(default_factory=time.monotonic)
    _seconds: float | None = None

    @property
    def is_going_on(self) -> bool:
        return self.state == "WARMING"

    def end(self, state: WarmState, reason: str | None = None) -> None:
        if self.is_going_on:
            self.state, self.reason, self._seconds = state, reason, time.monotonic() - self._began

    async def stop(self) -> None:
        """Cancel the task and wait until it has closed the view's files."""
        if self.task and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])
        self.end("STOPPED", "the stage was released")

    def document(self) -> Warm:
        seconds = time.monotonic() - self._began if self._seconds is None else self._seconds
        return Warm(
            state=self.state,
            bytes=self.bytes_read,
            bytes_total=self.bytes_total,
            seconds=seconds,
            reason=self.reason,
        )


class NodeStage:
    """The state in memory. ``lock`` serialises transitions, ``saving`` the writes of the record.

    A READY stage that lacks files stays READY while they are fetched (``is_mending``): clients that request it wait.
    A stage whose release failed half-way also stays READY but may show nothing (``is_ending``): a new request begins it
    anew.
    """

    def __init__(self, record: StageRecord, earlier: Earlier | None = None) -> None:
        """``earlier``: the publication at the destination of a pull."""
        self.record = record
        self.earlier = earlier
        self.progress: FillProgress | None = None
        self.warming: Warming | None = None
        self.began_at: float | None = None  # the work, in seconds since the epoch
        self.deadline: float | None = None  # monotonic seconds
        self.is_mending = False
        self.is_ending = False  # takes no leases from the start of its release or failure until it begins anew
        self.mend_at: float | None = None  # monotonic seconds; None while nothing is known to be missing
        self.lock = asyncio.Lock()
        self.saving = asyncio.Lock()
        self.stop = threading.Event()
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def is_working(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def is_terminal(self) -> bool:
        return self.record.state in TERMINAL and not self.is_mending

    @property
    def state(self) -> StageState:
        return "STAGING" if self.is_mending else self.record.state

    def bytes_per_second(self, now: float) -> float | None:
        """The current rate; of the whole work once the state is terminal. ``now``: monotonic seconds."""
        if self.is_terminal:
            return self.record.bytes_per_second
        return self.progress.rate.per_second(now) if self.progress else None

    def begin(self, manifests: Sequence[Manifest], progress: FillProgress) -> None:
        """Set the expected sizes. ``manifests`` are in the order of the mounts."""
        for mount, manifest in zip(self.record.mounts, manifests, strict=True):
            mount.files_total, mount.bytes_total = len(manifest.files), manifest.bytes_total
        self.progress = progress

    def notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until the state is terminal. Returns False at the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self.is_terminal:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def document(self, path_of: Callable[[MountRecord], str]) -> StageDocument:
        record = self.record
        mounts = [
            StageMount(
                **mount.model_dump(exclude={"bytes_from"}),
                path=path_of(mount),
                bytes_done=bytes_from.total,
                # A slab may include files that arrived otherwise, so this figure may be too large.
                bytes_under_way=min(under_way, (mount.bytes_total or 0) - bytes_from.total),
                bytes_from=bytes_from,
            )
            for mount, bytes_from, under_way in zip(record.mounts, self.bytes_from(), self._under_way(), strict=True)
        ]
        rate = self.bytes_per_second(time.monotonic())
        left = sum(mount.bytes_total - mount.bytes_done for mount in mounts if mount.bytes_total is not None)
        is_known = not self.is_terminal and all(mount.bytes_total is not None for mount in mounts)
        return StageDocument(
            id=record.id,
            job_id=record.job_id,
            state=self.state,
            view="hub" if record.hub else "files",
            created_at=moment(record.created_at),
            ready_at=moment(record.ready_at) if record.ready_at is not None else None,
            expires_at=moment(record.expires_at) if record.expires_at is not None else None,
            mounts=mounts,
            bytes_per_second=rate,
            eta_seconds=left / rate if rate and is_known else None,
            transfer=self.progress.transfer() if self.progress and not self.is_terminal else record.transfer,
            warm=self.warming.document() if self.warming else None,
            error=record.error,
        )

    def bytes_from(self) -> list[BytesFrom]:
        return self.progress.bytes_from() if self.progress else [mount.bytes_from for mount in self.record.mounts]

    def _under_way(self) -> list[int]:
        return self.progress.bytes_under_way() if self.progress else [0] * len(self.record.mounts)


class StageRegistry:
    def __init__(self) -> None:
        self._stages: dict[str, NodeStage] = {}

    def all(self) -> list[NodeStage]:
        """Newest first; includes the 10,000 newest stages that ended in the last week."""
        return sorted(self._stages.values(), key=lambda stage: stage.record.created_at, reverse=True)

    def get(self, stage_id: str) -> NodeStage | None:
        return self._stages.get(stage_id)

    def find(self, stage_id: str) -> NodeStage:
        stage = self.get(stage_id)
        if stage is None:
            raise NotFoundError(f"stage {stage_id}")
        return stage

    def enter(self, stage: NodeStage) -> NodeStage:
        """Add a stage; returns the existing stage with this id, if any."""
        return self._stages.setdefault(stage.record.id, stage)

    def strike(self, stage: NodeStage) -> None:
        if self._stages.get(stage.record.id) is stage:
            del self._stages[stage.record.id]

    def count_by_state(self) -> Counter[str]:
        return Counter(stage.record.state for stage in self._stages.values())

    def sources(self) -> dict[str, list[str]]:
        found: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for stage in self.all():
            for mount in stage.record.mounts:
                found[mount.manifest][mount.source] = None
        return {manifest: list(sources) for manifest, sources in found.items()}

    async def until_idle(self) -> None:
        """Wait until no stage is fetching files: background reads yield to stages."""
        while busy := [stage for stage in self._stages.values() if not stage.is_terminal]:
            await busy[0].wait(None)
