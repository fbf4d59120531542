"""The agent put together: ``open_agent`` reads from top to bottom, from the disk to the mirror."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from socket import gethostname
from typing import Final

from bdn import __version__
from bdn.core.cache_index import CacheIndex
from bdn.core.retry import RetryPolicy
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.connections import ConnectionPool
from bdn.wire.chunk_server import ChunkServer
from bdn.wire.client import MirrorClient
from node_agent.agent import Agent
from node_agent.cache.catalogue import Catalogue
from node_agent.cache.node_cache import CacheEvents, Clock, NodeCache
from node_agent.cache.records import ManifestRecords
from node_agent.cache.removal import Removal
from node_agent.cache.scan import Scanner
from node_agent.cache.shelf import NodeShelf
from node_agent.cache.space import Space
from node_agent.crew import Crew, in_thread
from node_agent.disk.durable import DurableFolders, disk_errors
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.owner import boot_id, owned
from node_agent.disk.places import Places
from node_agent.evictions import Evictions
from node_agent.fill.filler import Filler
from node_agent.fill.flights import Flights
from node_agent.fill.supply import Supplier
from node_agent.heartbeat import Heartbeats, Identity
from node_agent.holdings import Holdings
from node_agent.metrics import Metrics
from node_agent.news import News
from node_agent.settings import AgentSettings
from node_agent.stage.book import StageBook
from node_agent.stage.housekeeping import Housekeeping
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.pulls import Pulls
from node_agent.stage.record import StageRecords
from node_agent.stage.stages import Stages
from node_agent.stage.staging import Staging
from node_agent.trust import Trust
from node_agent.view.exposure import choose, exposures
from node_agent.view.views import Views

_READ_TIMEOUT_SECONDS: Final = 20.0


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
        manifests, stage_records = ManifestRecords(places), StageRecords(places)
        trust = Trust(places.trusted_keys, clock)
        await in_thread(trust.load)
        index, book, news = CacheIndex(), StageBook(), News()
        metrics = Metrics(book)

        # The cache, and its face to peers.
        shelf = NodeShelf(places, index, None if settings.auth == "off" else trust.verify)
        for found in await in_thread(Scanner(places, manifests, shelf).run):
            found.restore(index)
        space = Space(places, settings.cache_bytes, settings.headroom_bytes)
        events = CacheEvents(news.tell, metrics.evicted)
        cache = NodeCache(index, manifests, Removal(places, manifests), shelf, space, clock, events)
        server = ChunkServer(shelf, settings.host, settings.data_port, on_sent=metrics.served)
        stack.push_async_callback(in_thread, server.close)

        # The way of the bytes: mirror, readers, byte threads, parts.
        connections = ConnectionPool(timeout_seconds=_READ_TIMEOUT_SECONDS)
        threads = ByteThreads(settings.byte_threads, "agent-bytes")
        stack.push_async_callback(in_thread, threads.close)
        supplier = Supplier(connections, policy, metrics.mismatched)
        sync = stack.enter_context(GroupSync(places.root))
        filler = Filler(places, DurableFolders(), sync, threads, cache.commit)
        flights = Flights(await stack.enter_async_context(Crew()))
        client = await stack.enter_async_context(MirrorClient(settings.url, settings.token))

        # Stages.
        views = Views(places, exposures(places), await in_thread(choose, settings.exposure, places))
        catalogue = Catalogue(manifests, client, policy)
        staging = Staging(catalogue, cache, flights, filler, supplier, views, places, settings.url, metrics.filled)
        pulls = Pulls(book, manifests, places)
        crew = await stack.enter_async_context(Crew())
        lifecycle = Lifecycle(crew, staging, cache, views, stage_records, pulls, clock, metrics.ready, news.tell)
        holdings = Holdings(cache, book)
        identity = _identity(settings, server.port)
        heartbeats = Heartbeats(identity, client, trust, holdings, news)
        stages = Stages(book, lifecycle, stage_records, views, pulls, trust, heartbeats.ask_for_keys, clock)
        evictions = Evictions(settings.cluster, settings.node, book, lifecycle, cache)
        housekeeping = Housekeeping(book, lifecycle, stage_records, manifests, cache, views, pulls, clock)

        # Go.
        stack.callback(_let_go, book, flights, connections)
        await housekeeping.resume()
        server.start()
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


def _let_go(book: StageBook, flights: Flights, connections: ConnectionPool) -> None:
    """Before tasks are canceled: threads that copy or wait for the network shall notice, so that nobody waits for them."""
    for stage in book.all():
        stage.stop.set()
    flights.stop_trying()
    connections.close()


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
