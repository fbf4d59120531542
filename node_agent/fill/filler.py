"""Files are filled on this disk: their chunks are fetched in byte threads, in two lanes.

One lane reads from the mirror, the other asks peers. Each has threads of its own, so that waiting for peers never keeps a node
from reading what its peers wait for.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from bdn.core.chunk import Digest, FileLayout, PlacedChunk, Slice
from bdn.core.errors import single_error
from bdn.core.pace.rate_limit import TrafficClass
from bdn.core.ring.placement import own_in_flight
from bdn.disk.direct import DirectWrites
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.chunk_readers import BytesByTier, ChunkReader, fetch
from node_agent.background_tasks import in_thread, to_the_end
from node_agent.disk.cache_directory import UnnamedBytes
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.places import Places
from node_agent.fetch.bandwidth import Bandwidth, OrderedLimit, Position
from node_agent.fill.fills import FileReport
from node_agent.fill.part import PackedParts, PartialFile


@dataclass(frozen=True)
class Pools:
    """The agent's byte threads, which all stages share: for chunks from the mirror, and for those from peers.

    ``origin`` are the places to read from the mirror, for stages and for what peers ask for: more at once from this node
    would come no sooner, and what its peers wait for would come later.
    """

    own: ByteThreads
    peers: ByteThreads
    origin: OrderedLimit


@dataclass(frozen=True, eq=False)
class Lane:
    """Some of a stage's chunks."""

    threads: ByteThreads
    places: OrderedLimit

    @property
    def width(self) -> int:
        """How many chunks are in hand at once, at most."""
        return min(self.threads.count, self.places.limit)

    @property
    def is_ending(self) -> bool:
        """Whether all chunks that are left are in hand. Any thread may ask."""
        return self.places.is_last

    def turn(self, position: Position) -> AbstractAsyncContextManager[None]:
        """To be held while a chunk is in hand."""
        return self.places.place(position)


Place = tuple[Lane, Position]  # where a chunk is to be fetched, and when
PlaceOf = Callable[[Digest], Place]


class Lanes:
    """One stage's lanes, among ``members`` who share the reading. A node that is alone uses only one."""

    def __init__(self, pools: Pools, members: int) -> None:
        pools.origin.limit = own_in_flight(members, pools.own.count)
        self.own = Lane(pools.own, pools.origin)
        self.peers = Lane(pools.peers, OrderedLimit(pools.peers.count))


_Result = TypeVar("_Result")
_Placed = tuple[Position, PlacedChunk]


class PartShelf(Protocol):
    """Whoever serves chunks of files that are not whole yet. Any thread."""

    def arrived(self, file: Digest, index: int) -> None:
        """This chunk of the file lies at its place in the part, verified."""
        ...

    def departed(self, file: Digest) -> None:
        """The part is no more, or is a whole file now."""
        ...


@dataclass(frozen=True)
class FillOrder:
    """Files to fill: one with chunks of its own, or several that lie in one slab.

    ``reader`` brings their chunks, ``place`` says in which lane and when. ``keep_slab`` is given a slab that was cut into
    files, in a byte thread. ``traffic`` is asked for each chunk, because a stage may join what a prefetch began.
    """

    files: tuple[FileLayout, ...]
    reader: ChunkReader
    place: PlaceOf
    keep_slab: Callable[[Digest, memoryview], None]
    traffic: Callable[[], TrafficClass]
    report: FileReport
    stop: threading.Event


@dataclass(frozen=True)
class Filler:
    """Fills files in the lanes of their stage. ``on_committed`` is called on the loop once a file is whole."""

    places: Places
    sync: GroupSync
    writes: DirectWrites
    unnamed: UnnamedBytes
    bandwidth: Bandwidth
    shelf: PartShelf
    on_committed: Callable[[Digest], None]

    async def fill(self, order: FillOrder) -> None:
        """Make the files whole; returns when they are committed.

        Canceled or failed, it leaves a part from which the next fill goes on, and its threads are idle again. Set
        ``order.stop`` before canceling, otherwise a thread may still go through its retries.

        Raises:
            BdnError: the first failure; the other chunks are given up.
        """
        lies = order.files[0].slice
        if lies is not None:
            await self._fill_from_slab(lies, order)
            return
        (layout,) = order.files
        part = PartialFile(self.places, layout, self.writes)
        try:
            if len(layout.chunks) <= 1:
                await self._fill_at_once(part, order)
            else:
                await self._fill_in_pieces(part, order)
        finally:
            if part.is_committed:  # also when the cancellation came during the commit
                self.on_committed(layout.digest)

    async def _fill_from_slab(self, lies: Slice, order: FillOrder) -> None:
        """One fetch, one thread, two syncs for all of them: a dataset of a million small files lives here."""
        parts = PackedParts(self.places, self.sync, self.unnamed, order.files)
        lane, position = order.place(lies.slab)

        def work(buffer: memoryview) -> BytesByTier:
            def store() -> None:
                lane.threads.received()
                parts.write(buffer)
                order.keep_slab(lies.slab, buffer)

            return fetch(order.reader, lies.slab, buffer, store)

        try:
            bytes_by_tier = await self._run((lane, position), lies.slab_size, work, order)
            await to_the_end(parts.commit())  # without the thread, which others need to fetch the next slab
            tier = max(bytes_by_tier, key=bytes_by_tier.__getitem__)
            for file in order.files:
                order.report(file.digest, tier, file.size)
        finally:
            if parts.is_committed:  # also when the cancellation came during the commit
                for file in order.files:
                    self.on_committed(file.digest)
            else:
                await in_thread(parts.close)

    async def _fill_at_once(self, part: PartialFile, order: FillOrder) -> None:
        """One chunk, one thread, no bitmap."""
        digest = part.layout.digest
        lane, position = order.place(digest)

        def work(buffer: memoryview) -> BytesByTier:
            try:
                part.open()
                placed = part.layout.placed()

                def store() -> None:
                    lane.threads.received()
                    for chunk in placed:
                        part.write(chunk, buffer)
                    part.commit()

                if placed:
                    return fetch(order.reader, placed[0].digest, buffer, store)
                store()  # an empty file
                return {}
            finally:
                part.close()

        self._tell(digest, await self._run((lane, position), part.layout.size, work, order), order)

    async def _fill_in_pieces(self, part: PartialFile, order: FillOrder) -> None:
        lanes: dict[Lane, list[_Placed]] = {}
        for chunk in part.layout.placed():
            lane, position = order.place(chunk.digest)
            lanes.setdefault(lane, []).append((position, chunk))
        try:
            await in_thread(part.open)
            with single_error():
                async with asyncio.TaskGroup() as group:
                    for lane, chunks in lanes.items():
                        queue = iter(sorted(chunks, key=lambda placed: placed[0]))
                        for _ in range(min(len(chunks), 2 * lane.width)):
                            group.create_task(self._take_chunks(lane, queue, part, order))
            await in_thread(part.commit)
        finally:
            self.shelf.departed(part.layout.digest)
            await in_thread(part.close)

    async def _take_chunks(self, lane: Lane, queue: Iterator[_Placed], part: PartialFile, order: FillOrder) -> None:
        """One of several that draw from the same queue, so that there is always a chunk waiting for a free thread."""
        try:
            for position, chunk in queue:

                def work(buffer: memoryview, chunk: PlacedChunk = chunk) -> BytesByTier:
                    return self._obtain(lane, part, chunk, buffer, order)

                self._tell(part.layout.digest, await self._run((lane, position), chunk.range.size, work, order), order)
        except BaseException:
            order.stop.set()  # before the group cancels the others: they shall not go on trying
            raise

    def _obtain(
        self, lane: Lane, part: PartialFile, chunk: PlacedChunk, buffer: memoryview, order: FillOrder
    ) -> BytesByTier:
        """A chunk that an earlier fill left and that is still right, or one that is fetched, verified and written."""
        file = part.layout.digest
        if part.holds(chunk, buffer):
            self.shelf.arrived(file, chunk.index)
            return {"node": chunk.range.size}

        def store() -> None:
            lane.threads.received()
            part.write(chunk, buffer)
            self.shelf.arrived(file, chunk.index)

        return fetch(order.reader, chunk.digest, buffer, store)

    async def _run(self, place: Place, size: int, work: Callable[[memoryview], _Result], order: FillOrder) -> _Result:
        """``work`` in a thread, once it is this chunk's turn.

        First on this node's network, where a prefetch may wait for long without being in a stage's way, then in its lane.
        """
        lane, position = place
        async with self.bandwidth.turn(order.traffic(), size), lane.turn(position):
            return await lane.threads.run(size, work)

    @staticmethod
    def _tell(file: Digest, bytes_by_tier: BytesByTier, order: FillOrder) -> None:
        for tier, size in bytes_by_tier.items():
            order.report(file, tier, size)
