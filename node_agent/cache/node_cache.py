"""The node's cache: the rules of ``CacheIndex``, carried out on disk under one lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bdn.core.cache_index import CacheIndex, EvictionPlan, EvictionReason, Victim
from bdn.core.digest import Digest
from bdn.core.errors import BdnError, CacheTooSmallError
from bdn.core.leases import Holder
from bdn.wire.stage_schema import TierUse
from node_agent.cache.cache_events import CacheEvents
from node_agent.cache.records import Held, ManifestRecords
from node_agent.cache.removal import Removal
from node_agent.cache.shelf import NodeShelf
from node_agent.cache.space import Space
from node_agent.crew import in_thread, to_the_end

Clock = Callable[[], float]


class _Before:
    """What an admission is about to add, to check it as a whole and to take it back."""

    def __init__(self, index: CacheIndex, held: Sequence[Held]) -> None:
        known = frozenset(index.manifests())
        self.contents = {digest: size for one in held for digest, size in one.manifest.contents.items()}
        self.new = [one.manifest.digest for one in held if one.manifest.digest not in known]
        self.absent = [content for content in self.contents if index.ledger.size_of(content) is None]

    def check(self, budget: int) -> None:
        """Several manifests of one stage must fit together; each alone is checked by the index."""
        total = sum(self.contents.values())
        if self.absent and total > budget:
            raise CacheTooSmallError(total, budget)


@dataclass(frozen=True)
class NodeCache:
    """What the node holds. Decisions are the index's; here they are done, evictions before the room is given away.

    Committed and reserved bytes together never pass the budget, nor do the bytes on disk: victims are deleted under the
    lock, before the admission that needs their room returns. Index and disk change together or, when the disk fails
    half-way, the index is corrected from the disk.
    """

    index: CacheIndex
    records: ManifestRecords
    removal: Removal
    shelf: NodeShelf
    space: Space
    clock: Clock
    events: CacheEvents
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def admit(self, held: Sequence[Held], holder: Holder) -> frozenset[Digest]:
        """Lease all these manifests for ``holder``, or none; returns the contents that are still to be filled.

        Raises:
            CacheTooSmallError, CacheFullError: with numbers; nothing was evicted.
            DiskFailedError: what was evicted by then is gone, and nothing is leased.
        """
        async with self._lock:
            return await to_the_end(self._admit(held, holder))

    async def _admit(self, held: Sequence[Held], holder: Holder) -> frozenset[Digest]:
        budget = await self.budget()
        before = _Before(self.index, held)
        before.check(budget)
        now = self.clock()
        victims: list[Victim] = []
        missing: set[Digest] = set()
        known = set(self.index.manifests())
        for one in held:  # all leases first: making room for one manifest must not evict another of the same stage
            if one.manifest.digest in known:
                self.index.leases.take(one.manifest.digest, holder)
        try:
            for one in held:
                digest, contents = one.manifest.digest, one.manifest.contents
                admission = self.index.admit(digest, contents, holder, now=now, budget=budget)
                victims.extend(admission.victims)
                missing.update(admission.missing)
            await in_thread(self.removal.remove, victims)
            for one in held:
                await in_thread(self.records.save, one, now)
                await in_thread(self.shelf.add, one)
        except BdnError:
            await self._undo(before, victims, holder)
            raise
        self._gone(victims, "lru")
        return frozenset(missing)

    async def _undo(self, before: _Before, victims: Sequence[Victim], holder: Holder) -> None:
        """Back to where we were, as far as the victims are still on disk. In one step for whoever reads the index."""
        survivors = await in_thread(self.removal.survivors, victims)
        self.index.leases.end(holder.stage_id)
        for content in before.absent:
            self.index.lose(content)
        for found in survivors:
            found.restore(self.index)
        await self._forget(before.new)

    def commit(self, content: Digest) -> None:
        """A fill finished: the file is whole and durable. Constant time: there may be a million of them."""
        self.index.commit(content)

    async def leave(self, stage_id: str) -> None:
        """End a stage's leases. Its fills have ended. Space that was promised to files never begun is free again."""
        async with self._lock:
            await to_the_end(self._leave(stage_id))

    async def _leave(self, stage_id: str) -> None:
        left = [digest for digest in self.index.leases.end(stage_id) if not self.index.leases.is_leased(digest)]
        now = self.clock()
        for manifest in left:
            self.index.recency.touch(manifest, now)
            with suppress(BdnError):  # the order of eviction after the next restart is all that is lost
                await in_thread(self.records.touch, manifest, now)
            for content in await in_thread(self.removal.unbegun, self._unleased_reservations(manifest)):
                self.index.lose(content)
        await self._forget([digest for digest in left if not self._counted(digest)])
        self.events.changed()

    def _unleased_reservations(self, manifest: Digest) -> list[Digest]:
        ledger, leases = self.index.ledger, self.index.leases
        if self.index.is_complete(manifest):
            return []
        return [
            content
            for content in self.index.contents_of(manifest)
            if ledger.size_of(content) is not None
            and not ledger.is_committed(content)
            and not any(map(leases.is_leased, self.index.named_by(content)))
        ]

    def _counted(self, manifest: Digest) -> bool:
        """Whether anything of it is on disk or promised."""
        return any(self.index.ledger.size_of(content) is not None for content in self.index.contents_of(manifest))

    async def evict(self, plan: Callable[[CacheIndex], EvictionPlan], reason: EvictionReason) -> EvictionPlan:
        """Carry out what ``plan`` decides about the index as it is once nobody else changes it."""
        async with self._lock:
            return await to_the_end(self._evict(plan, reason))

    async def _evict(self, plan: Callable[[CacheIndex], EvictionPlan], reason: EvictionReason) -> EvictionPlan:
        decided = plan(self.index)
        self.index.evict(decided)
        try:
            await in_thread(self.removal.remove, decided.victims)
        except BdnError:
            for found in await in_thread(self.removal.survivors, decided.victims):
                found.restore(self.index)
            raise
        finally:
            held = frozenset(self.index.manifests())
            self._gone([victim for victim in decided.victims if victim.manifest not in held], reason)
        return decided

    async def trim(self) -> None:
        """Evict what is over the budget: it shrinks when others fill the disk, or when the operator lowers it."""
        over = self.index.ledger.used_bytes - await self.budget()
        if over > 0:
            await self.evict(lambda index: index.plan_lru(over), "trim")

    async def budget(self) -> int:
        """What may be held now, in bytes."""
        return (await in_thread(self.space.budgets)).node

    async def use(self) -> TierUse:
        """The figures, for people and the mirror."""
        ledger, leased = self.index.ledger, self.index.leased_bytes()
        budget = await self.budget()
        return TierUse(budget=budget, committed=ledger.committed_bytes, reserved=ledger.reserved_bytes, leased=leased)

    async def _forget(self, manifests: Iterable[Digest]) -> None:
        """Drop manifests of which nothing is left to keep."""
        plan = self.index.plan(manifests)
        self.index.evict(plan)
        for victim in plan.victims:
            self.shelf.remove(victim.manifest)
        with suppress(BdnError):  # a record without content is rubbish, which the next start finds
            await in_thread(self.removal.remove, plan.victims)

    def _gone(self, victims: Sequence[Victim], reason: EvictionReason) -> None:
        for victim in victims:
            self.shelf.remove(victim.manifest)
        if victims:
            self.events.evicted(reason, len(victims))
        self.events.changed()
