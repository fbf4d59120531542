"""Mirrors, plans, manifests' layouts: what the mirror service answers."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel

from bdn.core.chunk import Digest
from bdn.core.store import FileLayout, Slice
from bdn.wire.errors import ErrorBody

MirrorStatus = Literal["PENDING", "SYNCING", "READY", "FAILED", "CANCELED"]
TERMINAL: frozenset[MirrorStatus] = frozenset({"READY", "FAILED", "CANCELED"})


class MirrorSource(BaseModel):
    """One source of a mirror. ``bytes_transferred`` counts bytes read from the upstream."""

    source: str
    mount_location: str
    status: MirrorStatus
    resolved_revision: str | None = None
    manifest: str | None = None
    files_total: int | None = None
    bytes_total: int | None = None
    bytes_transferred: int = 0
    bytes_reused: int = 0
    warnings: list[str] = []
    error: ErrorBody | None = None


class Mirror(BaseModel):
    """A request to mirror sources, and how far it is. ``grant`` is there once it is READY."""

    id: str
    status: MirrorStatus
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    files_total: int | None = None
    bytes_total: int | None = None
    bytes_transferred: int = 0
    bytes_reused: int = 0
    bytes_per_second: float | None = None
    eta_seconds: float | None = None
    grant: str | None = None
    error: ErrorBody | None = None
    sources: list[MirrorSource]


class PlannedSource(BaseModel):
    """What mirroring one source would do."""

    source: str
    mount_location: str
    resolved_revision: str | None
    files: int
    bytes: int
    bytes_to_transfer: int
    bytes_reused: int
    warnings: list[str] = []


class Plan(BaseModel):
    """The answer to a dry run. Nothing was written."""

    sources: list[PlannedSource]
    files: int
    bytes: int
    bytes_to_transfer: int
    bytes_reused: int


class SliceBody(BaseModel):
    """Where a small file lies: ``offset`` bytes into the slab, a chunk of ``size`` bytes that is served by its digest."""

    digest: str
    size: int
    offset: int

    def to_core(self) -> Slice:
        """The value."""
        return Slice(Digest.parse(self.digest), self.size, self.offset)


class FileLayoutBody(BaseModel):
    """The chunks of one file, in order; absent ``slab``: each is an object of its own.

    A file in a slab has one chunk, which is named like the file. It can be read by that name, too, but not as fast.
    """

    digest: str
    size: int
    chunks: list[str]
    slab: SliceBody | None = None

    @classmethod
    def of(cls, layout: FileLayout) -> Self:
        """The wire's form."""
        lies = layout.slice
        slab = SliceBody(digest=str(lies.slab), size=lies.slab_size, offset=lies.offset) if lies else None
        chunks = [str(chunk) for chunk in layout.chunks]
        return cls(digest=str(layout.digest), size=layout.size, chunks=chunks, slab=slab)

    def to_core(self) -> FileLayout:
        """Checked: the chunks make up the file's digest, and the slab has room for it. ``ValueError`` when not."""
        chunks = tuple(Digest.parse(chunk) for chunk in self.chunks)
        lies = self.slab.to_core() if self.slab else None
        return FileLayout(Digest.parse(self.digest), self.size, chunks, lies)


class LayoutBody(BaseModel):
    """Where a manifest's bytes lie: every distinct content once.

    ``data_port`` is where the data plane serves the chunks, on the host that answered; null means on this port.
    """

    manifest: str
    data_port: int | None
    files: list[FileLayoutBody]

    def to_json(self) -> str:
        """Without what is absent: there may be a million files."""
        return self.model_dump_json(exclude_defaults=True)


class Holding(BaseModel):
    """A manifest that some tier holds. ``held_by`` names stages' jobs; ``last_used`` is in seconds since the epoch.

    ``cluster_bytes`` are those of the single chunks that an agent holds for its cluster, beside its whole files.
    """

    manifest: str
    bytes: int
    complete: bool = True
    last_used: float | None = None
    sources: list[str] = []
    held_by: list[str] = []
    cluster_bytes: int = 0


class HeldManifest(BaseModel):
    """One manifest and everywhere it is held."""

    manifest: str
    sources: list[str]
    files_total: int | None
    bytes_total: int | None
    mirror: bool
    nodes: dict[str, Holding]


class HeldManifests(BaseModel):
    """What is held where."""

    items: list[HeldManifest]

    def without_holders(self) -> HeldManifests:
        """For whoever is no operator: jobs that hold the same content may be other organisations'."""
        bare = [
            {node: one.model_copy(update={"held_by": []}) for node, one in item.nodes.items()} for item in self.items
        ]
        return HeldManifests(
            items=[item.model_copy(update={"nodes": nodes}) for item, nodes in zip(self.items, bare, strict=True)]
        )
