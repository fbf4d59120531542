"""The owner's side of the ring: obtains chunks that peers request, with one read of the mirror for all of them."""

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
    """A ``ServedChunks`` that obtains missing chunks.

    A chunk goes into the cluster tier. Its source is the mirror, never another peer, so requests cannot go in
    circles. ``threads`` are separate from this node's fills: no peer waits behind a whole stage of this node. Jobs of
    several organisations have grants for this port, so ``places``, one per thread, go round robin over organisations.
    Reads acquire places of ``origin`` as fills do, before all of them: a peer's request precedes this node's next
    chunks. ``on_obtained`` gets the size of each chunk.
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
        """A grant that may read a manifest may have its chunks obtained."""
        return self.access.authorize(request)

    def open_chunk(self, request: ChunkRequest) -> OpenChunk | Future[object]:
        """The chunk, or a Future until it is here. A request without a manifest obtains nothing."""
        if request.manifest is None:
            return self.access.open_chunk(request)
        if self.lists.known(request.manifest, request.digest):
            return self.access.open_named(request) or self._begin(partial(self.obtain, request))
        try:
            return self.access.open_chunk(request)
        except NotFoundError:
            return self._begin(partial(self.obtain, request))

    def _begin(self, obtain: Callable[[], Coroutine[object, object, None]]) -> Future[object]:
        """Start obtaining. The Future is done when the chunk is here, or has the error. Thread-safe; does not block."""
        future: Future[object] = Future()
        self.loop.call_soon_threadsafe(self._start, obtain, future)
        return future

    def _start(self, obtain: Callable[[], Coroutine[object, object, None]], future: Future[object]) -> None:
        task = self.background.start(self._answer(obtain, future), "obtain for a peer")

        def end(_: asyncio.Task[None]) -> None:
            if not future.done():
                future.set_exception(CanceledError("the request of a peer"))

        task.add_done_callback(end)  # not in a finally of the task: it never runs if canceled before the first step

    async def _answer(self, obtain: Callable[[], Coroutine[object, object, None]], future: Future[object]) -> None:
        try:
            await obtain()
        except Exception as error:  # noqa: BLE001 - the server turns it into an answer, or a log line
            future.set_exception(error)
        else:
            future.set_result(None)

    async def obtain(self, request: ChunkRequest) -> None:
        """On return the chunk is here, and ``lists`` knows that the manifest names it.

        Raises:
            NotFoundError: the manifest does not exist for this bearer, or does not name the chunk.
            CacheTooSmallError, CacheFullError: there is no room; other sources may have some.
            StoreUnavailableError: another call on this node is storing the chunk, and cannot be waited for.
            BdnError: the mirror could not be read, or the disk failed.
        """
        request = replace(request, is_suspect=False)  # checked when the peer requests it again
        assert request.manifest is not None  # noqa: S101 - without a manifest nothing is obtained
        size = await self.lists.size(request.manifest, request.digest, request.bearer or "")
        while (held := self.access.open_named(request)) is None:  # it may have arrived and been evicted
            if (flight := self.chain.reads.flight(request.digest)) is not None:
                await landed(flight)
                continue
            members = self.chain.peers.members.current().members
            self.origin.limit = in_flight_each(len(members), self.threads.count)
            # A peer's stage waits for this read, and all peers' stages reach the same chunks in the same order.
            async with (
                self.places.place(request.organisation),
                self.bandwidth.turn(TrafficClass.STAGE, size),
                self.origin.place(()),
            ):
                with self.chain.reads.lead(request.digest) as is_leader:  # only now: no reader waits while we queue
                    if is_leader and not self.chain.held.holds(request.digest):
                        # Canceled when the agent ends; the thread must then not go through its retries.
                        await self.threads.run(size, lambda buffer: self._read(request, buffer), self._stop.set)
        held.file.close()

    def _read(self, request: ChunkRequest, buffer: memoryview) -> None:
        """In a byte thread: read from the mirror into the cluster tier, which makes room before the read."""
        digest, manifest = request.digest, request.manifest
        assert manifest is not None  # noqa: S101 - as in ``obtain``
        reader = self.chain.of_owner(Reading(manifest, request.bearer or ""), self._stop)
        if self.chain.held.tier.bring(
            manifest, digest, buffer, lambda room: reader.read_into(PartialChunk(digest, room))
        ):
            self.on_obtained(len(buffer))
        elif not self.chain.held.holds(digest):  # retrying at once could loop forever
            raise StoreUnavailableError(f"this node is still fetching chunk {digest}")
