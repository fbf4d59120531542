"""What a running agent stands on: its disk, whom it trusts and knows, and both tiers of its cache."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from bdn.core.cache_index import CacheIndex
from bdn.core.chunk_index import ChunkIndex
from node_agent.cache.cache_events import CacheEvents
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.cache.records import ManifestRecords
from node_agent.cache.removal import Removal
from node_agent.cache.scan import Scanner
from node_agent.cache.shelf import NodeShelf
from node_agent.cache.space import Allowed, Space
from node_agent.cluster.chunk_files import ChunkFiles
from node_agent.cluster.tier import ClusterTier
from node_agent.crew import in_thread
from node_agent.disk.aside import Aside
from node_agent.disk.direct import DirectWrites
from node_agent.disk.durable import disk_errors
from node_agent.disk.owner import owned
from node_agent.disk.places import Places
from node_agent.metrics import Metrics
from node_agent.news import News
from node_agent.ring.members import Members
from node_agent.settings import AgentSettings
from node_agent.trust import Trust


@dataclass(frozen=True)
class Ground:
    """The disk as it was found, and who looks after it."""

    places: Places
    writes: DirectWrites
    aside: Aside
    trust: Trust
    members: Members
    manifests: ManifestRecords
    tier: ClusterTier
    shelf: NodeShelf
    cache: NodeCache


async def open_ground(
    stack: AsyncExitStack, settings: AgentSettings, metrics: Metrics, news: News, clock: Clock
) -> Ground:
    """Take the cache directory until the stack ends, and read what is in it.

    Raises:
        InUseError: another agent has it.
        DiskFailedError: it cannot be used.
    """
    places, writes, aside = Places(settings.effective_cache_dir, settings.mounts_dir), DirectWrites(), Aside()
    with disk_errors(places.root):
        await in_thread(places.make)
    stack.enter_context(owned(places.owner))
    await in_thread(writes.probe, places.filling)
    trust, members = Trust(places.trusted_keys, clock), Members(settings.node, places.members)
    await in_thread(trust.load)
    await in_thread(members.load)

    index, chunks, manifests = CacheIndex(), ChunkIndex(), ManifestRecords(places)
    allowed = Allowed(settings.cache_bytes, settings.headroom_bytes, settings.cluster_cache_bytes)
    space = Space(places, aside, allowed, settings.roles, index.ledger, chunks.ledger)
    # Chunks come and go in byte threads; news is told on the loop.
    tell = partial(asyncio.get_running_loop().call_soon_threadsafe, news.tell)
    tier_events = CacheEvents(tell, metrics.cluster_evicted)
    chunk_files = ChunkFiles(places.root / "cluster", writes)
    tier = ClusterTier(chunk_files, chunks, space.cluster_budget, clock, tier_events)
    await in_thread(tier.load)
    shelf = NodeShelf(places, index, tier, None if settings.auth == "off" else trust.verify)
    for found in await in_thread(Scanner(places, manifests, shelf).run):
        found.restore(index)
    events = CacheEvents(news.tell, metrics.evicted)
    cache = NodeCache(index, manifests, Removal(places, manifests), shelf, space, clock, events)
    return Ground(places, writes, aside, trust, members, manifests, tier, shelf, cache)
