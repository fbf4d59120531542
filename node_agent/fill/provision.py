"""Manifests come onto this node: known, admitted, filled. For a stage, or for nobody yet. Read ``run`` first."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from bdn.core.cache.index import Holder
from bdn.core.chunk import Digest
from bdn.core.errors import single_error
from bdn.core.pace.rate_limit import TrafficClass
from bdn.wire.operation_schema import Tier
from node_agent.background_tasks import in_thread
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.records import Held
from node_agent.cache.space import blaming
from node_agent.fetch.chain import ReaderChain, chunk_base
from node_agent.fetch.documents import Catalogue
from node_agent.fetch.fill_context import FillContext, RetryBudget, Routing
from node_agent.fetch.peers import Members, Peers
from node_agent.fill.filler import Filler, FillOrder, Lanes, Place, Pools
from node_agent.fill.fills import Fill, Fills, FillUnit, Report, units_of

_UNITS_AT_ONCE: Final = 16  # per stage and kind; the byte threads are the real limit
_SHARED_UNITS_AT_ONCE: Final = 32  # of two chunks, these are enough to keep the threads busy with either lane


class FillWatch(Protocol):
    """Who wants to know how far it is."""

    def report(self, file: Digest, tier: Tier, size: int) -> None:
        """Bytes of a file that is coming are here."""
        ...

    def restart(self, file: Digest) -> None:
        """What was reported of it is void."""
        ...

    def finish(self, file: Digest, size: int) -> None:
        """It is whole."""
        ...


@dataclass(frozen=True)
class FillRequest:
    """What is to be on this node, by which right, for whom.

    ``begin`` is called once it is known what is missing; it returns who is told of the rest. Whoever sets ``stop`` cancels
    the task that runs the request as well.
    """

    manifests: Collection[Digest]
    grant: str
    holder: Holder
    traffic: TrafficClass
    begin: Callable[[Sequence[Held], frozenset[Digest], RetryBudget], FillWatch]


@dataclass(frozen=True)
class Provision:
    """Does it. What can fail raises ``BdnError`` and leaves ending the lease up to the caller."""

    catalogue: Catalogue
    cache: NodeCache
    fills: Fills
    filler: Filler
    chain: ReaderChain
    pools: Pools
    members: Members
    peers: Peers
    keep_slab: Callable[[Digest, Digest, memoryview], object]
    mirror_url: str
    on_bytes: Report  # for the metrics: every byte once, whoever waits for it

    async def run(self, request: FillRequest) -> list[Held]:
        """Obtain the manifests, make room for all of them, and fill what is missing. They are leased for the holder."""
        held = [await self._obtain(digest, request) for digest in request.manifests]
        missing = await self.cache.admit(held, request.holder)
        if missing and any(one.layout is None for one in held):
            # It was whole when we looked, and was evicted before we were admitted; now our lease protects it.
            held = [await self._obtain(digest, request) for digest in request.manifests]
            missing = await self.cache.admit(held, request.holder)
        ledger = self.cache.index.ledger
        budget = RetryBudget(sum(ledger.size_of(content) or 0 for content in missing), self.peers.avoided)
        watch = request.begin(held, missing, budget)
        if missing:
            async with blaming(self.cache.space):
                await _Fill(self, request, budget, watch).run(held, missing)
        return held

    async def _obtain(self, digest: Digest, request: FillRequest) -> Held:
        is_complete = self.cache.index.is_complete(digest)
        return await self.catalogue.obtain(digest, request.grant, is_complete=is_complete)


class _Fill:
    """The fills of one request."""

    def __init__(self, provision: Provision, request: FillRequest, budget: RetryBudget, watch: FillWatch) -> None:
        self._provision = provision
        self._request = request
        self._budget = budget
        self._watch = watch
        self._contexts: dict[Digest, FillContext] = {}

    async def run(self, held: Iterable[Held], missing: frozenset[Digest]) -> None:
        units = await self._units(held, missing)
        routings = [context.routing for context in self._contexts.values()]
        for routing in routings:
            await in_thread(routing.prepare)
        self._lanes = Lanes(self._provision.pools, max(routing.count for routing in routings))
        # Two queues: units that wait for peers must not keep those from being read that peers wait for.
        shared = [unit for unit in units if any(not self._is_own(unit, chunk) for chunk in unit.chunks)]
        others = frozenset(unit.digests for unit in shared)
        own = [unit for unit in units if unit.digests not in others]
        with single_error():
            async with asyncio.TaskGroup() as group:
                for queue, most in ((own, _UNITS_AT_ONCE), (shared, _SHARED_UNITS_AT_ONCE)):
                    waiting = iter(queue)
                    for _ in range(min(len(queue), most)):
                        group.create_task(self._fill_from(waiting))

    async def _units(self, held: Iterable[Held], missing: frozenset[Digest]) -> list[FillUnit]:
        """What is to be fetched, in the order of the ring. What several manifests name is fetched for the first one."""
        units: list[FillUnit] = []
        wanted = missing
        for one in held:
            if one.layout is None:
                continue
            digest = one.manifest.digest
            layouts = await in_thread(one.file_layouts, wanted)
            wanted -= layouts.keys()
            base_url = chunk_base(self._provision.mirror_url, one.layout.data_port)
            units += await in_thread(units_of, layouts.values(), digest, base_url)
            routing = Routing(one.layout, self._provision.members)
            self._contexts[digest] = FillContext(digest, self._request.grant, routing, self._budget, self._is_ending)
        return sorted(units, key=lambda unit: unit.size, reverse=True)

    def _is_ending(self) -> bool:
        return self._lanes.peers.is_ending

    def _is_own(self, unit: FillUnit, chunk: Digest) -> bool:
        return self._contexts[unit.manifest].routing.turn(chunk).is_own

    async def _fill_from(self, queue: Iterator[FillUnit]) -> None:
        """One of several that draw units from the same queue."""
        watch, fills = self._watch, self._provision.fills
        for unit in queue:

            def start(fill: Fill, unit: FillUnit = unit) -> Coroutine[object, object, None]:
                return self._fill_unit(unit.only(fill.files), fill)

            await fills.join(unit.digests, start, watch.report, watch.restart, self._request.traffic)
            for file in unit.files:
                watch.finish(file.digest, file.size)

    async def _fill_unit(self, unit: FillUnit, fill: Fill) -> None:
        provision = self._provision
        ledger = provision.cache.index.ledger  # another stage may have finished some between our admission and now
        files = tuple(file for file in unit.files if not ledger.is_committed(file.digest))
        if not files:
            return

        def report(file: Digest, tier: Tier, size: int) -> None:
            provision.on_bytes(tier, size)
            fill.report(file, tier, size)

        context = self._contexts[unit.manifest]
        order = FillOrder(
            files,
            provision.chain.of_fill(unit.base_url, context, fill.stop),
            partial(self._place, context.routing),
            partial(self._keep_slab, context),
            lambda: fill.traffic,
            report,
            fill.stop,
        )
        await provision.filler.fill(order)

    def _place(self, routing: Routing, chunk: Digest) -> Place:
        turn = routing.turn(chunk)
        return (self._lanes.own if turn.is_own else self._lanes.peers), (turn.position,)

    def _keep_slab(self, context: FillContext, slab: Digest, buffer: memoryview) -> None:
        """It was cut into files, of which nobody could make it again; its owner keeps it for its peers."""
        if context.routing.is_mine(slab):
            self._provision.keep_slab(context.manifest, slab, buffer)
