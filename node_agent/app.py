"""The agent put together: ``open_agent`` reads from top to bottom, from the disk to the mirror."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from socket import gethostname
from typing import Final

from bdn import __version__
from bdn.core.cache_index import CacheIndex
from bdn.core.chunk_index import ChunkIndex
from bdn.core.retry import RetryPolicy
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.connections import ConnectionPool
from bdn.transfer.pacing import pacer
from bdn.wire.chunk_server import ChunkServer
from bdn.wire.client import MirrorClient
from node_agent.agent import Agent
from node_agent.bandwidth import Bandwidth
from node_agent.cache.cache_events import CacheEvents
from node_agent.cache.catalogue import Catalogue
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.cache.records import ManifestRecords
from node_agent.cache.removal import Removal
from node_agent.cache.scan import Scanner
from node_agent.cache.shelf import NodeShelf
from node_agent.cache.space import Allowed, Space
from node_agent.cluster.chunk_files import ChunkFiles
from node_agent.cluster.chunk_lists import ChunkLists, LayoutSource
from node_agent.cluster.obtaining import Obtaining, OwnersShelf
from node_agent.cluster.origin_reads import OriginReads
from node_agent.cluster.tier import ClusterTier
from node_agent.crew import Crew, in_thread
from node_agent.disk.aside import Aside
from node_agent.disk.direct import DirectWrites
from node_agent.disk.durable import disk_errors
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.owner import boot_id, owned
from node_agent.disk.places import Places
from node_agent.evictions import Evictions
from node_agent.fill.filler import Filler
from node_agent.fill.flights import Flights
from node_agent.fill.lanes import Pools
from node_agent.fill.provision import Provision
from node_agent.heartbeat import Heartbeats, Identity
from node_agent.holdings import Holdings
from node_agent.metrics import Metrics
from node_agent.news import News
from node_agent.prefetches import Prefetches
from node_agent.ring.members import Members
from node_agent.ring.peers import Peers
from node_agent.ring.supplier import Supplier
from node_agent.settings import AgentSettings
from node_agent.stage.book import StageBook
from node_agent.stage.housekeeping import Housekeeping
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.pulls import Pulls
from node_agent.stage.record import StageRecords
from node_agent.stage.stages import Stages
from node_agent.stage.staging import Staging
from node_agent.stage.warm import Warmer
from node_agent.trust import Trust
from node_agent.view.exposure import choose, exposures
from node_agent.view.views import Views

_READ_TIMEOUT_SECONDS: Final = 20.0
_PEER_TIMEOUT_SECONDS: Final = 2.0  # to connect; how long an answer may take is for the ring to judge
_LEAST_THREADS: Final = 4  # that move bytes, whatever they achieve: two may both be waiting for the disk


@asynccontextmanager
async def open_agent(
    settings: AgentSettings, *, clock: Clock = time.time, policy: RetryPolicy | None = None
) -> AsyncIterator[Agent]:
    """A running agent: its disk is scanned and its stages go on. Leaving the context drains it; stages survive.

    Raises:
        SettingsError: these settings do not go together.
        InUseError: another agent has this cache directory, or another program the data port.
        DiskFailedError: the cache directory cannot be used.
    """
    settings.check()
    policy = policy or RetryPolicy()
    async with AsyncExitStack() as stack:
        # The disk: whose it is, and what is on it.
        places = Places(settings.effective_cache_dir, settings.mounts_dir)
        with disk_errors(places.root):
            await in_thread(places.make)
        stack.enter_context(owned(places.owner))
        writes = DirectWrites()
        await in_thread(writes.probe, places.filling)
        manifests, stage_records = ManifestRecords(places), StageRecords(places)
        trust = Trust(places.trusted_keys, clock)
        await in_thread(trust.load)
        members = Members(settings.node, places.members)
        await in_thread(members.load)
        bandwidth = Bandwidth(settings.download_rate, settings.prefetch_rate)
        index, book, news = CacheIndex(), StageBook(), News()
        metrics = Metrics(book)

        # The cache, and its face to peers.
        aside, chunks, reads = Aside(), ChunkIndex(), OriginReads()
        allowed = Allowed(settings.cache_bytes, settings.headroom_bytes, settings.cluster_cache_bytes)
        space = Space(places, aside, allowed, settings.roles, index.ledger, chunks.ledger)
        chunk_files, tier_events = ChunkFiles(places.root / "cluster", writes), _tier_events(metrics, news)
        tier = ClusterTier(chunk_files, chunks, space.cluster_budget, clock, tier_events)
        await in_thread(tier.load)
        shelf = NodeShelf(places, index, tier, None if settings.auth == "off" else trust.verify)
        for found in await in_thread(Scanner(places, manifests, shelf).run):
            found.restore(index)
        events = CacheEvents(news.tell, metrics.evicted)
        cache = NodeCache(index, manifests, Removal(places, manifests), shelf, space, clock, events)

        # The way of the bytes: mirror, readers, byte threads, parts.
        connections = ConnectionPool(timeout_seconds=_READ_TIMEOUT_SECONDS)
        threads = ByteThreads(settings.byte_threads, "agent-bytes", least=_LEAST_THREADS)
        stack.push_async_callback(in_thread, threads.close)
        metrics.watch("bdn_agent_byte_threads", "Threads that may move bytes at once now", lambda: threads.limit)
        metrics.watch(
            "bdn_agent_direct_writes", "1 when files are written past the page cache", lambda: writes.are_direct
        )
        to_peers, peers = ConnectionPool(timeout_seconds=_PEER_TIMEOUT_SECONDS), Peers(members)
        asking = ByteThreads(settings.byte_threads, "agent-peers")
        stack.push_async_callback(in_thread, asking.close)
        supplier = Supplier(connections, to_peers, shelf, reads, peers, policy, metrics.mismatched)
        sync = stack.enter_context(GroupSync(places.root))
        filler = Filler(places, sync, writes, aside, bandwidth, shelf, cache.commit)
        flights = Flights(await stack.enter_async_context(Crew()))
        client = await stack.enter_async_context(MirrorClient(settings.url, settings.token))

        # Peers: what is here, and what an owner obtains for them.
        serving = ByteThreads(settings.byte_threads, "agent-serving")
        stack.push_async_callback(in_thread, serving.close)
        obtaining = Obtaining(
            loop=asyncio.get_running_loop(),
            crew=await stack.enter_async_context(Crew()),
            threads=serving,
            lists=ChunkLists(LayoutSource(client, manifests)),
            reads=reads,
            bandwidth=bandwidth,
            shelf=shelf,
            tier=tier,
            opener=supplier,
            mirror_url=settings.url,
            on_obtained=metrics.obtained,
        )
        face = OwnersShelf(shelf, obtaining) if "cluster" in settings.roles else shelf
        pace = pacer(settings.upload_rate)
        server = ChunkServer(face, settings.host, settings.data_port, on_sent=metrics.served, pace=pace)
        stack.push_async_callback(in_thread, server.close)

        # Stages.
        views = Views(places, exposures(places), await in_thread(choose, settings.exposure, places))
        catalogue = Catalogue(manifests, client, policy)
        provision = Provision(
            catalogue=catalogue,
            cache=cache,
            flights=flights,
            filler=filler,
            supplier=supplier,
            pools=Pools(threads, asking),
            members=members,
            peers=peers,
            keep_slab=tier.keep,
            mirror_url=settings.url,
            on_bytes=metrics.filled,
        )
        staging = Staging(provision, views, places)
        pulls = Pulls(book, manifests, places)
        crew = await stack.enter_async_context(Crew())
        warmer = Warmer(crew, book, views, settings.warm_rate)
        lifecycle = Lifecycle(
            crew, staging, warmer, cache, views, stage_records, pulls, clock, metrics.ready, news.tell
        )
        holdings = Holdings(cache, tier, settings.roles, book, writes)
        identity = _identity(settings, server.port)
        prefetches = Prefetches(crew, provision, cache, trust, news.wake)
        heartbeats = Heartbeats(
            identity, client, trust=trust, members=members, holdings=holdings, prefetches=prefetches, news=news
        )
        keys, is_node = heartbeats.ask_for_keys, "node" in settings.roles
        stages = Stages(book, lifecycle, stage_records, views, pulls, trust, keys, clock, is_node)
        evictions = Evictions(settings.cluster, settings.node, book, lifecycle, cache, tier, prefetches.cancel)
        housekeeping = Housekeeping(book, lifecycle, stage_records, manifests, cache, tier, views, pulls, clock)

        # Go.
        stack.callback(_let_go, book, flights, connections, to_peers)
        await housekeeping.resume()
        server.start()
        stack.push_async_callback(heartbeats.leave)
        background = await stack.enter_async_context(Crew())
        heartbeats.start(background, evictions.carry_out)
        background.start(housekeeping.run(), "housekeeping")
        yield Agent(
            settings=settings,
            places=places,
            cache=cache,
            stages=stages,
            evictions=evictions,
            holdings=holdings,
            housekeeping=housekeeping,
            heartbeats=heartbeats,
            trust=trust,
            metrics=metrics,
            data_port=server.port,
        )


def _tier_events(metrics: Metrics, news: News) -> CacheEvents:
    """For the cluster tier, whose chunks come and go in byte threads; news is told on the loop."""
    return CacheEvents(partial(asyncio.get_running_loop().call_soon_threadsafe, news.tell), metrics.cluster_evicted)


def _let_go(book: StageBook, flights: Flights, *connections: ConnectionPool) -> None:
    """Before tasks are canceled: threads that copy or wait for the network shall notice, so that nobody waits for them."""
    for stage in book.all():
        stage.stop.set()
    flights.stop_trying()
    for pool in connections:
        pool.close()


def _identity(settings: AgentSettings, data_port: int) -> Identity:
    host = gethostname() if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104 - a comparison
    address = f"http://[{host}]:{data_port}" if ":" in host else f"http://{host}:{data_port}"
    return Identity(
        node=settings.node,
        cluster=settings.cluster,
        boot_id=boot_id(),
        roles=list(settings.roles),
        advertise=settings.advertise or address,
        version=__version__,
    )
