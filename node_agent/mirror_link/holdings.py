"""What this node holds, as it is told to the mirror and to people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from bdn.core.cache.ledger import SpaceLedger
from bdn.core.digest import Digest
from bdn.core.errors import DiskFailedError
from bdn.disk.direct import DirectWrites
from bdn.wire.mirror_schema import Holding
from bdn.wire.stage_schema import Cache, TierUse, Writes
from node_agent.background_tasks import in_thread
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.space import Room
from node_agent.disk.cache_directory import check_fitness
from node_agent.disk.places import Places
from node_agent.stage.stage import StageRegistry


@dataclass(frozen=True)
class AgentHoldings:
    """Documents about the cache."""

    places: Places
    cache: NodeCache
    tier: ClusterTier
    roles: Collection[str]
    registry: StageRegistry
    writes: DirectWrites

    async def tiers(self) -> dict[str, TierUse]:
        """The space of the tiers for which this agent has the role. A disk that fails is said there, and no error."""
        room, problem = await in_thread(self._room)
        space, uses = self.cache.space, {}
        if "node" in self.roles:
            budgets = None if room is None else (room.budgets.node, room.pressed.node)
            uses["node"] = _use(space.node, self.cache.index.leased_bytes(), budgets, problem)
        if "cluster" in self.roles:  # what peers want just now counts as leased by nobody
            budgets = None if room is None else (room.budgets.cluster, room.pressed.cluster)
            uses["cluster"] = _use(space.cluster, 0, budgets, problem)
        return uses

    def _room(self) -> tuple[Room | None, str | None]:
        """What the tiers may hold, if the disk says so, and why they take nothing new, if they do not."""
        room = None
        try:
            room = self.cache.space.room()
            check_fitness(self.places.root)
        except DiskFailedError as error:
            return room, str(error)
        return room, None

    async def all(self) -> list[Holding]:
        """The manifests that either tier holds, least recently used first. Sources are those of the stages that are known."""
        return self._all(await in_thread(self.tier.held))

    def _all(self, chunks: dict[Digest, tuple[int, float]]) -> list[Holding]:
        index = self.cache.index
        sources: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for stage in self.registry.all():
            for mount in stage.record.mounts:
                sources[mount.manifest][mount.source] = None
        held = [
            Holding(
                manifest=str(manifest),
                bytes=index.size_of(manifest),
                complete=index.is_complete(manifest),
                last_used=index.recency.last_used(manifest),
                sources=list(sources.get(str(manifest), ())),
                held_by=[holder.job_id for holder in index.leases.holders(manifest)],
                cluster_bytes=chunks.get(manifest, (0, 0.0))[0],
            )
            for manifest in index.manifests()
        ]
        staged = frozenset(index.manifests())
        held += [
            Holding(
                manifest=str(manifest),
                bytes=0,
                complete=False,
                last_used=last_used,
                sources=list(sources.get(str(manifest), ())),
                cluster_bytes=size,
            )
            for manifest, (size, last_used) in chunks.items()
            if manifest not in staged
        ]
        return sorted(held, key=lambda holding: holding.last_used or 0)

    async def document(self) -> Cache:
        """``GET /cache``."""
        return Cache(tiers=await self.tiers(), manifests=await self.all(), writes=self._writes())

    def _writes(self) -> Writes:
        return Writes(direct=self.writes.are_direct, reason=self.writes.reason)


def _use(ledger: SpaceLedger, leased: int, budgets: tuple[int, int] | None, problem: str | None) -> TierUse:
    """The figures of one tier. ``budgets`` are its budget and what of it is pressed; None: it takes no more than it has."""
    budget, pressed = budgets or (ledger.used_bytes, 0)
    return TierUse(
        budget=budget,
        committed=ledger.committed_bytes,
        reserved=ledger.reserved_bytes,
        leased=leased,
        pressed=pressed,
        problem=problem,
    )
