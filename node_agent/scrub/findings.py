"""What a scrub reads, what it found wrong, how that is reported, and how far it is (kept on disk)."""

import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from bdn.core.chunk import Digest, FileLayout, PlacedChunk
from bdn.core.events import Event
from bdn.core.pace.rounds import Position, ScrubbedTier, ScrubRound
from bdn.disk.durable import disk_errors, write_at_once
from bdn.wire.operation_schema import DamagedItem, Outcome, Tier, VerifyReport, listed
from bdn.wire.shapes import ErrorBody
from node_agent.cache.quarantine import SuspectFiles
from node_agent.cache.records import ManifestRecords
from node_agent.stage.stage import StageRegistry


class _Body(BaseModel):
    began: float
    manifest: str | None = None
    tier: ScrubbedTier | None = None
    content: str | None = None
    ended: float | None = None
    suspects: list[str] = []


class ScrubRecord:
    """``round`` and ``suspects`` as they are now, and as the last ``save`` wrote them. Blocking.

    Lost with a power cut or damaged, it costs a round that begins anew.
    """

    def __init__(self, path: Path, suspects: SuspectFiles, now: float) -> None:
        self.round = ScrubRound(now)
        self.suspects = suspects
        self._path = path
        self._lock = threading.Lock()

    def load(self) -> None:
        """What the last run left."""
        try:
            body = _Body.model_validate_json(self._path.read_bytes())
            after = None
            if body.manifest and body.tier and body.content:
                after = Position(Digest.parse(body.manifest), body.tier, Digest.parse(body.content))
            suspects = [Digest.parse(content) for content in body.suspects]
        except (OSError, ValueError):
            return
        self.round = ScrubRound(body.began, after, body.ended)
        self.suspects.restore(suspects)

    def save(self) -> None:
        """Raises ``DiskFailedError``."""
        now, after = self.round, self.round.after
        body = _Body(
            began=now.began,
            manifest=str(after.manifest) if after else None,
            tier=after.tier if after else None,
            content=str(after.content) if after else None,
            ended=now.ended,
            suspects=[str(content) for content in self.suspects.all()],
        )
        with self._lock, disk_errors(self._path):
            write_at_once(self._path, body.model_dump_json().encode())


@dataclass(frozen=True)
class ScrubTarget:
    """What is read again: a content and its file. ``shown`` is its path for people, where that is not the manifest's."""

    path: Path
    content: Digest
    manifest: Digest
    tier: Tier = "node"
    shown: str | None = None


@dataclass(frozen=True)
class Damage:
    """One chunk that does not match its digest or, without a chunk, something wrong with the whole file.

    ``found`` is None when it is unreadable; ``is_of_the_disk`` when the disk did not take the right bytes, either.
    """

    reason: str
    chunk: PlacedChunk | None = None
    found: Digest | None = None
    is_of_the_disk: bool = False


def single_chunk(content: Digest, size: int) -> FileLayout:
    """The layout of a content of at most one chunk: both have the same digest."""
    return FileLayout(content, size, (content,) if size else ())


Pace = Callable[[int], Awaitable[object]]


async def unpaced(_: int) -> None:
    """No waiting: somebody waits for the answer."""


@dataclass
class Findings:
    """What one verification has read and found. ``pace`` is awaited before so many bytes are read.

    With ``is_repairing`` what is wrong is repaired or quarantined; otherwise it is only reported.
    """

    is_repairing: bool = True
    pace: Pace = unpaced
    items: list[DamagedItem] = field(default_factory=list)
    chunks_read: int = 0
    bytes_read: int = 0

    def read(self, size: int) -> None:
        """A chunk was read."""
        self.chunks_read += 1
        self.bytes_read += size

    def report(self) -> tuple[VerifyReport, ErrorBody | None]:
        """All of it; or as much as is told, and the error that says so."""
        items, too_many = listed(self.items)
        return VerifyReport(items=items, chunks_read=self.chunks_read, bytes_read=self.bytes_read), too_many


@dataclass(frozen=True)
class DamageReports:
    """Describes damage for people and the mirror: which node, for which sources, and under which path."""

    cluster: str
    node: str
    registry: StageRegistry
    manifests: ManifestRecords

    def item(self, target: ScrubTarget, damage: Damage, outcome: Outcome) -> DamagedItem:
        """One damaged chunk. Blocking."""
        manifest = str(target.manifest)
        mounts = [mount for stage in self.registry.all() for mount in stage.record.mounts if mount.manifest == manifest]
        return DamagedItem(
            tier=target.tier,
            cluster=self.cluster,
            node=self.node,
            manifest=manifest,
            sources=list(dict.fromkeys(mount.source for mount in mounts)),
            path=target.shown or self._path_of(target),
            chunk=str(damage.chunk.digest if damage.chunk else target.content),
            outcome=outcome,
            reason=damage.reason,
        )

    def _path_of(self, target: ScrubTarget) -> str | None:
        """Where the manifest has this content, in one place of perhaps several."""
        held = self.manifests.load(target.manifest)
        return next((entry.path for entry in held.files if entry.digest == target.content), None) if held else None

    def jobs_with(self, manifests: frozenset[Digest]) -> list[str]:
        """The jobs that see files of these manifests now."""
        return [
            stage.record.job_id
            for stage in self.registry.all()
            if stage.record.state == "READY" and manifests & stage.record.manifests.keys()
        ]


def event_about(item: DamagedItem) -> Event:
    """The item as an event. A path in a stage's view names the stage, which is nobody else's business."""
    path = "" if item.path is None or item.path.startswith("/") else item.path
    facts = {"tier": item.tier, "reason": item.reason, "path": path}
    return Event.of(item.outcome, facts, manifest=item.manifest, digest=item.chunk)
