"""Both tiers of the cache on one disk, opened together: whole files for jobs, and chunks for peers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bdn.core.cache.index import CacheIndex, ChunkIndex, EvictionReason
from bdn.wire.grants import Grant
from node_agent.background_tasks import in_thread
from node_agent.cache.cache_events import CacheEvents
from node_agent.cache.chunk_files import ChunkFiles
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.cache.held_chunks import HeldChunks
from node_agent.cache.node_cache import CacheFiles, Clock, NodeCache, UseClock
from node_agent.cache.quarantine import SuspectFiles
from node_agent.cache.records import ManifestRecords
from node_agent.cache.scan import Scanner
from node_agent.cache.space import Allowed, Space
from node_agent.disk.cache_directory import CacheDirectory
from node_agent.journal import Journal
from node_agent.settings import AgentSettings


@dataclass(frozen=True)
class CacheTiers:
    """``node`` holds whole files, ``cluster`` chunks for peers; ``chunks`` reads a chunk from whichever holds it."""

    manifests: ManifestRecords
    node: NodeCache
    cluster: ClusterTier
    chunks: HeldChunks
    suspects: SuspectFiles


async def open_tiers(
    settings: AgentSettings,
    disk: CacheDirectory,
    journal: Journal,
    *,
    on_evicted: Callable[[EvictionReason, int], None],
    on_cluster_evicted: Callable[[EvictionReason, int], None],
    verify: Callable[[str], Grant],
    on_change: Callable[[], None],
    clock: Clock,
) -> CacheTiers:
    """Read what the last run has left on the disk.

    ``on_evicted`` and ``on_cluster_evicted`` count evictions; ``verify`` checks the grant that a peer sends, unless there is no
    authentication; ``on_change`` is called on the event loop when chunks or files come or go.

    Raises:
        DiskFailedError: the directory cannot be read.
    """
    places, writes = disk.places, disk.writes
    uses, suspects = UseClock(clock), SuspectFiles()
    index, chunk_index, manifests = CacheIndex(), ChunkIndex(), ManifestRecords(places)
    space = Space(
        places, disk.unnamed, Allowed.of(settings), settings.roles, node=index.ledger, cluster=chunk_index.ledger
    )
    # Chunks come and go in byte threads; the event loop is told.
    tell = partial(asyncio.get_running_loop().call_soon_threadsafe, on_change)
    cluster_events = CacheEvents(tell, on_cluster_evicted, journal.record)
    chunk_files = ChunkFiles(places.root / "cluster", writes)
    cluster = ClusterTier(chunk_files, chunk_index, space.cluster_budget, uses, cluster_events)
    chunks = HeldChunks(places, index, cluster, None if settings.auth == "off" else verify, suspects.add)
    events = CacheEvents(on_change, on_evicted, journal.record)
    node = NodeCache(index, CacheFiles(places, manifests), chunks, space, uses, events)

    await in_thread(cluster.load)
    scanner = Scanner(places, manifests, chunks)
    for found in await in_thread(scanner.run):
        found.restore(index)
    for order in (index.recency, chunk_index.recency):
        for manifest in order.oldest_first():
            uses.seen(order.last_used(manifest))
    await in_thread(journal.record, scanner.decisions)
    return CacheTiers(manifests, node, cluster, chunks, suspects)
