"""Periodic rounds: when a round begins, and in which order a scrub reads a node's content."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bdn.core.chunk import Digest


def is_round_due(began: float | None, period_seconds: float, now: float) -> bool:
    """Whether to begin a round now.

    ``began`` is the start of the last, ended round; None: no round yet. Period 0: never.

    A round begins one period after the start of the round before, so each fault is found within a period. A round that
    takes longer is followed by the next at once. A clock that was set back does not delay rounds by years.
    """
    if not period_seconds:
        return False
    return began is None or not began <= now < began + period_seconds


ScrubbedTier = Literal["cluster", "node"]


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """One item to read again: a node-tier file or a cluster-tier chunk, under a manifest that names it."""

    manifest: Digest
    tier: ScrubbedTier
    content: Digest


@dataclass(frozen=True, slots=True)
class ScrubRound:
    """One pass over everything. ``after`` is the last item read; ``ended`` is None while the round is under way.

    The order is by name, so a position defines the rest of a round also after a restart, whatever was added or removed
    meanwhile: added content was verified on arrival.
    """

    began: float
    after: Position | None = None
    ended: float | None = None

    @property
    def is_under_way(self) -> bool:
        return self.ended is None

    def is_due(self, period_seconds: float, now: float) -> bool:
        return self.ended is not None and is_round_due(self.began, period_seconds, now)

    def manifests(self, held: Iterable[Digest]) -> list[Digest]:
        return sorted(one for one in set(held) if self.after is None or one >= self.after.manifest)

    def positions(self, manifest: Digest, files: Iterable[Digest], chunks: Iterable[Digest]) -> list[Position]:
        """The items left in one manifest, in order."""
        every = [Position(manifest, "cluster", chunk) for chunk in chunks]
        every += [Position(manifest, "node", file) for file in files]
        return sorted(one for one in every if self.after is None or one > self.after)
