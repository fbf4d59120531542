"""An owner obtains the chunks that its peers ask for: one read of the mirror, however many of them ask."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from bdn.core.errors import CanceledError, NotFoundError, StoreUnavailableError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.core.ring.placement import in_flight_each
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.chunk_readers import PartialChunk
from bdn.transfer.fair_limit import FairLimit
from node_agent.background_tasks import BackgroundTasks
from node_agent.cache.peer_access import PeerAccess
from node_agent.fetch.bandwidth import Bandwidth, OrderedLimit
from node_agent.fetch.chain import ReaderChain
from node_agent.fetch.chunk_lists import ChunkLists
from node_agent.fetch.locations import Reading
from node_agent.fetch.reads_in_progress import landed


@dataclass(frozen=True)
class Owner:
    """A ``ServedChunks``: what is asked of an owner and is not here is obtained.

    It goes into the cluster tier, and comes from the mirror and never from another peer, so that no request goes in circles. ``threads`` are not those of this node's fills: no peer waits behind a whole stage of ours. Jobs of
    several organisations have a grant for this port, so ``places``, one for each thread, go round robin over organisations. They
    read in the same places, ``origin``: what a peer asks for comes before what this node wants next. ``on_obtained`` is told
    the bytes of each chunk.
    """

    loop: asyncio.AbstractEventLoop
    background: BackgroundTasks
    threads: ByteThreads
    places: FairLimit
    origin: OrderedLimit
    bandwidth: Bandwidth
    lists: ChunkLists
    access: PeerAccess
    chain: ReaderChain
    on_obtained: Callable[[int], None]
    _stop: threading.Event = field(default_factory=threading.Event)

    def authorize(self, request: ChunkRequest) -> str:
        """Who may read a manifest may have its chunks obtained."""
        return self.access.authorize(request)

    def open_chunk(self, request: ChunkRequest) -> OpenChunk | Future[object]:
        """The chunk, or a Future until it is here. One that does not say to which manifest it belongs is not obtained."""
        if request.manifest is None:
            return self.access.open_chunk(request)
        if self.lists.known(request.manifest, request.digest):
            return self.access.open_named(request) or self._begin(partial(self.obtain, request))
        try:
            return self.access.open_chunk(request)
        except NotFoundError:
            return self._begin(partial(self.obtain, request))

    def _begin(self, obtain: Callable[[], Coroutine[object, object, None]]) -> Future[object]:
        """Done when it is here, or with the reason why it cannot be. From any thread; blocks nobody."""
        future: Future[object] = Future()
        self.loop.call_soon_threadsafe(self._start, obtain, future)
        return future

    def _start(self, obtain: Callable[[], Coroutine[object, object, None]], future: Future[object]) -> None:
        task = self.background.start(self._answer(obtain, future), "obtain for a peer")

        def end(_: asyncio.Task[None]) -> None:
            if not future.done():
                future.set_exception(CanceledError("the request of a peer"))

        task.add_done_callback(end)  # not a finally of the task: one that is canceled before its first step has none

    async def _answer(self, obtain: Callable[[], Coroutine[object, object, None]], future: Future[object]) -> None:
        try:
            await obtain()
        except Exception as error:  # noqa: BLE001 - the server makes an answer of it, or a line in the log
            future.set_exception(error)
        else:
            future.set_result(None)

    async def obtain(self, request: ChunkRequest) -> None:
        """The chunk is here when this returns, and ``lists`` knows that it is the manifest's.

        Raises:
            NotFoundError: the manifest does not exist for this bearer, or does not have the chunk.
            CacheTooSmallError, CacheFullError: there is no room; other sources may have some.
            StoreUnavailableError: somebody else on this node is about to hold it, whom nobody can wait for.
            BdnError: the mirror could not be read, or the disk failed.
        """
        request = replace(request, is_suspect=False)  # it is checked when it is asked for again
        assert request.manifest is not None  # noqa: S101 - without it nobody is asked to obtain anything
        size = await self.lists.size(request.manifest, request.digest, request.bearer or "")
        while (held := self.access.open_named(request)) is None:  # it may have come and have been evicted
            if (flight := self.chain.reads.flight(request.digest)) is not None:
                await landed(flight)
                continue
            members = self.chain.peers.members.current().members
            self.origin.limit = in_flight_each(len(members), self.threads.count)
            # A peer's stage waits for it, and the peers' stages come to the same chunks in the same order.
            async with (
                self.places.place(request.organisation),
                self.bandwidth.turn(TrafficClass.STAGE, size),
                self.origin.place(()),
            ):
                with self.chain.reads.lead(request.digest) as is_leader:  # only now: others need not wait for our turn
                    if is_leader and not self.chain.held.holds(request.digest):
                        # Canceled it is when the agent ends, and then no thread shall go through its retries.
                        await self.threads.run(size, lambda buffer: self._read(request, buffer), self._stop.set)
        held.file.close()

    def _read(self, request: ChunkRequest, buffer: memoryview) -> None:
        """In a byte thread: from the mirror into the cluster tier, where room is made before anything is read."""
        digest, manifest = request.digest, request.manifest
        assert manifest is not None  # noqa: S101 - likewise
        reader = self.chain.of_owner(Reading(manifest, request.bearer or ""), self._stop)
        if self.chain.held.tier.bring(
            manifest, digest, buffer, lambda room: reader.read_into(PartialChunk(digest, room))
        ):
            self.on_obtained(len(buffer))
        elif not self.chain.held.holds(digest):  # to look again at once would be to look for ever, if it never comes
            raise StoreUnavailableError(f"chunk {digest} is on its way to this node, and not here yet")
