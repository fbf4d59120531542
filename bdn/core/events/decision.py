"""What an event is: something that was decided about a manifest, a content or a chunk, with the facts that decided it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import ClassVar, Final, Literal, Self

from bdn.core.errors import Fact

Presence = Literal["here", "absent", "kept out"]
_SUBJECT: Final = ("manifest", "digest", "organisation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The root of the vocabulary. Subclasses are frozen dataclasses whose own fields are the facts, as with errors.

    As text it is a clause made of nothing but the facts; its subject is the manifest, which the clause leaves out.
    ``manifest`` and ``digest`` (of a content or a chunk) are written ``b3:…``; ``organisation`` is whose wish it was.
    """

    kind: ClassVar[str] = "decision"
    # What it says about the manifest at the place where it was decided: it is there or on its way; it is not; it was not let
    # in, and is there only if it was before. None: nothing.
    presence: ClassVar[Presence | None] = None
    is_private: ClassVar[bool] = False  # of nobody's interest but the organisation's whose wish it was
    names: ClassVar[tuple[str, ...]] = ()  # facts that tell other organisations who it was

    manifest: str | None = None
    digest: str | None = None
    organisation: str | None = None

    def facts(self) -> dict[str, Fact]:
        """Everything but what it is about, as plain JSON values."""
        found: dict[str, Fact] = {}
        for field in fields(self):
            if field.name not in _SUBJECT:
                value = getattr(self, field.name)
                found[field.name] = list(value) if isinstance(value, tuple) else value
        return found

    def seen_by(self, organisation: str) -> Self | None:
        """The decision as that organisation may see it: without the names of others, or not at all."""
        if self.organisation in (None, organisation):
            return self
        if self.is_private:
            return None
        return replace(self, **{name: type(getattr(self, name))() for name in self.names}, organisation=None)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A decision, when it was made, and where: ``node`` None is the mirror. ``at`` is in seconds since the epoch."""

    id: str
    at: float
    decision: Decision
    cluster: str | None = None
    node: str | None = None


def when(at: float) -> str:
    """A time as it stands in sentences."""
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (ValueError, OverflowError, OSError):
        return f"second {at:g}"  # of a clock that is far off


def holder_name(job: str, stage: str) -> str:
    """Who needs a manifest: a stage's job, or a prefetch; without names it is somebody of another organisation."""
    if not stage:
        return "a job of another organisation"
    return f"prefetch {stage}" if stage.startswith("pre_") else f"job {job} (stage {stage})"
