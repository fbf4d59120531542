"""What a running agent stands on: its disk, whom it trusts and knows, and both tiers of its cache."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from bdn.core.cache.chunk_index import ChunkIndex
from bdn.core.cache.index import CacheIndex
from node_agent.background_tasks import in_thread
from node_agent.cache.chunk_files import ChunkFiles
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.cache.events import CacheEvents
from node_agent.cache.held_chunks import NodeShelf
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.cache.records import ManifestRecords
from node_agent.cache.removal import Removal
from node_agent.cache.scan import Scanner
from node_agent.cache.space import Allowed, Space
from node_agent.cache.suspects import Suspects
from node_agent.cache.use_clock import UseClock
from node_agent.change_signal import News
from node_agent.disk.cache_directory import CacheDirectory, open_cache_directory
from node_agent.disk.places import Places
from node_agent.fetch.members import Members
from node_agent.journal import Journal
from node_agent.metrics import Metrics
from node_agent.settings import AgentSettings
from node_agent.stage.registry import StageBook
from node_agent.trust import Trust


@dataclass(frozen=True)
class Ground:
    """``clock`` tells the time of day; ``news`` wakes who tells the mirror."""

    settings: AgentSettings
    clock: Clock
    book: StageBook
    news: News
    metrics: Metrics
    disk: CacheDirectory
    trust: Trust
    members: Members
    journal: Journal
    manifests: ManifestRecords
    tier: ClusterTier
    shelf: NodeShelf
    suspects: Suspects
    cache: NodeCache


async def open_ground(
    stack: AsyncExitStack, settings: AgentSettings, book: StageBook, metrics: Metrics, clock: Clock
) -> Ground:
    """Take the cache directory until the stack ends, and read what is in it.

    Raises:
        InvalidRequestError: it is of a format that this version does not know.
        InUseError: another agent has it.
        DiskFailedError: it cannot be used.
    """
    disk = await open_cache_directory(stack, Places(settings.effective_cache_dir, settings.mounts_dir))
    places, writes, news = disk.places, disk.writes, News()
    journal = await _open_journal(stack, places, metrics, clock)
    trust, members = Trust(places.trusted_keys, clock), Members(settings.node, places.members)

    uses = UseClock(clock)
    index, chunks, manifests = CacheIndex(), ChunkIndex(), ManifestRecords(places)
    space = Space(places, disk.aside, Allowed.of(settings), settings.roles, node=index.ledger, cluster=chunks.ledger)
    # Chunks come and go in byte threads; news is told on the loop.
    tell = partial(asyncio.get_running_loop().call_soon_threadsafe, news.tell)
    tier_events = CacheEvents(tell, metrics.cluster_evicted, journal.record)
    chunk_files = ChunkFiles(places.root / "cluster", writes)
    tier = ClusterTier(chunk_files, chunks, space.cluster_budget, uses, tier_events)
    suspects = Suspects()
    shelf = NodeShelf(places, index, tier, None if settings.auth == "off" else trust.verify, suspects.add)
    events = CacheEvents(news.tell, metrics.evicted, journal.record)
    cache = NodeCache(index, manifests, Removal(places, manifests), shelf, space, uses, events)
    metrics.watch("bdn_agent_direct_writes", "1 when files are written past the page cache", lambda: writes.are_direct)
    ground = Ground(
        settings,
        clock,
        book,
        news,
        metrics,
        disk,
        trust,
        members,
        journal,
        manifests,
        tier,
        shelf,
        suspects,
        cache,
    )
    await _read(ground, uses)
    return ground


async def _read(ground: Ground, uses: UseClock) -> None:
    """What the last run has left on the disk."""
    await in_thread(ground.trust.load)
    await in_thread(ground.members.load)
    await in_thread(ground.tier.load)
    scanner = Scanner(ground.disk.places, ground.manifests, ground.shelf)
    for found in await in_thread(scanner.run):
        found.restore(ground.cache.index)
    for order in (ground.cache.index.recency, ground.tier.index.recency):
        for manifest in order.oldest_first():
            uses.seen(order.last_used(manifest))
    await in_thread(ground.journal.record, scanner.decisions)


async def _open_journal(stack: AsyncExitStack, places: Places, metrics: Metrics, clock: Clock) -> Journal:
    journal = Journal(places.journal, clock, metrics.lost_events.inc)
    stack.callback(journal.close)
    await in_thread(journal.open)
    metrics.watch("bdn_agent_events_waiting", "Events that the mirror has not heard", lambda: journal.waiting)
    return journal
