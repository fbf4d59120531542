"""How manifests go from the node: given up by the index, written down, off the disk, and only then told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bdn.core.cache.index import CacheIndex, EvictionPlan, EvictionReason, Victim
from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.events import Event
from node_agent.background_tasks import in_thread
from node_agent.cache.events import Account, CacheEvents, kept
from node_agent.cache.held_chunks import NodeShelf
from node_agent.cache.removal import Removal


@dataclass(frozen=True)
class Departures:
    """Carried out under the cache's lock. What a failing disk keeps is counted again, and said to be here."""

    index: CacheIndex
    removal: Removal
    shelf: NodeShelf
    events: CacheEvents

    async def evict(
        self, plan: Callable[[CacheIndex], EvictionPlan], reason: EvictionReason, account: Account
    ) -> EvictionPlan:
        """What ``plan`` decides about the index as it is now; ``account`` says why each goes."""
        decided = plan(self.index)
        last_used = self.index.recency.last_used
        decisions = [account(victim, last_used(victim.manifest)) for victim in decided.victims]
        self.index.evict(decided)
        try:
            await in_thread(self.take_out, decided.victims, decisions)
        except BdnError as error:
            survivors = await in_thread(self.removal.survivors, decided.victims)
            for found in survivors:
                found.restore(self.index)
            await in_thread(self.events.decided, kept((found.manifest for found in survivors), error))
            raise
        finally:
            held = frozenset(self.index.manifests())
            self.tell([victim for victim in decided.victims if victim.manifest not in held], reason)
        return decided

    async def forget(self, manifests: Iterable[Digest], why: Sequence[Event]) -> None:
        """Drop manifests of which nothing is left to keep."""
        plan = self.index.plan(manifests)
        self.index.evict(plan)
        for victim in plan.victims:
            self.shelf.remove(victim.manifest)
        with suppress(BdnError):  # a record without content is rubbish, which the next start finds
            await in_thread(self.take_out, plan.victims, why)

    def take_out(self, victims: Sequence[Victim], decisions: Sequence[Event]) -> None:
        """What is decided is written down before the first byte goes: else a kill leaves what nobody can explain. Blocking."""
        self.events.decided(decisions)
        self.removal.remove(victims)

    def tell(self, victims: Sequence[Victim], reason: EvictionReason) -> None:
        """They are gone: nobody is served from them any more."""
        for victim in victims:
            self.shelf.remove(victim.manifest)
        if victims:
            self.events.evicted(reason, len(victims))
        self.events.changed()
