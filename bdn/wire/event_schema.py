"""Events in agents' reports, in journals and in answers; and the names of digests and sources."""

from datetime import datetime
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, Field

from bdn.core.errors import Fact
from bdn.core.events import Event
from bdn.wire.shapes import Facts, moment
from bdn.wire.stage_schema import StageDocument

EVENTS_AT_ONCE: Final = 500  # in one heartbeat
MANIFESTS_AT_ONCE: Final = 100  # manifests whose events one request may ask for
NamedKind = Literal["source", "manifest", "content", "slab", "chunk", "page"]
_TEXT: Final = r"^[^\x00]*$"
_DIGEST: Final = r"^b3:[0-9a-f]{64}$"


class NodeEvent(BaseModel):
    """One event of an agent: a line of its journal and of its heartbeats. ``at`` is in seconds since the epoch."""

    id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z_/-]+$")]
    at: Annotated[float, Field(allow_inf_nan=False)]
    kind: Annotated[str, Field(max_length=64, pattern=r"^[a-z_]+$")]
    manifest: Annotated[str, Field(pattern=_DIGEST)] | None = None
    digest: Annotated[str, Field(pattern=_DIGEST)] | None = None
    organisation: Annotated[str, Field(max_length=256, pattern=_TEXT)] | None = None
    facts: Facts

    @classmethod
    def of(cls, event: Event) -> Self:
        return cls.model_validate(event, from_attributes=True)

    def event(self, cluster: str | None = None, node: str | None = None) -> Event:
        return Event(**dict(self), cluster=cluster, node=node)


class EventDocument(BaseModel):
    """One event as an organisation sees it. ``node`` is null for the mirror's own."""

    id: str
    at: datetime
    cluster: str | None = None
    node: str | None = None
    kind: str
    manifest: str | None = None
    digest: str | None = None
    facts: dict[str, Fact]
    sentence: str

    @classmethod
    def of(cls, event: Event) -> Self:
        return cls(
            id=event.id,
            at=moment(event.at),
            cluster=event.cluster,
            node=event.node,
            kind=event.kind,
            manifest=event.manifest,
            digest=event.digest,
            facts=dict(event.shown_facts),
            sentence=event.sentence,
        )

    def event(self) -> Event:
        """The event; of another organisation's event, only the facts that the caller may see."""
        known = self.model_dump(include={"id", "cluster", "node", "kind", "manifest", "digest", "facts"})
        return Event(**known, at=self.at.timestamp())


class NamedPlace(BaseModel):
    """A file of a manifest that a digest names, or names a part of."""

    manifest: str
    content: str
    path: str
    chunk_index: int | None = None


class Named(BaseModel):
    """What a digest or a source refers to: ``manifests`` with the sources that they were mirrored from."""

    of: str
    kind: NamedKind
    manifests: dict[str, list[str]]
    places: list[NamedPlace] = []


class StagedPath(BaseModel):
    """The object at a path below a mount. ``digest`` and ``size`` are null for a folder, or if the manifest is gone."""

    path: str
    stage: StageDocument
    mount_location: str
    manifest: str
    name: str  # of the file, in the manifest
    digest: str | None = None
    size: int | None = None
    cached: bool


class NodeEvents(BaseModel):
    """An agent's own events, newest first, and ``staged``, the object at the requested path."""

    staged: StagedPath | None = None
    items: list[EventDocument]
