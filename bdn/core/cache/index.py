"""What a node's cache holds, for whom, and what has to go to make room: every rule of the cache and no I/O.

Content is counted once however many manifests name it. Manifests come and go whole. Methods change the state and return
the I/O that the caller must now do; a caller that fails half-way can be killed, because the index is rebuilt from disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from bdn.core.cache.leases import Holder, LeaseBook
from bdn.core.cache.ledger import SpaceLedger
from bdn.core.cache.recency import RecencyOrder
from bdn.core.cache.shortfall import Shortfall
from bdn.core.digest import Digest
from bdn.core.errors import CacheTooSmallError

EvictionReason = Literal["lru", "request", "forced", "trim"]


@dataclass(frozen=True, slots=True)
class Victim:
    """A manifest to remove, and the contents that go with it because nothing else names them."""

    manifest: Digest
    contents: tuple[Digest, ...]
    size: int  # bytes freed
    holders: tuple[Holder, ...] = ()  # whose leases are broken; only a forced eviction has any


@dataclass(frozen=True, slots=True)
class Leased:
    """A manifest that an eviction would have taken, and who holds it."""

    manifest: Digest
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """What to do for a manifest that was let in: delete the victims first, then fill what is missing."""

    victims: tuple[Victim, ...]
    missing: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What an eviction takes, and what it must leave because it is leased."""

    victims: tuple[Victim, ...]
    refused: tuple[Leased, ...]

    @property
    def size(self) -> int:
        """Bytes freed."""
        return sum(victim.size for victim in self.victims)


@dataclass(slots=True)
class _Totals:
    """A manifest's contents in sums: a manifest may have a million, and every heartbeat asks."""

    counted: int = 0  # bytes, whole and on their way
    whole: int = 0  # contents


class CacheIndex:
    """The state of one cache. Times are seconds since the epoch; sizes and budgets are bytes.

    The ledger is for reading: it is changed here, so that the sums by manifest follow.
    """

    def __init__(self) -> None:
        self.ledger = SpaceLedger()
        self.leases = LeaseBook()
        self.recency = RecencyOrder()
        self._contents: dict[Digest, Mapping[Digest, int]] = {}  # manifest -> size by content
        self._named_by: dict[Digest, set[Digest]] = {}  # content -> manifests
        self._shared: set[Digest] = set()  # contents with several names
        self._totals: dict[Digest, _Totals] = {}  # by manifest

    # --- letting in ---

    def admit(
        self,
        manifest: Digest,
        contents: Mapping[Digest, int],
        holder: Holder,
        *,
        now: float,
        budget: int,
        free_files: int | None = None,
    ) -> Admission:
        """Lease a manifest for ``holder`` and reserve what it lacks, evicting least recently used manifests for room.

        ``free_files`` is how many files more there may be; None for any number.

        Raises:
            CacheTooSmallError: the manifest could not fit an empty cache of this budget. Nothing changed.
            CacheFullError: leased content leaves no room now, of bytes or of files. Nothing changed.
        """
        total = sum(contents.values())
        if total > budget and not self._is_held_whole(contents):
            raise CacheTooSmallError(total, budget)
        absent = {digest: size for digest, size in contents.items() if self.ledger.size_of(digest) is None}
        lacking = Shortfall(self.ledger, absent, budget=budget, free_files=free_files)
        victims = self._make_room(lacking, keep=manifest, keep_contents=contents)
        self._remember(manifest, contents, now)  # first, so that forgetting a victim spares what the two share
        for victim in victims:
            self._forget(victim.manifest)
        for digest, size in absent.items():
            self._reserve(digest, size)
        self.leases.take(manifest, holder)
        return Admission(victims, tuple(digest for digest in contents if not self.ledger.is_committed(digest)))

    def restore(
        self, manifest: Digest, contents: Mapping[Digest, int], present: Mapping[Digest, bool], *, last_used: float
    ) -> None:
        """Count a manifest that a start-up scan found.

        Args:
            present: for each of its contents that is on disk, whether it is whole (True) or a fill in progress (False).
        """
        self._remember(manifest, contents, last_used)
        for digest, size in contents.items():
            if digest in present and self.ledger.size_of(digest) is None:
                self._reserve(digest, size)
                if present[digest]:
                    self.commit(digest)

    def commit(self, content: Digest) -> None:
        """A fill finished: the content is whole. Committing twice changes nothing; ``KeyError`` for what is not counted."""
        if self.ledger.is_committed(content):
            return
        self.ledger.commit(content)
        for manifest in self._named_by.get(content, ()):
            self._totals[manifest].whole += 1

    def is_complete(self, manifest: Digest) -> bool:
        """Whether every content of the manifest is committed; False for a manifest that is not held."""
        contents = self._contents.get(manifest)
        return contents is not None and self._totals[manifest].whole == len(contents)

    def is_complete_but_for(self, manifest: Digest, content: Digest) -> bool:
        """Whether this content is all that a manifest which names it lacks; False for a manifest that is not held."""
        contents = self._contents.get(manifest, {})
        is_lacking = content in contents and not self.ledger.is_committed(content)
        return is_lacking and self._totals[manifest].whole + 1 == len(contents)

    # --- taking out ---

    def plan(self, manifests: Iterable[Digest], *, force: bool = False) -> EvictionPlan:
        """What evicting these manifests would take. Unknown ones are passed over. Changes nothing."""
        gone: set[Digest] = set()
        victims: list[Victim] = []
        refused: list[Leased] = []
        for manifest in dict.fromkeys(manifests):
            if manifest not in self._contents:
                continue
            holders = self.leases.holders(manifest)
            if holders and not force:
                refused.append(Leased(manifest, holders))
                continue
            gone.add(manifest)
            victims.append(self._victim(manifest, gone, holders))
        return EvictionPlan(tuple(victims), tuple(refused))

    def plan_lru(self, size: int, *, force: bool = False) -> EvictionPlan:
        """Least recently used manifests until ``size`` bytes are freed, or all that may go. Changes nothing."""
        chosen: list[Digest] = []
        plan = EvictionPlan((), ())
        for manifest in self.recency.oldest_first():
            if plan.size >= size:
                break
            chosen.append(manifest)
            plan = self.plan(chosen, force=force)
        return plan

    def evict(self, plan: EvictionPlan) -> None:
        """Carry a plan out on the state. The caller releases broken leases' stages first, and deletes afterwards."""
        for victim in plan.victims:
            self._forget(victim.manifest)

    def lose(self, content: Digest) -> int:
        """Content is no longer on disk (found missing or damaged); its manifests stay and are incomplete."""
        whole = self.ledger.is_committed(content)
        size = self.ledger.release(content)
        for manifest in self._named_by.get(content, ()):
            self._totals[manifest].counted -= size
            self._totals[manifest].whole -= whole
        return size

    # --- looking ---

    def manifests(self) -> tuple[Digest, ...]:
        """Held manifests, least recently used first."""
        return tuple(self.recency.oldest_first())

    def contents_of(self, manifest: Digest) -> Mapping[Digest, int]:
        """Size by content; ``KeyError`` when the manifest is not held."""
        return self._contents[manifest]

    def size_of(self, manifest: Digest) -> int:
        """Bytes counted for a manifest's contents; ``KeyError`` when it is not held."""
        return self._totals[manifest].counted

    def named_by(self, content: Digest) -> frozenset[Digest]:
        """The held manifests that name this content."""
        return frozenset(self._named_by.get(content, ()))

    def leased_bytes(self) -> int:
        """Bytes counted for contents that some lease protects, each once. Costs a look at what several manifests share."""
        leased = self._contents.keys() & self.leases.leased()
        total = sum(self._totals[manifest].counted for manifest in leased)
        if len(leased) > 1:
            total -= sum(self._counted_again(content, leased) for content in self._shared)
        return total

    # --- inside ---

    def _reserve(self, content: Digest, size: int) -> None:
        self.ledger.reserve(content, size)
        for manifest in self._named_by[content]:
            self._totals[manifest].counted += size

    def _counted_again(self, content: Digest, among: AbstractSet[Digest]) -> int:
        names = len(self._named_by[content] & among)
        return max(0, names - 1) * (self.ledger.size_of(content) or 0)

    def _is_held_whole(self, contents: Iterable[Digest]) -> bool:
        return all(self.ledger.is_committed(content) for content in contents)

    def _make_room(
        self, lacking: Shortfall, *, keep: Digest, keep_contents: Mapping[Digest, int]
    ) -> tuple[Victim, ...]:
        gone: set[Digest] = set()
        victims: list[Victim] = []
        for manifest in () if lacking.is_met else self.recency.oldest_first():
            if lacking.is_met:
                break
            if manifest == keep or self.leases.is_leased(manifest):
                continue
            gone.add(manifest)
            victim = self._victim(manifest, gone, (), spare=keep_contents)
            victims.append(victim)
            lacking.free(victim.size, len(victim.contents))
        if not lacking.is_met:
            raise lacking.error(self.leased_bytes())
        # Later victims may have freed what an earlier one shares with them, so an earlier victim may not have been needed
        # for its own sake; it is older, though, and LRU order is the promise.
        return tuple(victims)

    def _victim(
        self,
        manifest: Digest,
        gone: set[Digest],
        holders: tuple[Holder, ...],
        spare: Mapping[Digest, int] | None = None,
    ) -> Victim:
        contents = tuple(
            content
            for content in self._contents[manifest]
            if self._named_by[content] <= gone
            and self.ledger.size_of(content) is not None
            and (spare is None or content not in spare)
        )
        return Victim(manifest, contents, sum(self.ledger.size_of(content) or 0 for content in contents), holders)

    def _remember(self, manifest: Digest, contents: Mapping[Digest, int], now: float) -> None:
        self.recency.touch(manifest, now)
        if manifest in self._contents:
            return
        self._contents[manifest] = contents
        totals = self._totals[manifest] = _Totals()
        for content in contents:
            names = self._named_by.setdefault(content, set())
            names.add(manifest)
            if len(names) > 1:
                self._shared.add(content)
            totals.counted += self.ledger.size_of(content) or 0
            totals.whole += self.ledger.is_committed(content)

    def _forget(self, manifest: Digest) -> None:
        for content in self._contents.pop(manifest):
            names = self._named_by[content]
            names.discard(manifest)
            if len(names) == 1:
                self._shared.discard(content)
            if not names:
                del self._named_by[content]
                self.ledger.release(content)
        del self._totals[manifest]
        self.recency.forget(manifest)
        for holder in self.leases.holders(manifest):
            self.leases.end(holder.stage_id)
