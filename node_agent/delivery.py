"""The ways of the bytes: from mirror and peers into the cache, and from the cache to peers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.pace.retry import RetryPolicy
from bdn.net.chunk_server.server import ChunkServer
from bdn.net.client.mirror_client import MirrorClient
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.pacing import pacer
from bdn.transfer.single_flight import SingleFlight
from node_agent.background_tasks import BackgroundTasks, in_thread
from node_agent.cache.catalogue import Catalogue
from node_agent.cache.documents import HeldDocuments
from node_agent.disk.group_sync import GroupSync
from node_agent.fetch.bandwidth import Bandwidth, OrderedLimit
from node_agent.fetch.chain import ReaderChain
from node_agent.fetch.deadlines import Waits
from node_agent.fetch.documents import PeerDocuments
from node_agent.fetch.peers import Peers
from node_agent.fill.filler import Filler
from node_agent.fill.fills import Fills
from node_agent.fill.lanes import Pools
from node_agent.fill.provision import Provision
from node_agent.ground import Ground
from node_agent.serve.chunk_lists import ChunkLists, LayoutSource
from node_agent.serve.owner import Owner, OwnersShelf
from node_agent.settings import AgentSettings

_READ_TIMEOUT_SECONDS: Final = 20.0
_PEER_TIMEOUT_SECONDS: Final = 2.0  # to connect; how long an answer may take is for the ring to judge
_LEAST_THREADS: Final = 4  # that receive, whatever they achieve


@dataclass(frozen=True)
class Delivery:
    """What fills this node, and what serves others from it. ``server`` is to be started once stages have been resumed."""

    provision: Provision
    server: ChunkServer
    to_mirror: ConnectionPool
    to_peers: ConnectionPool

    def let_go(self) -> None:
        """Before tasks are canceled: threads that wait for the network shall notice, so that nobody waits for them."""
        self.provision.fills.stop_trying()
        self.to_mirror.close()
        self.to_peers.close()


async def open_delivery(
    stack: AsyncExitStack, ground: Ground, client: MirrorClient, policy: RetryPolicy, waits: Waits
) -> Delivery:
    """Threads, connections and a server, until the stack ends. Raises ``InUseError`` when another has the data port."""
    settings, metrics = ground.settings, ground.metrics
    to_mirror = ConnectionPool(timeout_seconds=_READ_TIMEOUT_SECONDS)
    to_peers, peers = ConnectionPool(timeout_seconds=_PEER_TIMEOUT_SECONDS), Peers(ground.members)
    pools = _open_pools(stack, settings)
    metrics.watch("bdn_agent_byte_threads", "Threads that may move bytes at once now", lambda: pools.own.limit)
    reads, bandwidth = SingleFlight[Digest](), Bandwidth(settings.download_rate, settings.prefetch_rate)
    chain = ReaderChain(to_mirror, to_peers, ground.shelf, reads, peers, policy, waits, metrics.mismatched)
    disk, sync = ground.disk, stack.enter_context(GroupSync(ground.disk.places.root))
    filler = Filler(disk.places, sync, disk.writes, disk.aside, bandwidth, ground.shelf, ground.cache.commit)
    provision = Provision(
        catalogue=Catalogue(ground.manifests, client, PeerDocuments(ground.members), policy, waits.document_seconds),
        cache=ground.cache,
        fills=Fills(await stack.enter_async_context(BackgroundTasks())),
        filler=filler,
        chain=chain,
        pools=pools,
        members=ground.members,
        peers=peers,
        keep_slab=ground.tier.keep,
        mirror_url=settings.url,
        on_bytes=metrics.filled,
    )
    obtaining = await _open_obtaining(stack, ground, provision, reads, client)
    face = OwnersShelf(ground.shelf, obtaining) if "cluster" in settings.roles else ground.shelf
    pace = pacer(settings.upload_rate)
    documents = HeldDocuments(disk.places, None if settings.auth == "off" else ground.trust.verify)
    server = ChunkServer(
        face, settings.host, settings.data_port, on_sent=metrics.served, pace=pace, documents=documents
    )
    stack.push_async_callback(in_thread, server.close)
    return Delivery(provision, server, to_mirror, to_peers)


def _open_pools(stack: AsyncExitStack, settings: AgentSettings) -> Pools:
    pools = Pools(
        ByteThreads(settings.byte_threads, "agent-bytes", least=_LEAST_THREADS),
        ByteThreads(settings.byte_threads, "agent-peers"),
        OrderedLimit(settings.byte_threads),
    )
    for threads in (pools.own, pools.peers):
        stack.push_async_callback(in_thread, threads.close)
    return pools


async def _open_obtaining(
    stack: AsyncExitStack, ground: Ground, provision: Provision, reads: SingleFlight[Digest], client: MirrorClient
) -> Owner:
    """For peers: what is not here yet. Its threads are its own, its share of the mirror is that of all."""
    serving = ByteThreads(ground.settings.byte_threads, "agent-serving")
    stack.push_async_callback(in_thread, serving.close)
    return Owner(
        loop=asyncio.get_running_loop(),
        background=await stack.enter_async_context(BackgroundTasks()),
        threads=serving,
        lists=ChunkLists(LayoutSource(client, ground.manifests)),
        reads=reads,
        bandwidth=provision.filler.bandwidth,
        shelf=ground.shelf,
        tier=ground.tier,
        chain=provision.chain,
        mirror_url=ground.settings.url,
        on_obtained=ground.metrics.obtained,
        members=ground.members,
        origin=provision.pools.origin,
    )
