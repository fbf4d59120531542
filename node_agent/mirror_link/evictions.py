"""Evictions on request: by manifest, by job, by age or everything; leased content is refused, or its stages are broken."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bdn.core.cache.index import EvictionPlan, Holder, Leased, TierIndex, Victim
from bdn.core.chunk import Digest
from bdn.core.errors import CanceledError, InvalidRequestError
from bdn.wire.operation_schema import EvictCommand, EvictedItem, EvictReport, Report, Tier
from node_agent.background_tasks import in_thread
from node_agent.cache.cache_events import OnRequest
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.cache.node_cache import NodeCache
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.stage import StageRegistry

logger = logging.getLogger(__name__)


Plan = Callable[[TierIndex[Any]], EvictionPlan]  # of either tier


@dataclass(frozen=True)
class EvictionCommands:
    """Carries out commands. All or nothing per manifest and tier; what was evicted before a failure stays evicted."""

    cluster: str
    node: str
    registry: StageRegistry
    lifecycle: Lifecycle
    cache: NodeCache
    tier: ClusterTier
    break_prefetch: Callable[[str], Awaitable[bool]]  # False: no prefetch has this id
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, command: EvictCommand, tell: Callable[[Report], None]) -> None:
        """One at a time. Raises what ``evict`` raises."""
        async with self._turn:
            tell(Report(id=command.id, evict=EvictReport(items=await self.evict(command))))

    async def evict(self, command: EvictCommand) -> list[EvictedItem]:
        """What went, or in a dry run would go, and what was refused because of whom.

        Raises:
            InvalidRequestError: the command selects nothing, or several things.
            DiskFailedError, MountFailedError: something could not be removed.
        """
        plan = self._plan(command)
        items: list[EvictedItem] = []
        if command.tier in (None, "node"):
            items += self._items("node", await self._evict_node(command, plan))
        if command.tier in (None, "cluster"):
            items += self._items("cluster", await self._evict_cluster(command, plan))
        return items

    async def _evict_node(self, command: EvictCommand, plan: Plan) -> EvictionPlan:
        if command.dry_run:
            return plan(self.cache.index)
        await self.lifecycle.release_abandoned()
        broken: dict[Digest, tuple[Holder, ...]] = {}
        if command.force:
            forced = plan(self.cache.index)
            broken = {victim.manifest: victim.holders for victim in forced.victims}
            await self._break_leases(forced)
            # Between breaking the leases and here somebody may have taken a new one: that one is respected.
            plan = self._plan(command.model_copy(update={"force": False}))
        account = OnRequest(command, "node", broken)
        done = await self.cache.evict(plan, "forced" if command.force else "request", account)
        for victim in done.victims:
            logger.info("evicted manifest %s: %d bytes", victim.manifest, victim.size)
        victims = [replace(victim, holders=broken.get(victim.manifest, ())) for victim in done.victims]
        seen = {one.manifest for one in done.victims} | {one.manifest for one in done.refused}
        # What was only begun went with its last holder, who is to be named all the same.
        begun = [
            Victim(manifest, (), 0, holders) for manifest, holders in broken.items() if holders and manifest not in seen
        ]
        also = [*account.spared(done.refused), *(account(victim, 0.0) for victim in begun)]
        await in_thread(self.cache.events.decided, also)
        return EvictionPlan((*victims, *begun), done.refused)

    async def _evict_cluster(self, command: EvictCommand, plan: Plan) -> EvictionPlan:
        """Nothing here is leased: a peer that reads a chunk goes on reading it, or reads it elsewhere."""
        if command.dry_run:
            return await in_thread(self.tier.plan, plan)
        done = await in_thread(
            self.tier.evict, plan, "forced" if command.force else "request", OnRequest(command, "cluster", {})
        )
        for victim in done.victims:
            logger.info("evicted the chunks of manifest %s: %d bytes", victim.manifest, victim.size)
        return done

    async def _break_leases(self, plan: EvictionPlan) -> None:
        for victim in plan.victims:
            for holder in victim.holders:
                logger.warning("a forced eviction of manifest %s takes it away from %s", victim.manifest, holder)
                if await self.break_prefetch(holder.stage_id):
                    continue
                stage = self.registry.get(holder.stage_id)
                if stage is not None:  # otherwise it has ended by itself meanwhile
                    error = CanceledError(f"{holder}, by a forced eviction,")
                    await self.lifecycle.release(stage, error, ending="forced")

    def _plan(self, command: EvictCommand) -> Plan:
        """What the command selects, as a decision about an index at a later moment."""
        manifests = self._manifests(command)
        size, force = command.lru_bytes, command.force
        if [size is not None, manifests is not None, command.all].count(True) != 1:
            raise InvalidRequestError("select by exactly one of manifests, job, lru_bytes and all")
        if size is not None:
            return lambda index: index.plan_lru(size, force=force)
        if manifests is not None:
            return lambda index: index.plan(manifests, force=force)
        return lambda index: index.plan(index.manifests(), force=force)

    def _manifests(self, command: EvictCommand) -> list[Digest] | None:
        if command.manifests is not None:
            try:
                return [Digest.parse(manifest) for manifest in command.manifests]
            except ValueError as error:
                raise InvalidRequestError(str(error)) from error
        if command.job is None:
            return None
        stages = [stage for stage in self.registry.all() if stage.record.job_id == command.job]
        return list(dict.fromkeys(manifest for stage in stages for manifest in stage.record.manifests))

    def _items(self, tier: Tier, plan: EvictionPlan) -> list[EvictedItem]:
        sources: dict[str, list[str]] = {}
        for stage in self.registry.all():
            for mount in stage.record.mounts:
                if mount.source not in sources.setdefault(mount.manifest, []):
                    sources[mount.manifest].append(mount.source)

        parted: list[tuple[Victim | Leased, int, bool]] = [(one, one.size, False) for one in plan.victims] + [
            (one, 0, True) for one in plan.refused
        ]
        return [
            EvictedItem(
                tier=tier,
                cluster=self.cluster,
                node=self.node,
                manifest=str(one.manifest),
                sources=sources.get(str(one.manifest), []),
                bytes=size,
                refused=is_refused,
                holders=[str(holder) for holder in one.holders],
            )
            for one, size, is_refused in parted
        ]
