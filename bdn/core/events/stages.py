"""What is decided about stages and prefetches: let in or refused, READY or FAILED, renewed, ended, gone on with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from bdn.core.events.decision import Decision, Presence, holder_name, when
from bdn.core.sizes import format_size

Ending = Literal["released", "expired", "abandoned", "replaced", "forced", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStage(Decision):
    """A decision about one stage or prefetch. Other organisations do not see it."""

    is_private: ClassVar[bool] = True
    stage: str
    job: str

    @property
    def holder(self) -> str:
        """Who it is about, in words."""
        return holder_name(self.job, self.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted(OfStage):
    """Room was made and the lease taken. ``committed`` and ``reserved`` are those of the whole cache, afterwards."""

    kind: ClassVar[str] = "admitted"
    presence: ClassVar[Presence | None] = "here"
    bytes_total: int
    bytes_missing: int
    budget: int
    committed: int
    reserved: int

    def __str__(self) -> str:
        missing = f"{format_size(self.bytes_missing)} of {format_size(self.bytes_total)} were missing"
        if not self.bytes_missing:
            missing = f"all of its {format_size(self.bytes_total)} were there"
        cache = f"{format_size(self.committed)} held and {format_size(self.reserved)} promised"
        return f"was leased for {self.holder}: {missing}; with it the cache has {cache}, of {format_size(self.budget)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(OfStage):
    """It was not let in. ``code`` is the error's; ``in_the_way`` are the holders of what could not be evicted."""

    kind: ClassVar[str] = "refused"
    presence: ClassVar[Presence | None] = "kept out"
    code: str
    needed: int
    free: int
    leased: int
    budget: int
    in_the_way: tuple[str, ...] = ()
    needed_files: int | None = None  # these two only where inodes ran short, and not bytes
    free_files: int | None = None

    def __str__(self) -> str:
        if self.code == "CACHE_TOO_SMALL":
            why = f"{format_size(self.needed)} can never fit a cache of {format_size(self.budget)}"
        elif self.needed_files is not None:
            why = f"{self.needed_files} more files did not fit: the file system had inodes for {self.free_files}"
        else:
            why = (
                f"{format_size(self.needed)} more did not fit: of {format_size(self.budget)}, {format_size(self.free)} were "
                f"free and {format_size(self.leased)} in use"
            )
        way = f", by {', '.join(self.in_the_way)}" if self.in_the_way else ""
        return f"was not let in for {self.holder} [{self.code}]: {why}{way}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived(OfStage):
    """It is whole here and the stage READY, or the prefetch. ``node``, ``cluster`` and ``mirror`` are bytes by tier."""

    kind: ClassVar[str] = "arrived"
    presence: ClassVar[Presence | None] = "here"
    node: int
    cluster: int
    mirror: int

    def __str__(self) -> str:
        came = (
            f"{format_size(self.node)} were on this node, {format_size(self.cluster)} came from its cluster, "
            f"{format_size(self.mirror)} from the mirror"
        )
        return f"was READY for {self.holder}: {came}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(OfStage):
    """A stage or prefetch failed, and its lease ended."""

    kind: ClassVar[str] = "failed"
    code: str
    problem: str

    def __str__(self) -> str:
        return f"was given up for {self.holder}: {self.problem} [{self.code}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMended(OfStage):
    """Files of a READY stage were lost, and could not be brought again now. Its view and its lease stay."""

    kind: ClassVar[str] = "not_mended"
    code: str
    problem: str

    def __str__(self) -> str:
        return f"stays as it is for {self.holder}, although files were lost: {self.problem} [{self.code}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(OfStage):
    """A lease got another end; None is until it is released."""

    kind: ClassVar[str] = "renewed"
    expires_at: float | None = None

    def __str__(self) -> str:
        until = "until it is released" if self.expires_at is None else f"until {when(self.expires_at)}"
        return f"stays leased for {self.holder} {until}"


_ENDINGS = {
    "released": "it was released",
    "expired": "its time was over",
    "abandoned": "the directory that it was pulled to is gone",
    "replaced": "another pull took its directory",
    "forced": "a forced eviction took it away",
    "interrupted": "the command that pulled it has ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(OfStage):
    """A stage and its lease ended. ``expires_at`` is the end that the lease had, if any."""

    kind: ClassVar[str] = "ended"
    ending: Ending
    expires_at: float | None = None

    def __str__(self) -> str:
        at = f" at {when(self.expires_at)}" if self.ending == "expired" and self.expires_at is not None else ""
        return f"is not leased for {self.holder} any more: {_ENDINGS[self.ending]}{at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(OfStage):
    """After a start of the agent a stage goes on. ``state`` is where it was."""

    kind: ClassVar[str] = "resumed"
    state: str

    def __str__(self) -> str:
        return f"was {self.state} for {self.holder} when the agent started again, and went on"
