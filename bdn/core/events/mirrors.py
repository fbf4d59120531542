"""What the mirror decides: mirrored or reused, evicted, restored, collected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bdn.core.events.decision import Decision, Presence, when
from bdn.core.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored(Decision):
    """A manifest was published for an organisation. ``transferred`` came from the upstream, ``reused`` was in the store."""

    kind: ClassVar[str] = "mirrored"
    presence: ClassVar[Presence | None] = "here"
    is_private: ClassVar[bool] = True
    mirror: str
    source: str
    revision: str | None
    files: int
    transferred: int
    reused: int

    def __str__(self) -> str:
        came = f"{format_size(self.transferred)} came from there and {format_size(self.reused)} were held"
        return f"was mirrored from {self.source}{_at(self.revision)} by {self.mirror}: {self.files} files, {came}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused(Decision):
    """A mirror asked for a revision that was published before; nothing moved."""

    kind: ClassVar[str] = "reused"
    presence: ClassVar[Presence | None] = "here"
    is_private: ClassVar[bool] = True
    mirror: str
    source: str
    revision: str | None

    def __str__(self) -> str:
        return f"was asked for again by {self.mirror}: {self.source}{_at(self.revision)}, which was held already"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstoned(Decision):
    """An organisation gave it up. Until ``restorable_until`` it can be restored; None is not at all."""

    kind: ClassVar[str] = "tombstoned"
    presence: ClassVar[Presence | None] = "absent"
    is_private: ClassVar[bool] = True
    eviction: str
    restorable_until: float | None = None

    def __str__(self) -> str:
        until = "" if self.restorable_until is None else f", and can be restored until {when(self.restorable_until)}"
        return f"was evicted from the mirror ({self.eviction}){until}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Decision):
    """The organisation has it again; nothing moved."""

    kind: ClassVar[str] = "restored"
    presence: ClassVar[Presence | None] = "here"
    is_private: ClassVar[bool] = True

    def __str__(self) -> str:
        return "was restored on the mirror"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected(Decision):
    """Everybody had given it up for long enough. ``bytes`` are those of the files and slabs that it alone named: they leave the store."""

    kind: ClassVar[str] = "collected"
    presence: ClassVar[Presence | None] = "absent"
    bytes: int

    def __str__(self) -> str:
        return f"was collected from the mirror's store: {format_size(self.bytes)} were its own"


def _at(revision: str | None) -> str:
    return "" if revision is None else f" at {revision}"
