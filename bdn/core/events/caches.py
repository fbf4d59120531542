"""What is decided about what a node holds: found, evicted and for whom, refused to be evicted, dropped, damaged, repaired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bdn.core.events.decision import Decision, Presence, holder_name, when
from bdn.core.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Decision):
    """A manifest leaves a tier. Written down before the first byte is deleted; ``last_used`` 0 is not known."""

    presence: ClassVar[Presence | None] = "absent"
    tier: str
    bytes: int
    last_used: float = 0.0

    @property
    def what(self) -> str:
        """How much goes, from where, and since when it lay there."""
        chunks = "its chunks for the cluster were evicted" if self.tier == "cluster" else "was evicted"
        used = f", used last at {when(self.last_used)}" if self.last_used else ""
        return f"{chunks} ({format_size(self.bytes)}{used})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRoom(Left):
    """Evicted as the least recently used, for a stage or prefetch; in the cluster tier for another manifest's chunks."""

    kind: ClassVar[str] = "made_room"
    names: ClassVar[tuple[str, ...]] = ("stage", "job", "newcomer")
    stage: str = ""
    job: str = ""
    newcomer: str = ""  # the manifest that needed the room

    def __str__(self) -> str:
        whom = holder_name(self.job, self.stage)
        if self.tier == "cluster":
            whom = f"chunks of {self.newcomer or 'another manifest'}"
        newcomer = f", which brought {self.newcomer}" if self.tier != "cluster" and self.newcomer else ""
        return f"{self.what} as the least recently used, to make room for {whom}{newcomer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmed(Left):
    """Evicted because the budget fell below what is held: others fill the disk, or the operator allows less."""

    kind: ClassVar[str] = "trimmed"
    held: int
    budget: int
    allowed: int

    def __str__(self) -> str:
        if self.budget < self.allowed:
            why = f"others fill the disk, which left it {format_size(self.budget)} of {format_size(self.allowed)}"
        else:
            why = f"it may hold {format_size(self.budget)} now"
        return f"{self.what} because the tier held {format_size(self.held)} and {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictedOnRequest(Left):
    """Somebody asked for it. ``holders`` are those whose leases were broken, by force."""

    kind: ClassVar[str] = "evicted"
    names: ClassVar[tuple[str, ...]] = ("eviction", "asked_by", "holders")
    eviction: str
    asked_by: str
    forced: bool
    holders: tuple[str, ...] = ()

    def __str__(self) -> str:
        asked = f"as {self.asked_by} asked ({self.eviction})" if self.eviction else "on request"
        broken = f", although it was in use by {', '.join(self.holders)}" if self.holders else ""
        return f"{self.what} {'by force ' if self.forced else ''}{asked}{broken}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRefused(Decision):
    """An eviction left it alone, because of its holders."""

    kind: ClassVar[str] = "eviction_refused"
    names: ClassVar[tuple[str, ...]] = ("eviction", "asked_by", "holders")
    tier: str
    eviction: str
    asked_by: str
    holders: tuple[str, ...]

    def __str__(self) -> str:
        asked = f"that {self.asked_by} asked for ({self.eviction})" if self.eviction else "on request"
        holders = ", ".join(self.holders) or "others"
        return f"was spared by an eviction {asked}: it was in use by {holders}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Decision):
    """What was written down as evicted is still here, because the disk failed."""

    kind: ClassVar[str] = "kept"
    presence: ClassVar[Presence | None] = "here"
    problem: str

    def __str__(self) -> str:
        return f"is still here: it could not be evicted ({self.problem})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Decision):
    """A manifest of which nothing was on disk is not counted any more."""

    kind: ClassVar[str] = "dropped"
    presence: ClassVar[Presence | None] = "absent"
    why: str

    def __str__(self) -> str:
        return f"was dropped: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Decision):
    """The agent started and found it on disk. ``bytes_whole`` are those of whole files."""

    kind: ClassVar[str] = "found"
    presence: ClassVar[Presence | None] = "here"
    bytes_total: int
    bytes_whole: int

    def __str__(self) -> str:
        whole = "whole" if self.bytes_whole == self.bytes_total else f"{format_size(self.bytes_whole)} of it whole"
        return f"was found when the agent started: {format_size(self.bytes_total)}, {whole}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong(Decision):
    """A chunk, a slab or a file was not what its name says. ``tier`` is where it lay, ``reason`` what was wrong.

    Of a slab that one organisation alone may read, only that one hears.
    """

    is_private: ClassVar[bool] = True
    tier: str
    reason: str
    path: str = ""

    @property
    def what(self) -> str:
        """Which bytes, and what was wrong with them."""
        return f"{self.digest}{_at(self.path)} in the tier {self.tier} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged(Wrong):
    """It is still wrong, or was put aside at the start."""

    kind: ClassVar[str] = "damaged"

    def __str__(self) -> str:
        return f"has a damaged part: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired(Wrong):
    """The right bytes are there again."""

    kind: ClassVar[str] = "repaired"

    def __str__(self) -> str:
        return f"was repaired: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Wrong):
    """The right bytes could not be obtained; it is not served until a stage, or on the mirror a repair, brings it again."""

    kind: ClassVar[str] = "lost"

    def __str__(self) -> str:
        again = "neither an agent nor its upstream has now" if self.tier == "mirror" else "the next stage brings again"
        return f"lost a part, which {again}: {self.what}"


def _at(path: str) -> str:
    return f" of {path}" if path else ""
