"""What one verification has read and found, as it is told to people and to the mirror."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from bdn.core.digest import Digest
from bdn.core.events import Event
from bdn.wire.errors import ErrorBody
from bdn.wire.eviction_schema import Tier
from bdn.wire.verification_schema import DamagedItem, Outcome, VerifyReport, listed
from node_agent.scrub.layouts import KnownLayouts
from node_agent.scrub.subject import Subject, Wrong
from node_agent.stage.registry import StageBook

Pace = Callable[[int], Awaitable[object]]


async def at_once(_: int) -> None:
    """Somebody waits for it."""


class ScrubEvents(Protocol):
    """Who counts."""

    def scrubbed(self, tier: Tier, size: int) -> None:
        """Bytes were read again."""
        ...

    def damaged(self, tier: Tier, outcome: Outcome) -> None:
        """A chunk was wrong."""
        ...

    def lost(self) -> None:
        """A whole file was put aside."""
        ...


@dataclass
class Findings:
    """``pace`` is awaited before so many bytes are read; with ``is_mending`` what is wrong is repaired or put aside."""

    is_mending: bool = True
    pace: Pace = at_once
    items: list[DamagedItem] = field(default_factory=list)
    chunks_read: int = 0
    bytes_read: int = 0

    def read(self, size: int) -> None:
        """A chunk was read."""
        self.chunks_read += 1
        self.bytes_read += size

    def report(self, report_id: str, error: ErrorBody | None = None) -> VerifyReport:
        """All of it, or as much as is told."""
        items, too_many = listed(self.items)
        return VerifyReport(
            id=report_id, items=items, chunks_read=self.chunks_read, bytes_read=self.bytes_read, error=error or too_many
        )


@dataclass(frozen=True)
class Telling:
    """How an item names the place: which node, for which sources, and under which path."""

    cluster: str
    node: str
    book: StageBook
    layouts: KnownLayouts

    def item(self, subject: Subject, wrong: Wrong, outcome: Outcome) -> DamagedItem:
        """One wrong chunk. Blocking."""
        manifest = str(subject.manifest)
        mounts = [mount for stage in self.book.all() for mount in stage.record.mounts if mount.manifest == manifest]
        return DamagedItem(
            tier=subject.tier,
            cluster=self.cluster,
            node=self.node,
            manifest=manifest,
            sources=list(dict.fromkeys(mount.source for mount in mounts)),
            path=subject.shown or self.layouts.path_of(subject.manifest, subject.content),
            chunk=str(wrong.chunk.digest if wrong.chunk else subject.content),
            outcome=outcome,
            reason=wrong.reason,
        )

    def jobs_with(self, manifests: frozenset[Digest]) -> list[str]:
        """The jobs that see files of these manifests now."""
        return [
            stage.record.job_id
            for stage in self.book.all()
            if stage.record.state == "READY" and manifests & stage.record.manifests.keys()
        ]


def event_about(item: DamagedItem) -> Event:
    """The item as an event. A path in a stage's view names the stage, which is nobody else's business."""
    path = "" if item.path is None or item.path.startswith("/") else item.path
    subject = {"manifest": item.manifest, "digest": item.chunk}
    return Event.of(item.outcome, **subject, tier=item.tier, reason=item.reason, path=path)
