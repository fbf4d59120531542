"""How files get onto this disk: which chunks are fetched, in how many threads, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from bdn.core.digest import Digest
from bdn.core.groups import single_error
from bdn.core.layout import PlacedChunk, Slice
from bdn.transfer.byte_threads import ByteThreads
from bdn.wire.eviction_schema import Tier
from node_agent.crew import in_thread, to_the_end
from node_agent.disk.durable import DurableFolders
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.places import Places
from node_agent.fill.order import Order
from node_agent.fill.packed_parts import PackedParts
from node_agent.fill.part import Part
from node_agent.fill.supply import Supply


class Filler:
    """Fills files through the shared byte threads. ``on_committed`` is called on the loop once a file is whole."""

    def __init__(
        self,
        places: Places,
        folders: DurableFolders,
        sync: GroupSync,
        threads: ByteThreads,
        on_committed: Callable[[Digest], None],
    ) -> None:
        self._places = places
        self._folders = folders
        self._sync = sync
        self._threads = threads
        self._on_committed = on_committed

    async def fill(self, order: Order) -> None:
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
        part = Part(self._places, self._folders, layout)
        try:
            if len(layout.chunks) <= 1:
                await self._fill_at_once(part, order)
            else:
                await self._fill_in_pieces(part, order)
        finally:
            if part.is_committed:  # also when the cancellation came during the commit
                self._on_committed(layout.digest)

    async def _fill_from_slab(self, lies: Slice, order: Order) -> None:
        """One fetch, one thread, two syncs for all of them: a dataset of a million small files lives here."""
        parts = PackedParts(self._places, self._folders, self._sync, order.files)

        def work(buffer: memoryview) -> Tier:
            tier = order.supply.fetch(lies.slab, buffer)
            parts.write(buffer)
            return tier

        try:
            tier = await self._threads.run(lies.slab_size, work)
            await to_the_end(parts.commit())  # without the thread, which others need to fetch the next slab
            for file in order.files:
                order.report(file.digest, tier, file.size)
        finally:
            if parts.is_committed:  # also when the cancellation came during the commit
                for file in order.files:
                    self._on_committed(file.digest)
            else:
                await in_thread(parts.close)

    async def _fill_at_once(self, part: Part, order: Order) -> None:
        """One chunk, one thread, no bitmap."""

        def work(buffer: memoryview) -> Tier | None:
            try:
                part.open()
                tier = None
                for chunk in part.layout.placed():
                    tier = _obtain(part, order.supply, chunk, buffer)
                part.commit()
                return tier
            finally:
                part.close()

        tier = await self._threads.run(part.layout.size, work)
        if tier:
            order.report(part.layout.digest, tier, part.layout.size)

    async def _fill_in_pieces(self, part: Part, order: Order) -> None:
        try:
            await in_thread(part.open)
            chunks = iter(part.layout.placed())
            with single_error():
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(len(part.layout.chunks), 2 * self._threads.count)):
                        group.create_task(self._take_chunks(chunks, part, order))
            await in_thread(part.commit)
        finally:
            await in_thread(part.close)

    async def _take_chunks(self, chunks: Iterator[PlacedChunk], part: Part, order: Order) -> None:
        """One of several that draw from the same iterator, so that there is always a chunk waiting for a free thread."""
        try:
            for chunk in chunks:
                size = chunk.range.size

                def work(buffer: memoryview, chunk: PlacedChunk = chunk) -> Tier:
                    return _obtain(part, order.supply, chunk, buffer)

                order.report(part.layout.digest, await self._threads.run(size, work), size)
        except BaseException:
            order.stop.set()  # before the group cancels the others: they shall not go on trying
            raise


def _obtain(part: Part, supply: Supply, chunk: PlacedChunk, buffer: memoryview) -> Tier:
    """A chunk that an earlier fill left and that is still right, or one that is fetched, verified and written."""
    if part.holds(chunk, buffer):
        return "node"
    tier = supply.fetch(chunk.digest, buffer)
    part.write(chunk, buffer)
    return tier
