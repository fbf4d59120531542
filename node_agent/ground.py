"""What a running agent stands on: its disk, whom it trusts and knows, and both tiers of its cache."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from bdn.core.cache.chunk_index import ChunkIndex
from bdn.core.cache.index import CacheIndex
from node_agent.cache.cache_events import CacheEvents
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.cache.records import ManifestRecords
from node_agent.cache.removal import Removal
from node_agent.cache.scan import Scanner
from node_agent.cache.shelf import NodeShelf
from node_agent.cache.space import Allowed, Space
from node_agent.cache.suspects import Suspects
from node_agent.cache.use_clock import UseClock
from node_agent.cluster.chunk_files import ChunkFiles
from node_agent.cluster.tier import ClusterTier
from node_agent.crew import in_thread
from node_agent.disk.aside import Aside
from node_agent.disk.direct import DirectWrites
from node_agent.disk.durable import disk_errors
from node_agent.disk.format import check_format, keep_format
from node_agent.disk.owner import owned
from node_agent.disk.places import Places
from node_agent.journal.journal import Journal
from node_agent.metrics import Metrics
from node_agent.news import News
from node_agent.ring.members import Members
from node_agent.settings import AgentSettings
from node_agent.trust import Trust


@dataclass(frozen=True)
class Ground:
    """The disk as it was found, and who looks after it."""

    is_rebooted: bool
    places: Places
    writes: DirectWrites
    aside: Aside
    trust: Trust
    members: Members
    journal: Journal
    manifests: ManifestRecords
    tier: ClusterTier
    shelf: NodeShelf
    suspects: Suspects
    cache: NodeCache


async def open_ground(
    stack: AsyncExitStack, settings: AgentSettings, metrics: Metrics, news: News, clock: Clock
) -> Ground:
    """Take the cache directory until the stack ends, and read what is in it.

    Raises:
        InvalidRequestError: it is of a format that this version does not know.
        InUseError: another agent has it.
        DiskFailedError: it cannot be used.
    """
    places, writes, aside = Places(settings.effective_cache_dir, settings.mounts_dir), DirectWrites(), Aside()
    await in_thread(check_format, places)
    with disk_errors(places.root):
        await in_thread(places.make)
    is_rebooted = stack.enter_context(owned(places.owner))
    await in_thread(keep_format, places)
    await in_thread(writes.probe, places.filling)
    journal = await _open_journal(stack, places, metrics, clock)
    trust, members = Trust(places.trusted_keys, clock), Members(settings.node, places.members)
    await in_thread(trust.load)
    await in_thread(members.load)

    uses = UseClock(clock)
    index, chunks, manifests = CacheIndex(), ChunkIndex(), ManifestRecords(places)
    allowed = Allowed(
        settings.cache_bytes, settings.headroom_bytes, settings.cluster_cache_bytes, settings.keep_percent
    )
    space = Space(places, aside, allowed, settings.roles, node=index.ledger, cluster=chunks.ledger)
    # Chunks come and go in byte threads; news is told on the loop.
    tell = partial(asyncio.get_running_loop().call_soon_threadsafe, news.tell)
    tier_events = CacheEvents(tell, metrics.cluster_evicted, journal.record)
    chunk_files = ChunkFiles(places.root / "cluster", writes)
    tier = ClusterTier(chunk_files, chunks, space.cluster_budget, uses, tier_events)
    await in_thread(tier.load)
    suspects = Suspects()
    shelf = NodeShelf(places, index, tier, None if settings.auth == "off" else trust.verify, suspects.add)
    scanner = Scanner(places, manifests, shelf)
    for found in await in_thread(scanner.run):
        found.restore(index)
    for order in (index.recency, chunks.recency):
        for manifest in order.oldest_first():
            uses.seen(order.last_used(manifest))
    await in_thread(journal.record, scanner.decisions)
    events = CacheEvents(news.tell, metrics.evicted, journal.record)
    cache = NodeCache(index, manifests, Removal(places, manifests), shelf, space, uses, events)
    return Ground(is_rebooted, places, writes, aside, trust, members, journal, manifests, tier, shelf, suspects, cache)


async def _open_journal(stack: AsyncExitStack, places: Places, metrics: Metrics, clock: Clock) -> Journal:
    journal = Journal(places.journal, clock, metrics.lost_events.inc)
    stack.callback(journal.close)
    await in_thread(journal.open)
    metrics.watch("bdn_agent_events_waiting", "Events that the mirror has not heard", lambda: journal.waiting)
    return journal
