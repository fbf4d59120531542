"""The scrub put together: what reads again, what mends, and who asks for it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from bdn.transfer.buffers import BufferPool
from node_agent.background_tasks import in_thread
from node_agent.cache.quarantine import Quarantine
from node_agent.delivery import Delivery
from node_agent.ground import Ground
from node_agent.jobs import Jobs
from node_agent.mirror_link.verifications import Verifications
from node_agent.scrub.findings import KnownLayouts, Telling
from node_agent.scrub.reading import Examination, Reading
from node_agent.scrub.record import ScrubRecord
from node_agent.scrub.repair import Demotion, Mending, Relinking
from node_agent.scrub.right_bytes import Refill, RightBytes, Rights
from node_agent.scrub.rounds import Rounds, StagesFirst
from node_agent.scrub.scrubber import Scrubber
from node_agent.scrub.staged_files import StagedFiles

_BUFFERS: Final = 4  # of 8 MiB: one reads, one repairs and reads back, one is for whoever asks meanwhile


@dataclass(frozen=True)
class Scrub:
    """In the background and on request. ``stop`` is set before tasks are canceled: no thread shall wait for the network."""

    rounds: Rounds
    verifications: Verifications
    stop: threading.Event


async def open_scrub(ground: Ground, delivery: Delivery, jobs: Jobs) -> Scrub:
    """Nothing is read yet; how far the last run was is known."""
    settings, metrics, book, clock = ground.settings, ground.metrics, ground.book, ground.clock
    buffers, stop = BufferPool(_BUFFERS), threading.Event()
    quarantine, layouts = Quarantine(ground.disk.places.quarantine), KnownLayouts(ground.manifests)
    record = ScrubRecord(ground.disk.places.scrub, ground.suspects, clock())
    await in_thread(record.load)
    metrics.watch(
        "bdn_agent_scrub_round_ended",
        "When everything held had been read again the last time, in seconds since the epoch",
        lambda: record.round.ended or 0,
    )
    staged = StagedFiles(book, jobs.views, ground.manifests)
    rights = Rights(book, ground.trust, is_open=settings.auth == "off")
    scrubber = Scrubber(
        ground.disk.places,
        ground.cache,
        ground.tier,
        layouts,
        Reading(Examination(buffers, quarantine), metrics),
        RightBytes(delivery.provision, ground.shelf, rights, buffers, stop),
        Mending(buffers),
        Demotion(ground.disk.places, quarantine),
        Refill(delivery.provision, rights),
        Relinking(ground.disk.places, staged),
        record,
        Telling(settings.cluster, settings.node, book, layouts),
        clock,
    )
    rounds = Rounds(scrubber, record, StagesFirst(book, settings.scrub_rate), settings.scrub_seconds, clock)
    verifications = Verifications(jobs.background, scrubber, staged, ground.news.wake)
    return Scrub(rounds, verifications, stop)
