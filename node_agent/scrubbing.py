"""The scrub put together: what reads again, what mends, and who asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bdn.transfer.buffers import BufferPool
from node_agent.cache.node_cache import Clock
from node_agent.cache.quarantine import Quarantine
from node_agent.crew import Crew, in_thread
from node_agent.delivery import Delivery
from node_agent.ground import Ground
from node_agent.metrics import Metrics
from node_agent.scrub.demotion import Demotion
from node_agent.scrub.examination import Examination
from node_agent.scrub.findings import Telling
from node_agent.scrub.layouts import KnownLayouts
from node_agent.scrub.mending import Mending
from node_agent.scrub.reading import Reading
from node_agent.scrub.record import ScrubRecord
from node_agent.scrub.refill import Refill
from node_agent.scrub.relinking import Relinking
from node_agent.scrub.right_bytes import RightBytes
from node_agent.scrub.rights import Rights
from node_agent.scrub.rounds import Rounds, StagesFirst
from node_agent.scrub.scrubber import Scrubber
from node_agent.scrub.staged_files import StagedFiles
from node_agent.scrub.verifications import Verifications
from node_agent.settings import AgentSettings
from node_agent.stage.book import StageBook
from node_agent.view.views import Views

_BUFFERS: Final = 4  # of 8 MiB: one reads, one repairs and reads back, one is for whoever asks meanwhile


@dataclass(frozen=True)
class Scrub:
    """In the background and on request. ``stop`` is set before tasks are canceled: no thread shall wait for the network."""

    rounds: Rounds
    verifications: Verifications
    stop: threading.Event


async def open_scrub(
    crew: Crew,
    settings: AgentSettings,
    ground: Ground,
    delivery: Delivery,
    *,
    book: StageBook,
    views: Views,
    metrics: Metrics,
    clock: Clock,
    wake: Callable[[], object],
) -> Scrub:
    """Nothing is read yet; how far the last run was is known."""
    buffers, stop = BufferPool(_BUFFERS), threading.Event()
    quarantine, layouts = Quarantine(ground.places.quarantine), KnownLayouts(ground.manifests)
    record = ScrubRecord(ground.places.scrub, ground.suspects, clock())
    await in_thread(record.load)
    metrics.watch(
        "bdn_agent_scrub_round_ended",
        "When everything held had been read again the last time, in seconds since the epoch",
        lambda: record.round.ended or 0,
    )
    staged = StagedFiles(book, views, ground.manifests)
    rights = Rights(book, ground.trust, is_open=settings.auth == "off")
    scrubber = Scrubber(
        ground.places,
        ground.cache,
        ground.tier,
        layouts,
        Reading(Examination(buffers, quarantine), metrics),
        RightBytes(delivery.provision, ground.shelf, rights, buffers, stop),
        Mending(buffers),
        Demotion(ground.places, quarantine),
        Refill(delivery.provision, rights),
        Relinking(ground.places, staged),
        record,
        Telling(settings.cluster, settings.node, book, layouts),
        clock,
    )
    rounds = Rounds(scrubber, record, StagesFirst(book, settings.scrub_rate), settings.scrub_seconds, clock)
    verifications = Verifications(crew, scrubber, staged, wake)
    return Scrub(rounds, verifications, stop)
