"""An owner obtains what its peers ask for: one read of the mirror, however many of them ask."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import CanceledError, NotFoundError, StoreUnavailableError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.core.ring.placement import own_in_flight
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.chunk_readers import PartialChunk
from bdn.wire.layout_form import Layout
from node_agent.background_tasks import BackgroundTasks, in_thread
from node_agent.cache.peer_access import PeerAccess
from node_agent.fetch.bandwidth import Bandwidth, OrderedLimit
from node_agent.fetch.chain import ReaderChain, ReadsInProgress, landed
from node_agent.fetch.documents import Catalogue

_REMEMBERED: Final = 16  # manifests; one of 140 GB has 17,000 chunks, which take 4 MB
_Key = tuple[Digest, str]  # a manifest, and the organisation whose list of it this is: each has slabs of its own


@dataclass(frozen=True)
class ChunkList:
    """The sizes of everything that travels for a manifest: chunks of files, and slabs rather than the files in them."""

    sizes: Mapping[Digest, int]
    data_port: int | None  # of the mirror's data plane; None where it serves chunks itself

    @classmethod
    def of(cls, layout: Layout) -> ChunkList:
        """From where the manifest's bytes lie. Takes a while for a million files."""
        sizes: dict[Digest, int] = {}
        for file in layout.files.values():
            if file.slice is not None:
                sizes[file.slice.slab] = file.slice.slab_size
            else:
                sizes.update((chunk.digest, chunk.range.size) for chunk in file.placed())
        return cls(sizes, layout.data_port)


@dataclass(frozen=True)
class ChunkLists:
    """The lists of the manifests that were asked about last. ``known`` may be called from any thread.

    A layout is read with a peer's grant, which proves that the peer may read the manifest and that it exists.
    """

    catalogue: Catalogue
    _known: dict[_Key, ChunkList] = field(default_factory=dict)  # the one used last stands last
    _asking: ReadsInProgress = field(default_factory=ReadsInProgress)

    def known(self, manifest: Digest, organisation: str) -> ChunkList | None:
        """The list, if it was obtained and is remembered."""
        return self._known.get((manifest, organisation))

    async def obtain(self, manifest: Digest, organisation: str, bearer: str | None) -> ChunkList:
        """The list; one request for all who ask at the same time. Raises ``BdnError``: why it cannot be had."""
        key = manifest, organisation
        while (known := self._known.get(key)) is None:
            if (flight := self._asking.flight(key)) is not None:
                await landed(flight)
                continue
            with self._asking.lead(key):  # nobody else does: the loop has not turned since we looked
                self._remember(key, await in_thread(ChunkList.of, await self.catalogue.layout(manifest, bearer)))
        self._remember(key, known)
        return known

    def _remember(self, key: _Key, known: ChunkList) -> None:
        self._known.pop(key, None)
        self._known[key] = known
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]


@dataclass(frozen=True)
class Owner:
    """A ``ServedChunks``: what is asked of an owner and is not here is brought into the cluster tier.

    It comes from the mirror and never from another peer, so that no request goes in circles. ``threads`` are not those of
    this node's fills: no peer waits behind a whole stage of ours. They read in the same places, ``origin``: what a peer asks
    for comes before what this node wants next. ``on_obtained`` is told the bytes of each chunk.
    """

    loop: asyncio.AbstractEventLoop
    background: BackgroundTasks
    threads: ByteThreads
    origin: OrderedLimit
    bandwidth: Bandwidth
    lists: ChunkLists
    access: PeerAccess
    chain: ReaderChain
    on_obtained: Callable[[int], None]
    _stop: threading.Event = field(default_factory=threading.Event)

    def authorize(self, request: ChunkRequest) -> None:
        """Who may read a manifest may have its chunks obtained."""
        self.access.authorize(request)

    def open_chunk(self, request: ChunkRequest) -> OpenChunk | Future[object]:
        """The chunk, or a Future until it is here. One that does not say to which manifest it belongs is not obtained."""
        if request.manifest is None:
            return self.access.open_chunk(request)
        known = self.lists.known(request.manifest, self.access.reader_of(request.bearer))
        if known is not None and request.digest in known.sizes:
            return self.access.open_for(request) or self._begin(request)
        try:
            return self.access.open_chunk(request)
        except NotFoundError:
            return self._begin(request)

    def _begin(self, request: ChunkRequest) -> Future[object]:
        """Done when the chunk is here, or with the reason why it cannot be. From any thread; blocks nobody."""
        future: Future[object] = Future()
        self.loop.call_soon_threadsafe(self._start, request, future)
        return future

    def _start(self, request: ChunkRequest, future: Future[object]) -> None:
        task = self.background.start(self._answer(request, future), f"obtain {request.digest}")

        def end(_: asyncio.Task[None]) -> None:
            if not future.done():
                future.set_exception(CanceledError("the request of a peer"))

        task.add_done_callback(end)  # not a finally of the task: one that is canceled before its first step has none

    async def _answer(self, request: ChunkRequest, future: Future[object]) -> None:
        try:
            await self.obtain(request)
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
        reader = self.access.reader_of(request.bearer)
        chunks = await self.lists.obtain(request.manifest, reader, request.bearer)
        size = chunks.sizes.get(request.digest)
        if size is None:
            raise NotFoundError(f"chunk {request.digest}")
        while (held := self.access.open_for(request)) is None:  # it may have come and have been evicted
            if (flight := self.chain.reads.flight(request.digest)) is not None:
                await landed(flight)
                continue
            members = self.chain.peers.members.current().members
            self.origin.limit = own_in_flight(len(members), self.threads.count)
            # A peer's stage waits for it, and the peers' stages come to the same chunks in the same order.
            async with self.bandwidth.turn(TrafficClass.STAGE, size), self.origin.place(()):
                with self.chain.reads.lead(request.digest) as is_leader:  # only now: others need not wait for our turn
                    if is_leader and not self.chain.held.holds(request.digest):
                        # Canceled it is when the agent ends, and then no thread shall go through its retries.
                        await self.threads.run(size, lambda buffer: self._read(request, chunks, buffer), self._stop.set)
        held.file.close()

    def _read(self, request: ChunkRequest, chunks: ChunkList, buffer: memoryview) -> None:
        """In a byte thread: from the mirror into the cluster tier, where room is made before anything is read."""
        digest, manifest = request.digest, request.manifest
        assert manifest is not None  # noqa: S101 - likewise
        reader = self.chain.of_owner(chunks.data_port, request.bearer or "", self._stop)
        if self.chain.held.tier.bring(
            manifest, digest, buffer, lambda room: reader.read_into(PartialChunk(digest, room))
        ):
            self.on_obtained(len(buffer))
        elif not self.chain.held.holds(digest):  # to look again at once would be to look for ever, if it never comes
            raise StoreUnavailableError(f"chunk {digest} is on its way to this node, and not here yet")
