"""How one file gets onto this disk: which chunks are fetched, in how many threads, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.groups import single_error
from bdn.core.layout import FileLayout, PlacedChunk
from bdn.transfer.byte_threads import ByteThreads
from bdn.wire.eviction_schema import Tier
from node_agent.crew import in_thread
from node_agent.disk.durable import DurableFolders
from node_agent.disk.places import Places
from node_agent.fill.part import Part
from node_agent.fill.supply import Supply

Report = Callable[[Tier, int], None]  # bytes that are here now, and the tier that they came from


@dataclass(frozen=True)
class Order:
    """One file to fill: where its chunks come from, whom to tell, and how to make it stop trying."""

    layout: FileLayout
    supply: Supply
    report: Report
    stop: threading.Event


class Filler:
    """Fills files through the shared byte threads. ``on_committed`` is called on the loop once a file is whole."""

    def __init__(
        self, places: Places, folders: DurableFolders, threads: ByteThreads, on_committed: Callable[[Digest], None]
    ) -> None:
        self._places = places
        self._folders = folders
        self._threads = threads
        self._on_committed = on_committed

    async def fill(self, order: Order) -> None:
        """Make the file whole; returns when it is committed.

        Canceled or failed, it leaves a part from which the next fill goes on, and its threads are idle again. Set
        ``order.stop`` before canceling, otherwise a thread may still go through its retries.

        Raises:
            BdnError: the first failure; the other chunks are given up.
        """
        part = Part(self._places, self._folders, order.layout)
        try:
            if len(order.layout.chunks) <= 1:
                await self._fill_at_once(part, order)
            else:
                await self._fill_in_pieces(part, order)
        finally:
            if part.is_committed:  # also when the cancellation came during the commit
                self._on_committed(order.layout.digest)

    async def _fill_at_once(self, part: Part, order: Order) -> None:
        """One chunk, one thread, no bitmap: a dataset of a million small files lives here."""

        def work(buffer: memoryview) -> Tier | None:
            try:
                part.open()
                tier = None
                for chunk in order.layout.placed():
                    tier = _obtain(part, order.supply, chunk, buffer)
                part.commit()
                return tier
            finally:
                part.close()

        tier = await self._threads.run(order.layout.size, work)
        if tier:
            order.report(tier, order.layout.size)

    async def _fill_in_pieces(self, part: Part, order: Order) -> None:
        try:
            await in_thread(part.open)
            chunks = iter(order.layout.placed())
            with single_error():
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(len(order.layout.chunks), 2 * self._threads.count)):
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

                order.report(await self._threads.run(size, work), size)
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
