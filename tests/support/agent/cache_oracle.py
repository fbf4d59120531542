"""An oracle for the cache index: sets and dictionaries, everything computed anew from them at every question.

It shares no code with ``bdn.core.cache.index``: the index adds and subtracts, the oracle asks what would still be named.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bdn.core.cache.index import Holder
from bdn.core.chunk import Digest


class Gone(NamedTuple):
    """A manifest that has to go, what leaves the disk with it, and whose leases break."""

    manifest: Digest
    contents: frozenset[Digest]
    size: int
    holders: tuple[Holder, ...]


class TooSmall(NamedTuple):
    """The verdict that a manifest can never fit."""

    needed: int
    budget: int


class Full(NamedTuple):
    """The verdict that a manifest does not fit now."""

    needed: int
    free: int
    leased: int
    budget: int


class Admitted(NamedTuple):
    """The verdict that a manifest is let in: the victims, what is to be filled, and the bytes newly promised."""

    victims: list[Gone]
    missing: frozenset[Digest]
    promised: int


@dataclass
class CacheOracle:
    """``trees`` and ``size`` are the world; the rest is what the cache has seen of it."""

    trees: dict[Digest, frozenset[Digest]]
    size: dict[Digest, int]
    used_at: dict[Digest, float] = field(default_factory=dict)  # the held manifests
    touches: list[Digest] = field(default_factory=list)  # every touch, the latest last
    whole: set[Digest] = field(default_factory=set)
    partial: set[Digest] = field(default_factory=set)
    leases: list[tuple[Digest, Holder]] = field(default_factory=list)

    # --- questions ---

    def total(self, contents: Iterable[Digest]) -> int:
        return sum(self.size[content] for content in set(contents))

    def used(self) -> int:
        return self.total(self.whole | self.partial)

    def holders(self, manifest: Digest) -> tuple[Holder, ...]:
        return tuple(holder for held, holder in self.leases if held == manifest)

    def by_age(self) -> list[Digest]:
        last_touch = {manifest: position for position, manifest in enumerate(self.touches)}
        return sorted(self.used_at, key=lambda manifest: (self.used_at[manifest], last_touch[manifest]))

    def leased_contents(self) -> set[Digest]:
        leased = [self.trees[manifest] for manifest, _ in self.leases if manifest in self.used_at]
        return set().union(*leased) & (self.whole | self.partial)

    def remaining(self, without: Sequence[Digest], newcomer: Digest | None = None) -> set[Digest]:
        """What stays counted when these manifests are no longer held and the newcomer is."""
        names = [self.trees[m] for m in {*self.used_at, *([newcomer] if newcomer else [])} if m not in without]
        return (self.whole | self.partial) & set().union(*names)

    def farewell(self, going: Sequence[Digest], newcomer: Digest | None = None) -> list[Gone]:
        gone = []
        for number, manifest in enumerate(going, start=1):
            left = self.remaining(going[: number - 1], newcomer) - self.remaining(going[:number], newcomer)
            gone.append(Gone(manifest, frozenset(left), self.total(left), self.holders(manifest)))
        return gone

    # --- what the index is asked to do ---

    def admit(self, manifest: Digest, holder: Holder, *, now: float, budget: int) -> Admitted | TooSmall | Full:
        tree = self.trees[manifest]
        if not tree <= self.whole and self.total(tree) > budget:
            return TooSmall(self.total(tree), budget)
        absent = tree - self.whole - self.partial
        needed = self.total(absent)
        going: list[Digest] = []
        candidates = [m for m in self.by_age() if m != manifest and not self.holders(m)] if needed else []
        while needed and self.total(self.remaining(going, manifest)) + needed > budget:
            if not candidates:
                return Full(needed, max(budget - self.used(), 0), self.total(self.leased_contents()), budget)
            going.append(candidates.pop(0))
        gone = self.farewell(going, manifest)
        self.touch(manifest, now)
        self.remove(gone)
        self.partial |= absent
        self.lease(manifest, holder)
        return Admitted(gone, tree - self.whole, needed)

    def touch(self, manifest: Digest, now: float) -> None:
        self.used_at[manifest] = max(now, self.used_at.get(manifest, now))
        self.touches.append(manifest)

    def lease(self, manifest: Digest, holder: Holder) -> None:
        places = [at for at, (m, had) in enumerate(self.leases) if (m, had.stage_id) == (manifest, holder.stage_id)]
        for at in places:
            self.leases[at] = (manifest, holder)
        if not places:
            self.leases.append((manifest, holder))

    def end(self, stage_id: str) -> None:
        self.leases = [(manifest, holder) for manifest, holder in self.leases if holder.stage_id != stage_id]

    def plan(self, manifests: Iterable[Digest], *, force: bool) -> tuple[list[Gone], list[Digest]]:
        asked = [manifest for manifest in dict.fromkeys(manifests) if manifest in self.used_at]
        refused = [manifest for manifest in asked if self.holders(manifest) and not force]
        return self.farewell([manifest for manifest in asked if manifest not in refused]), refused

    def plan_lru(self, size: int, *, force: bool) -> tuple[list[Gone], list[Digest]]:
        asked: list[Digest] = []
        for manifest in self.by_age():
            gone, _ = self.plan(asked, force=force)
            if sum(each.size for each in gone) >= size:
                break
            asked.append(manifest)
        return self.plan(asked, force=force)

    def remove(self, gone: Iterable[Gone]) -> None:
        for each in gone:
            del self.used_at[each.manifest]
            self.touches = [manifest for manifest in self.touches if manifest != each.manifest]
            self.whole -= each.contents
            self.partial -= each.contents
            for holder in each.holders:
                self.end(holder.stage_id)

    def restart(self, scan_order: Sequence[Digest], begun: Iterable[Digest]) -> None:
        """A start finds whole files and begun fills; what was only promised is gone."""
        self.partial &= set(begun)
        self.touches = list(scan_order)
