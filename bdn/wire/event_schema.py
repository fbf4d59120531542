"""Events: decisions as agents report them, as journals keep them, and as they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from bdn.core.errors import Fact
from bdn.core.events.decision import Decision, Recorded
from bdn.core.events.kinds import KINDS
from bdn.wire.quantities import moment
from bdn.wire.stage_schema import Stage

EVENTS_AT_ONCE: Final = 500  # in one heartbeat
MANIFESTS_AT_ONCE: Final = 100  # whose events one request asks for
NamedKind = Literal["source", "manifest", "content", "slab", "chunk"]
_LONGEST_LIST: Final = 20
_LONGEST_TEXT: Final = 1000
_TEXT: Final = r"^[^\x00]*$"
_DIGEST: Final = r"^b3:[0-9a-f]{64}$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign(Decision):
    """A decision that this version does not know, or not with these facts: shown as it came."""

    kind: ClassVar[str] = "foreign"
    is_private: ClassVar[bool] = True  # whose names it holds is not known either
    named: str
    given: str

    def __str__(self) -> str:
        return f"{self.named} ({self.given})"


class NodeEvent(BaseModel):
    """One decision of an agent: a line of its journal, and what its heartbeats bring. ``at`` is in seconds since the epoch."""

    id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z_/-]+$")]
    at: Annotated[float, Field(allow_inf_nan=False)]
    kind: Annotated[str, Field(max_length=64, pattern=r"^[a-z_]+$")]
    manifest: Annotated[str, Field(pattern=_DIGEST)] | None = None
    digest: Annotated[str, Field(pattern=_DIGEST)] | None = None
    organisation: Annotated[str, Field(max_length=256, pattern=_TEXT)] | None = None
    facts: dict[str, Fact]

    @classmethod
    def of(cls, event_id: str, at: float, decision: Decision) -> Self:
        """The wire's form."""
        return cls(
            id=event_id,
            at=at,
            kind=decision.kind,
            manifest=decision.manifest,
            digest=decision.digest,
            organisation=decision.organisation and _text(decision.organisation, 256),
            facts={name: _plain(fact) for name, fact in decision.facts().items()},
        )

    def recorded(self, cluster: str | None = None, node: str | None = None) -> Recorded:
        """The value."""
        subject = {"manifest": self.manifest, "digest": self.digest, "organisation": self.organisation}
        return Recorded(self.id, self.at, decision_of(self.kind, subject, self.facts), cluster, node)


def decision_of(kind: str, subject: dict[str, str | None], facts: dict[str, Any]) -> Decision:
    """The decision with these facts; ``Foreign`` when they are not those of its kind: agents may be older or newer."""
    if kind in KINDS:
        try:
            return _reader(kind).validate_python({**facts, **subject})
        except ValidationError:
            pass
    given = ", ".join(f"{name}={value}" for name, value in facts.items())
    return Foreign(**subject, named=kind, given=given[:_LONGEST_TEXT])


def _plain(fact: Fact) -> Fact:
    if isinstance(fact, str):
        return _text(fact, _LONGEST_TEXT)
    return [_text(one, _LONGEST_TEXT) for one in fact[:_LONGEST_LIST]] if isinstance(fact, list) else fact


def _text(text: str, longest: int) -> str:
    """Text that every journal and database takes: names of files may be anything, and problems may be long."""
    return text.encode(errors="replace").decode().replace("\0", "?")[:longest]


@cache
def _reader(kind: str) -> TypeAdapter[Decision]:
    return TypeAdapter(KINDS[kind])


class Event(BaseModel):
    """One decision as it is shown. ``node`` is null for the mirror's own."""

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
    def of(cls, recorded: Recorded) -> Self:
        """The wire's form."""
        decision = recorded.decision
        return cls(
            id=recorded.id,
            at=moment(recorded.at),
            cluster=recorded.cluster,
            node=recorded.node,
            kind=decision.named if isinstance(decision, Foreign) else decision.kind,
            manifest=decision.manifest,
            digest=decision.digest,
            facts=decision.facts(),
            sentence=str(decision),
        )

    def recorded(self) -> Recorded:
        """The value; of another organisation's decision, what may be seen of it."""
        decision = decision_of(self.kind, {"manifest": self.manifest, "digest": self.digest}, self.facts)
        return Recorded(self.id, self.at.timestamp(), decision, self.cluster, self.node)


class EventPage(BaseModel):
    """Events, newest first. ``next_cursor`` is null on the last page."""

    items: list[Event]
    next_cursor: str | None = None


class NamedPlace(BaseModel):
    """A file of a manifest that a digest is, or is a piece of. ``path`` is one of its paths, null once that is not known."""

    manifest: str
    content: str
    path: str | None
    chunk_index: int | None = None


class Named(BaseModel):
    """What a digest or a source stands for: ``manifests`` with the sources that they were mirrored from."""

    of: str
    kind: NamedKind
    manifests: dict[str, list[str]]
    places: list[NamedPlace] = []


class StagedPath(BaseModel):
    """What a path below a stage's mount is. ``digest`` and ``size`` are null for a folder, and once the manifest is gone."""

    path: str
    stage: Stage
    mount_location: str
    manifest: str
    name: str  # of the file, in the manifest
    digest: str | None = None
    size: int | None = None
    cached: bool


class NodeEvents(BaseModel):
    """An agent's own events, newest first, and what the path is that was asked for."""

    staged: StagedPath | None = None
    items: list[Event]
