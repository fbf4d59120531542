"""What a mirror does in the background: it mirrors, keeps the store sound, and collects."""

from __future__ import annotations

from contextlib import AsyncExitStack, closing
from typing import Final

from bdn.core.pace.streaming import StallPolicy
from bdn.core.store.layout import FileLayout
from bdn.mirror.ground import Ground
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.ingest.flights import Flights
from bdn.mirror.ingest.ingest import Ingest
from bdn.mirror.ingest.packer import Packer
from bdn.mirror.ingest.worker import Worker
from bdn.mirror.scrub.from_agents import AgentSource
from bdn.mirror.scrub.from_upstream import UpstreamSource
from bdn.mirror.scrub.reading import StoreReading
from bdn.mirror.scrub.record_mending import RecordMending
from bdn.mirror.scrub.record_sources import AgentRecords, UpstreamRecords
from bdn.mirror.scrub.repair import Repair
from bdn.mirror.scrub.rounds import Keeper
from bdn.mirror.scrub.store_verification import StoreVerification
from bdn.mirror.upkeep import Upkeep
from bdn.mirror.upstreams import Upstreams
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.pacing import Pacer
from bdn.transfer.ranged import RangedReader

_UPSTREAM_TIMEOUT_SECONDS: Final = 60.0
_AGENT_TIMEOUT_SECONDS: Final = 10.0


async def open_work(
    stack: AsyncExitStack, ground: Ground, upstreams: Upstreams, upkeep: Upkeep, stall: StallPolicy
) -> None:
    """Until the stack ends. ``stall`` says when a body of an upstream comes too slowly."""
    settings = ground.settings
    await stack.enter_async_context(upkeep.events.expiring())
    await stack.enter_async_context(upkeep.collections.running())
    connections = stack.enter_context(
        closing(ConnectionPool(timeout_seconds=_UPSTREAM_TIMEOUT_SECONDS, egress=settings.egress))
    )
    threads = stack.enter_context(closing(ByteThreads(settings.transfers, "copy")))
    ingest = _ingest(ground, upstreams, RangedReader(connections, stall=stall), threads)
    to_agents = stack.enter_context(closing(ConnectionPool(timeout_seconds=_AGENT_TIMEOUT_SECONDS)))
    await stack.enter_async_context(_keeper(ground, ingest, to_agents).running())
    worker = Worker(ground.database, ingest, ground.watch, settings.jobs, ground.metrics.transferred_bytes.inc)
    await stack.enter_async_context(worker.running())
    stack.callback(connections.close)  # first at the end: a worker's last look is not at a silent upstream


def _ingest(ground: Ground, upstreams: Upstreams, ranges: RangedReader, threads: ByteThreads) -> Ingest:
    """From upstream to store."""
    surveyor, patience, damages = upstreams.surveyor, upstreams.patience, ground.damages
    copier = Copier(ground.store, ranges, threads, patience.budgets)
    packer = Packer(ground.store, ranges, threads, patience.budgets)
    return Ingest(ground.database, surveyor, copier, packer, Flights[FileLayout](), patience, damages)


def _keeper(ground: Ground, ingest: Ingest, to_agents: ConnectionPool) -> Keeper:
    """What reads the store again, and agents and upstreams that have what is wrong in it."""
    settings, metrics, clock = ground.settings, ground.metrics, ground.clock
    database, damages, suspects, signer = ground.database, ground.damages, ground.suspects, ground.signer
    copier = ingest.copier
    upstream = UpstreamSource(database, ingest.surveyor, copier.ranges, copier.threads, ingest.patience, copier.budgets)
    repair = Repair(database, damages, (AgentSource(database, to_agents, signer, clock), upstream), clock)
    tellers = (AgentRecords(database, signer, clock), UpstreamRecords(database, upstream, copier))
    mending = RecordMending(database, damages, suspects, tellers, clock, metrics.repaired_records.inc)
    reading = StoreReading(database, damages, Pacer(settings.scrub_rate), metrics.scrubbed_bytes.inc)
    verification = StoreVerification(database, reading, repair, mending, ground.watch)
    return Keeper(database, reading, repair, mending, verification, ground.watch, settings.scrub_seconds, clock)
