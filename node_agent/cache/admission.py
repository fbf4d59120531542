"""Letting the manifests of one stage in, all of them or none more than it had.

lease what is here → count everything in, which chooses victims → write down and delete the victims → record the newcomers
↘ one of these fails: count again what the disk still has, give back the leases that there were, forget the newcomers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bdn.core.cache.index import CacheIndex, Victim
from bdn.core.cache.leases import Holder
from bdn.core.digest import Digest
from bdn.core.errors import BdnError, CacheTooSmallError
from bdn.core.events import Event
from node_agent.background_tasks import in_thread
from node_agent.cache import cache_events
from node_agent.cache.eviction import Evictor
from node_agent.cache.records import Held
from node_agent.cache.space import Space


class StageAdmission:
    """One admission. It is made, and run once, under the cache's lock; it remembers how everything was when it was made."""

    def __init__(self, eviction: Evictor, space: Space, held: Sequence[Held], holder: Holder) -> None:
        self.eviction, self.space = eviction, space
        self.index: CacheIndex = eviction.index
        self.held, self.holder = held, holder
        self._last_used = {one: self.index.recency.last_used(one) for one in self.index.manifests()}
        self._leased = self.index.leases.of(holder.stage_id)
        self._new = [one.manifest.digest for one in held if one.manifest.digest not in self._last_used]
        self._contents = {digest: size for one in held for digest, size in one.manifest.contents.items()}
        self._absent = [content for content in self._contents if self.index.ledger.size_of(content) is None]
        self._victims: list[Victim] = []

    async def run(self, clock: Callable[[], float]) -> frozenset[Digest]:
        """The contents that are still to be filled.

        Raises:
            CacheTooSmallError, CacheFullError: with numbers; nothing was evicted.
            DiskFailedError: what was evicted by then is gone, and nothing more is leased.
        """
        budget = await in_thread(self._budget)
        free_files = await in_thread(self.space.free_files)
        now = clock()
        self._lease_what_is_here()
        try:
            missing = self._count_in(budget, free_files, now)
            await in_thread(self.eviction.delete, self._victims, self._decisions(budget))
            for one in self.held:
                await in_thread(self.eviction.files.records.save, one, now)
                await in_thread(self.eviction.chunks.add, one)
        except BdnError as error:
            await self._undo(error)
            raise
        self.eviction.announce(self._victims, "lru")
        return missing

    def _budget(self) -> int:
        """What may be held, with what is about to be added: its last blocks are as large as all others."""
        padding = self.space.padding([self._contents[content] for content in self._absent])
        return self.space.room(padding).budgets.node

    def _lease_what_is_here(self) -> None:
        """All leases first: making room for one manifest must not evict another of the same stage."""
        for one in self.held:
            if one.manifest.digest in self._last_used:
                self.index.leases.take(one.manifest.digest, self.holder)

    def _count_in(self, budget: int, free_files: int | None, now: float) -> frozenset[Digest]:
        """Each manifest alone is checked by the index; together they must fit, too. ``free_files`` None: nothing counts them."""
        total = sum(self._contents.values())
        if self._absent and total > budget:
            raise CacheTooSmallError(total, budget)
        ledger = self.index.ledger
        most_files = None if free_files is None else free_files + ledger.count
        missing: set[Digest] = set()
        for one in self.held:
            admission = self.index.admit(
                one.manifest.digest,
                one.manifest.contents,
                self.holder,
                now=now,
                budget=budget,
                free_files=None if most_files is None else most_files - ledger.count,
            )
            self._victims.extend(admission.victims)
            missing.update(admission.missing)
        return frozenset(missing)

    def _decisions(self, budget: int) -> list[Event]:
        account = cache_events.for_room(self.holder, self.held)
        made_room = [account(victim, self._last_used[victim.manifest]) for victim in self._victims]
        return made_room + cache_events.admitted(self.index, self.held, self.holder, budget)

    async def _undo(self, error: BdnError) -> None:
        """Back to where we were, as far as the victims are still on disk. In one step for whoever reads the index."""
        refusal = cache_events.refused(self.index, self.held, self.holder, error)
        left = await in_thread(self.eviction.files.left_of, self._victims)
        self.index.leases.end(self.holder.stage_id)
        # What went with a victim may have been promised to a later newcomer that shares it; now it is what the disk says.
        given_up = [content for victim in self._victims for content in victim.contents]
        for content in (*self._absent, *given_up):
            self.index.lose(content)
        for found in left:
            found.restore(self.index)
        for manifest in self._leased:
            self.index.leases.take(manifest, self.holder)
        # Before a refusal nothing was written down; before any other error, what has not happened now.
        why = refusal or [
            *cache_events.kept((found.manifest for found in left), error),
            *cache_events.dropped(self._new, str(error)),
        ]
        await self.eviction.forget(self._new, why)
