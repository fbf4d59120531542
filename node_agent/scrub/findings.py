"""What is read again, what was found wrong, and how it is reported to people and to the mirror."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from bdn.core.digest import Digest
from bdn.core.events import Event
from bdn.core.store.layout import FileLayout, PlacedChunk
from bdn.wire.errors import ErrorBody
from bdn.wire.operation_schema import DamagedItem, Outcome, Tier, VerifyReport, listed
from node_agent.cache.records import ManifestRecords
from node_agent.stage.stage import StageRegistry


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
