"""What is read again, what was found wrong, and how it is reported to people and to the mirror."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest
from bdn.core.events import Event
from bdn.core.store.layout import FileLayout, PlacedChunk
from bdn.wire.errors import ErrorBody
from bdn.wire.layout_form import Layout
from bdn.wire.operation_schema import DamagedItem, Outcome, Tier, VerifyReport, listed
from node_agent.cache.records import ManifestRecords
from node_agent.stage.stage import StageRegistry


@dataclass(frozen=True)
class ScrubTarget:
    """A content, and where its bytes lie. ``shown`` is what people call it, where that is not its path in the manifest."""

    path: Path
    content: Digest
    manifest: Digest
    tier: Tier = "node"
    shown: str | None = None


@dataclass(frozen=True)
class Damage:
    """One chunk that is not what its name says, or, without a chunk, something about the whole file.

    ``found`` is None when it is unreadable; ``is_of_the_disk`` when the disk did not take the right bytes, either.
    """

    reason: str
    chunk: PlacedChunk | None = None
    found: Digest | None = None
    is_of_the_disk: bool = False


def plain(content: Digest, size: int) -> FileLayout:
    """The layout of what is at most one chunk: its name is that of its bytes."""
    return FileLayout(content, size, (content,) if size else ())


@dataclass(frozen=True)
class KnownLayouts:
    """The layouts beside held manifests, of which the last one that was needed is kept in memory. Blocking; any thread."""

    records: ManifestRecords
    _last: dict[Digest, Layout | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, content: Digest, size: int, manifests: Collection[Digest]) -> FileLayout | None:
        """The layout of a content that these manifests name; None when no record here tells its chunks."""
        if size <= CHUNK_SIZE:
            return plain(content, size)
        for manifest in manifests:
            layout = self._layout(manifest)
            if layout is not None and (found := layout.files.get(content)) is not None:
                return found
        return None

    def path_of(self, manifest: Digest, content: Digest) -> str | None:
        """Where a manifest has this content, in one place of perhaps several."""
        held = self.records.load(manifest)
        return next((entry.path for entry in held.files if entry.digest == content), None) if held else None

    def _layout(self, manifest: Digest) -> Layout | None:
        with self._lock:
            if manifest not in self._last:
                self._last.clear()
                self._last[manifest] = self.records.load_layout(manifest)
            return self._last[manifest]


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
    book: StageRegistry
    layouts: KnownLayouts

    def item(self, subject: ScrubTarget, wrong: Damage, outcome: Outcome) -> DamagedItem:
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
    facts = {"tier": item.tier, "reason": item.reason, "path": path}
    return Event.of(item.outcome, facts, manifest=item.manifest, digest=item.chunk)
