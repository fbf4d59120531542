"""What is done in rounds: when one is to begin anew, what it reads, and in which order a scrub goes through what a node holds."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from bdn.core.chunk import Digest


def is_round_due(began: float | None, period_seconds: float, now: float) -> bool:
    """Whether a round is to begin now. ``began`` is of the newest, which has ended; None when there was none. Period 0 is never.

    It begins a period after the one before it began. So whatever goes wrong is found within a period, unless a round takes
    longer than that; then the next one begins at once. A clock that was set back is no reason to wait for years.
    """
    if not period_seconds:
        return False
    return began is None or not began <= now < began + period_seconds


@dataclass(frozen=True, slots=True)
class Sample:
    """What a round reads when it cannot read everything within its period: one thing in ``of``, in the next round others.

    Rounds begin a period apart, so that each has a ``turn`` of its own, and ``of`` of them read everything. One that began late
    may take the turn after the next.
    """

    of: int
    turn: int

    @classmethod
    def that_fits(cls, size: int, rate_bytes_per_second: float, period_seconds: float, began: float) -> Self:
        """So that a round over ``size`` bytes ends in time at this rate."""
        of = max(1, math.ceil(size / (rate_bytes_per_second * period_seconds)))
        return cls(of, int(began // period_seconds) % of)

    def has(self, digest: Digest) -> bool:
        """Whether this is read now."""
        return int(digest.hex[:16], 16) % self.of == self.turn


ScrubbedTier = Literal["cluster", "node"]


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """One thing to read again: a file of the node tier or a chunk of the cluster tier, for a manifest that names it."""

    manifest: Digest
    tier: ScrubbedTier
    content: Digest


@dataclass(frozen=True, slots=True)
class ScrubRound:
    """One pass over everything. ``after`` is what was read last; ``ended`` is None while it is under way.

    The order is that of names. So a position says what is left of a round also after a restart, whatever came and went
    meanwhile: what came was verified when it came.
    """

    began: float
    after: Position | None = None
    ended: float | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether something may be left of it."""
        return self.ended is None

    def is_due(self, period_seconds: float, now: float) -> bool:
        """Whether the next one is to begin."""
        return self.ended is not None and is_round_due(self.began, period_seconds, now)

    def manifests(self, held: Iterable[Digest]) -> list[Digest]:
        """The manifests of which something is left, in order."""
        return sorted(one for one in set(held) if self.after is None or one >= self.after.manifest)

    def positions(self, manifest: Digest, files: Iterable[Digest], chunks: Iterable[Digest]) -> list[Position]:
        """What is left of one manifest, in order."""
        every = [Position(manifest, "cluster", chunk) for chunk in chunks]
        every += [Position(manifest, "node", file) for file in files]
        return sorted(one for one in every if self.after is None or one > self.after)
