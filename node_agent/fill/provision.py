"""Obtains, admits and fills manifests on this node, for a stage or a prefetch. Read ``Provision.run`` first.

Chunks are fetched in byte threads, in two lanes: one reads from the mirror, the other from peers. Each lane has its own
threads, so that waiting for peers never delays reads that peers wait for.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from bdn.core.cache.index import Holder
from bdn.core.chunk import Digest, FileLayout, PlacedChunk, Slice
from bdn.core.errors import BdnError, single_error
from bdn.core.layout import Manifest
from bdn.core.pace.rate_limit import TrafficClass
from bdn.core.ring.placement import in_flight_each
from bdn.disk.threads import in_thread, to_the_end
from bdn.traces import spans
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.chunk_readers import BytesByTier, fetch
from bdn.transfer.under_way import Arriving
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.records import Held
from node_agent.cache.space import blaming
from node_agent.disk.cache_directory import CacheDirectory
from node_agent.fetch.bandwidth import Bandwidth, OrderedLimit, Position
from node_agent.fetch.chain import ReaderChain
from node_agent.fetch.documents import Catalogue
from node_agent.fetch.fill_context import FillContext, FillUnit, RetryBudget, Routing, chunks_in_order, in_order
from node_agent.fill.fills import Fill, Fills, Report
from node_agent.fill.part import PackedParts, PartialFile
from node_agent.fill.progress import FillProgress

_UNITS_AT_ONCE: Final = 16  # per stage and kind; the byte threads are the effective limit
_SHARED_UNITS_AT_ONCE: Final = 32  # at two chunks each, these keep the threads of either lane busy
_Work = Callable[[Arriving, memoryview], BytesByTier]


@dataclass(frozen=True)
class FillRequest:
    """Manifests to be filled, one entry per mount, with the grant and the holder.

    ``begin`` is called once the missing contents are known. ``wanted`` None: all contents are filled; else only these,
    with room for all of them.
    """

    manifests: Sequence[Digest]
    grant: str
    holder: Holder
    traffic: TrafficClass
    begin: Callable[[Sequence[Manifest], FillProgress], object]
    wanted: frozenset[Digest] | None = None


@dataclass(frozen=True)
class Pools:
    """The agent's byte threads, shared by all stages: for chunks from the mirror, and for chunks from peers.

    ``origin`` limits reads from the mirror, for stages and for peers: more at once would not be faster for this node,
    and would delay the chunks that its peers wait for.
    """

    own: ByteThreads
    peers: ByteThreads
    origin: OrderedLimit


@dataclass(frozen=True)
class Provision:
    """Failures raise ``BdnError``; then the caller ends the lease."""

    catalogue: Catalogue
    disk: CacheDirectory
    cache: NodeCache
    fills: Fills
    chain: ReaderChain
    pools: Pools
    bandwidth: Bandwidth
    on_bytes: Report  # for the metrics: counts every byte once

    async def run(self, request: FillRequest) -> list[Manifest]:
        """Obtain the manifests, make room for all of them, and fill what is missing. Leases them for the holder."""
        digests = dict.fromkeys(request.manifests)
        with spans.span("manifests", manifests=len(digests)):
            held = [await self._obtain(digest, request) for digest in digests]
        with spans.span("admit"):
            missing = await self.cache.admit(held, request.holder)
        missing = missing if request.wanted is None else missing & request.wanted
        held = [replace(one, pages=()) for one in held]  # pages are on disk; for a million files they take 200 MB
        ledger = self.cache.index.ledger
        to_come = sum(ledger.size_of(content) or 0 for content in missing)
        budget = RetryBudget(to_come, self.chain.peers.avoided)
        known = {one.root.digest: one.manifest for one in held}
        manifests = [known[digest] for digest in request.manifests]
        progress = FillProgress(manifests, missing, budget)
        request.begin(manifests, progress)
        if missing:
            with spans.span("fill", files=len(missing), bytes=to_come), spans.batches("chunks", to_come) as traced:
                progress.traced = traced
                async with blaming(self.cache.space):
                    await _RequestFill(self, request, progress).run(held, missing)
            for one in held:
                with suppress(BdnError):  # the caller saves the pins again before it hands files on
                    await in_thread(self.disk.files.save, one.manifest)
        return manifests

    async def _obtain(self, digest: Digest, request: FillRequest) -> Held:
        is_complete = self.cache.index.is_complete(digest)
        return await self.catalogue.obtain(digest, request.grant, is_complete=is_complete)


@dataclass(frozen=True, eq=False)
class _Lane:
    """Some of a stage's chunks. ``places`` orders their reads."""

    threads: ByteThreads
    places: OrderedLimit


class _RequestFill:
    def __init__(self, provision: Provision, request: FillRequest, progress: FillProgress) -> None:
        self.provision = provision
        self.contexts: dict[Digest, FillContext] = {}
        pools = provision.pools
        self.from_mirror = _Lane(pools.own, pools.origin)
        self.from_peers = _Lane(pools.peers, OrderedLimit(pools.peers.count))
        self._request = request
        self._progress = progress
        self._units: Sequence[FillUnit] = ()

    async def run(self, held: Iterable[Held], missing: frozenset[Digest]) -> None:
        self._units = units = await self._wanted(held, missing)
        routings = [context.routing for context in self.contexts.values()]
        for routing in routings:
            await in_thread(routing.prepare)
        members = max(routing.count for routing in routings)
        self.from_mirror.places.limit = in_flight_each(members, self.from_mirror.threads.count)
        # Two queues: units that wait for peers must not delay units that peers wait for.
        own, shared = list[FillUnit](), list[FillUnit]()
        for unit in units:
            turns = map(self.contexts[unit.manifest].routing.turn, unit.first.fetched)
            (own if all(turn.is_own for turn in turns) else shared).append(unit)
        with single_error():
            async with asyncio.TaskGroup() as group:
                for queue, most in ((own, _UNITS_AT_ONCE), (shared, _SHARED_UNITS_AT_ONCE)):
                    waiting = iter(queue)
                    for _ in range(min(len(queue), most)):
                        group.create_task(self._fill_from(waiting))

    def _ahead(self, manifest: Digest) -> Iterator[Digest]:
        """Chunks to be read from the mirror, in the order of the units, since both queues are worked on together."""
        routing = self.contexts[manifest].routing
        for unit in self._units:
            if unit.manifest == manifest:
                yield from (chunk for chunk in unit.first.fetched if routing.turn(chunk).is_own)

    async def _wanted(self, held: Iterable[Held], missing: frozenset[Digest]) -> list[FillUnit]:
        """Units to fetch, in the order of the ring. Content of several manifests is fetched for the first one."""
        units: list[FillUnit] = []
        wanted = missing
        for one in held:
            digest = one.root.digest
            units += await in_thread(in_order, one.layout, one.file_layouts(wanted))
            wanted -= one.manifest.contents.keys()
            routing = Routing(partial(chunks_in_order, one.layout), self.provision.chain.peers.members)
            budget, is_ending = self._progress.budget, self._is_ending
            self.contexts[digest] = FillContext(
                digest, self._request.grant, routing, budget, is_ending, self._ahead(digest)
            )
        return sorted(units, key=lambda unit: unit.first.fetched_size, reverse=True)

    def _is_ending(self) -> bool:
        """Whether all remaining chunks from peers are being read."""
        return self.from_peers.places.is_last

    async def _fill_from(self, queue: Iterator[FillUnit]) -> None:
        """One of several tasks that take units from the same queue."""
        progress, fills = self._progress, self.provision.fills
        for unit in queue:
            files = unit.files()

            def start(
                fill: Fill, unit: FillUnit = unit, files: Sequence[FileLayout] = files
            ) -> Coroutine[object, object, None]:
                return _UnitFill(self, unit.manifest, files, fill).run()

            names, size = [file.digest for file in files], sum(file.size for file in files)
            with progress.awaiting(names[0], size, partial(fills.under_way, names[0])):
                await fills.join(names, start, progress.report, progress.restart, self._request.traffic)
                for file in files:
                    progress.finish(file.digest, file.size)


class _UnitFill:
    """The fill of one unit. ``fill`` names the files of the unit that no other fill has, and receives the reports."""

    def __init__(self, whole: _RequestFill, manifest: Digest, files: Sequence[FileLayout], fill: Fill) -> None:
        self._whole = whole
        self._provision = whole.provision
        self._cache = whole.provision.cache
        self._context = whole.contexts[manifest]
        self._fill = fill
        self._reader = whole.provision.chain.of_fill(self._context, fill.stop)
        ledger = self._cache.index.ledger  # another stage may have finished some files since the admission
        self._files = [file for file in files if file.digest in fill.files and not ledger.is_committed(file.digest)]

    async def run(self) -> None:
        """Make the files whole; returns once they are committed.

        On cancellation or failure its threads become idle, and a part is left that the next fill resumes. Set
        ``fill.stop`` before canceling, otherwise a thread may still go through its retries.

        Raises ``BdnError``: the first failure; other chunks are given up.
        """
        if not self._files:
            return
        lies = self._files[0].slice
        if lies is not None:
            await self._fill_from_slab(lies)
            return
        (layout,) = self._files
        part = PartialFile(self._provision.disk.files, layout, self._provision.disk.writes)
        try:
            if len(layout.chunks) <= 1:
                await self._fill_at_once(part)
            else:
                await self._fill_in_pieces(part)
        finally:
            if part.is_committed:  # also when the cancellation came during the commit
                self._cache.index.commit(layout.digest)

    async def _fill_from_slab(self, lies: Slice) -> None:
        """One fetch, one thread and two syncs for all files of a slab: datasets have a million small files."""
        parts = PackedParts(self._provision.disk, self._files)
        lane, position = self._turn(lies.slab)

        def work(arriving: Arriving, buffer: memoryview) -> BytesByTier:
            def store() -> None:
                lane.threads.received()
                parts.write(buffer)
                if self._context.routing.is_mine(lies.slab):
                    # Nothing can rebuild the slab from its files, so its owner stores it for peers.
                    self._cache.chunks.tier.keep(self._context.manifest, lies.slab, buffer)

            return fetch(self._reader, lies.slab, buffer, store, arriving)

        try:
            with self._fill.under_way.read() as arriving:
                bytes_by_tier = await self._run(lane, position, lies.slab_size, work, arriving)
                await to_the_end(parts.commit())  # without the thread, which can fetch the next slab meanwhile
            tier = max(bytes_by_tier, key=bytes_by_tier.__getitem__)
            for file in self._files:
                self._report(file.digest, {tier: file.size})
        finally:
            if parts.is_committed:  # also when the cancellation came during the commit
                for file in self._files:
                    self._cache.index.commit(file.digest)
            else:
                await in_thread(parts.close)

    async def _fill_at_once(self, part: PartialFile) -> None:
        layout = part.layout
        lane, position = self._turn(layout.digest)

        def work(arriving: Arriving, buffer: memoryview) -> BytesByTier:
            try:
                part.open()
                placed = layout.placed()

                def store() -> None:
                    lane.threads.received()
                    for chunk in placed:
                        part.write(chunk, buffer)
                    part.commit()

                if placed:
                    return fetch(self._reader, placed[0].digest, buffer, store, arriving)
                store()  # an empty file
                return {}
            finally:
                part.close()

        with self._fill.under_way.read() as arriving:
            came = await self._run(lane, position, layout.size, work, arriving)
        self._report(layout.digest, came)

    async def _fill_in_pieces(self, part: PartialFile) -> None:
        lanes: dict[_Lane, list[tuple[Position, PlacedChunk]]] = {}
        for chunk in part.layout.placed():
            lane, position = self._turn(chunk.digest)
            lanes.setdefault(lane, []).append((position, chunk))
        try:
            await in_thread(part.open)
            with single_error():
                async with asyncio.TaskGroup() as group:
                    for lane, chunks in lanes.items():
                        queue = iter(sorted(chunks, key=lambda placed: placed[0]))
                        width = min(lane.threads.count, lane.places.limit)
                        for _ in range(min(len(chunks), 2 * width)):
                            group.create_task(self._take_chunks(lane, queue, part))
            await in_thread(part.commit)
        finally:
            self._cache.chunks.departed(part.layout.digest)
            await in_thread(part.close)

    async def _take_chunks(self, lane: _Lane, queue: Iterator[tuple[Position, PlacedChunk]], part: PartialFile) -> None:
        """One of several tasks that take chunks from the same queue, so that a chunk always waits for a free thread."""
        try:
            for position, chunk in queue:
                with self._fill.under_way.read() as arriving:
                    work = partial(self._obtain, lane, part, chunk)
                    came = await self._run(lane, position, chunk.range.size, work, arriving)
                self._report(part.layout.digest, came)
        except BaseException:
            self._fill.stop.set()  # before the group cancels the other tasks: their threads must not go on retrying
            raise

    def _obtain(
        self, lane: _Lane, part: PartialFile, chunk: PlacedChunk, arriving: Arriving, buffer: memoryview
    ) -> BytesByTier:
        """Verify a chunk that an earlier fill left; otherwise fetch, verify and write it."""
        file, chunks = part.layout.digest, self._cache.chunks
        if part.holds(chunk, buffer):
            chunks.arrived(file, chunk.index)
            return {"node": chunk.range.size}

        def store() -> None:
            lane.threads.received()
            part.write(chunk, buffer)
            chunks.arrived(file, chunk.index)

        return fetch(self._reader, chunk.digest, buffer, store, arriving)

    def _turn(self, chunk: Digest) -> tuple[_Lane, Position]:
        turn = self._context.routing.turn(chunk)
        return (self._whole.from_mirror if turn.is_own else self._whole.from_peers), (turn.position,)

    async def _run(self, lane: _Lane, position: Position, size: int, work: _Work, arriving: Arriving) -> BytesByTier:
        """Run ``work`` in a thread when it is the chunk's turn.

        The chunk waits first for its turn on the network, where a prefetch may wait long without delaying a stage, then
        in its lane. The traffic class is read for each chunk, because a stage may join a prefetch's fill.
        """
        arriving.step = "bandwidth"
        async with self._provision.bandwidth.turn(self._fill.traffic, size):
            arriving.step = "order"
            async with lane.places.place(position):
                arriving.step = "thread"
                return await lane.threads.run(size, partial(work, arriving))

    def _report(self, file: Digest, bytes_by_tier: BytesByTier) -> None:
        for tier, size in bytes_by_tier.items():
            self._provision.on_bytes(tier, size)
            self._fill.report(file, tier, size)
