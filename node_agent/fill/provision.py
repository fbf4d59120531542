"""Manifests come onto this node: known, admitted, filled. For a stage, or for nobody yet. Read ``run`` first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from bdn.core.cache.leases import Holder
from bdn.core.digest import Digest
from bdn.core.groups import single_error
from bdn.core.pace.rate_limit import TrafficClass
from bdn.wire.eviction_schema import Tier
from node_agent.background_tasks import in_thread
from node_agent.cache.catalogue import Catalogue
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.records import Held
from node_agent.cache.space import blaming
from node_agent.fetch.chain import Supplier
from node_agent.fetch.members import Members
from node_agent.fetch.peers import Peers
from node_agent.fetch.retry_budget import Effort
from node_agent.fetch.ring_reader import Bearings
from node_agent.fetch.routing import Routing
from node_agent.fetch.supply import chunk_base
from node_agent.fill.fill_unit import Parcel, parcels_of
from node_agent.fill.filler import Filler
from node_agent.fill.flights import Flights, Trip
from node_agent.fill.lanes import Lanes, Place, Pools
from node_agent.fill.order import Order, Report

_PARCELS_AT_ONCE: Final = 16  # per stage and kind; the byte threads are the real limit
_SHARED_PARCELS_AT_ONCE: Final = 32  # of two chunks, these are enough to keep the threads busy with either lane


class Watch(Protocol):
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
class Errand:
    """What is to be on this node, by which right, for whom.

    ``begin`` is called once it is known what is missing; it returns who is told of the rest. Whoever sets ``stop`` cancels
    the task that runs the errand as well.
    """

    manifests: Collection[Digest]
    grant: str
    holder: Holder
    traffic: TrafficClass
    begin: Callable[[Sequence[Held], frozenset[Digest], Effort], Watch]


@dataclass(frozen=True)
class Provision:
    """Does it. What can fail raises ``BdnError`` and leaves ending the lease up to the caller."""

    catalogue: Catalogue
    cache: NodeCache
    flights: Flights
    filler: Filler
    supplier: Supplier
    pools: Pools
    members: Members
    peers: Peers
    keep_slab: Callable[[Digest, Digest, memoryview], object]
    mirror_url: str
    on_bytes: Report  # for the metrics: every byte once, whoever waits for it

    async def run(self, errand: Errand) -> list[Held]:
        """Obtain the manifests, make room for all of them, and fill what is missing. They are leased for the holder."""
        held = [await self._obtain(digest, errand) for digest in errand.manifests]
        missing = await self.cache.admit(held, errand.holder)
        if missing and any(one.layout is None for one in held):
            # It was whole when we looked, and was evicted before we were admitted; now our lease protects it.
            held = [await self._obtain(digest, errand) for digest in errand.manifests]
            missing = await self.cache.admit(held, errand.holder)
        ledger = self.cache.index.ledger
        effort = Effort(sum(ledger.size_of(content) or 0 for content in missing), self.peers.avoided)
        watch = errand.begin(held, missing, effort)
        if missing:
            async with blaming(self.cache.space):
                await _Fill(self, errand, effort, watch).run(held, missing)
        return held

    async def _obtain(self, digest: Digest, errand: Errand) -> Held:
        is_complete = self.cache.index.is_complete(digest)
        return await self.catalogue.obtain(digest, errand.grant, is_complete=is_complete)


class _Fill:
    """The fills of one errand."""

    def __init__(self, provision: Provision, errand: Errand, effort: Effort, watch: Watch) -> None:
        self._provision = provision
        self._errand = errand
        self._effort = effort
        self._watch = watch
        self._bearings: dict[Digest, Bearings] = {}

    async def run(self, held: Iterable[Held], missing: frozenset[Digest]) -> None:
        parcels = await self._parcels(held, missing)
        routings = [bearings.routing for bearings in self._bearings.values()]
        for routing in routings:
            await in_thread(routing.prepare)
        self._lanes = Lanes(self._provision.pools, max(routing.count for routing in routings))
        # Two queues: parcels that wait for peers must not keep those from being read that peers wait for.
        shared = [parcel for parcel in parcels if any(not self._is_own(parcel, chunk) for chunk in parcel.chunks)]
        others = frozenset(parcel.digests for parcel in shared)
        own = [parcel for parcel in parcels if parcel.digests not in others]
        with single_error():
            async with asyncio.TaskGroup() as group:
                for queue, most in ((own, _PARCELS_AT_ONCE), (shared, _SHARED_PARCELS_AT_ONCE)):
                    waiting = iter(queue)
                    for _ in range(min(len(queue), most)):
                        group.create_task(self._fill_from(waiting))

    async def _parcels(self, held: Iterable[Held], missing: frozenset[Digest]) -> list[Parcel]:
        """What is to be fetched, in the order of the ring. What several manifests name is fetched for the first one."""
        parcels: list[Parcel] = []
        wanted = missing
        for one in held:
            if one.layout is None:
                continue
            digest = one.manifest.digest
            layouts = await in_thread(one.file_layouts, wanted)
            wanted -= layouts.keys()
            base_url = chunk_base(self._provision.mirror_url, one.layout.data_port)
            parcels += await in_thread(parcels_of, layouts.values(), digest, base_url)
            routing = Routing(one.layout, self._provision.members)
            self._bearings[digest] = Bearings(digest, self._errand.grant, routing, self._effort, self._is_ending)
        return sorted(parcels, key=lambda parcel: parcel.size, reverse=True)

    def _is_ending(self) -> bool:
        return self._lanes.peers.is_ending

    def _is_own(self, parcel: Parcel, chunk: Digest) -> bool:
        return self._bearings[parcel.manifest].routing.turn(chunk).is_own

    async def _fill_from(self, queue: Iterator[Parcel]) -> None:
        """One of several that draw parcels from the same queue."""
        watch, flights = self._watch, self._provision.flights
        for parcel in queue:

            def start(trip: Trip, parcel: Parcel = parcel) -> Coroutine[object, object, None]:
                return self._fill_parcel(parcel.only(trip.flights), trip)

            await flights.join(parcel.digests, start, watch.report, watch.restart, self._errand.traffic)
            for file in parcel.files:
                watch.finish(file.digest, file.size)

    async def _fill_parcel(self, parcel: Parcel, trip: Trip) -> None:
        provision = self._provision
        ledger = provision.cache.index.ledger  # another stage may have finished some between our admission and now
        files = tuple(file for file in parcel.files if not ledger.is_committed(file.digest))
        if not files:
            return

        def report(file: Digest, tier: Tier, size: int) -> None:
            provision.on_bytes(tier, size)
            trip.report(file, tier, size)

        bearings = self._bearings[parcel.manifest]
        order = Order(
            files,
            provision.supplier.open(parcel.base_url, bearings, trip.stop),
            partial(self._place, bearings.routing),
            partial(self._keep_slab, bearings),
            lambda: trip.traffic,
            report,
            trip.stop,
        )
        await provision.filler.fill(order)

    def _place(self, routing: Routing, chunk: Digest) -> Place:
        turn = routing.turn(chunk)
        return (self._lanes.own if turn.is_own else self._lanes.peers), (turn.position,)

    def _keep_slab(self, bearings: Bearings, slab: Digest, buffer: memoryview) -> None:
        """It was cut into files, of which nobody could make it again; its owner keeps it for its peers."""
        if bearings.routing.is_mine(slab):
            self._provision.keep_slab(bearings.manifest, slab, buffer)
