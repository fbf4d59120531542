"""What keeps database and store small: collections of what nobody needs any more, and the end of old events."""

from __future__ import annotations

from dataclasses import dataclass

from bdn.mirror.events import Events
from bdn.mirror.ground import Ground
from bdn.mirror.operations.collections import Collections
from bdn.mirror.retention.collector import Collector


@dataclass(frozen=True)
class Upkeep:
    """Carried out by a process that works; asked for and read in any."""

    collector: Collector
    collections: Collections
    events: Events


def upkeep_of(ground: Ground) -> Upkeep:
    """As the settings have it."""
    settings, database, clock = ground.settings, ground.database, ground.clock
    collector = Collector(database, ground.store, settings.tombstone_seconds, ground.suspects, clock)
    collections = Collections(
        database,
        collector,
        ground.watch,
        settings.collect_grace_seconds,
        settings.collect_seconds,
        ground.metrics.collected_bytes.inc,
        clock,
    )
    return Upkeep(collector, collections, Events(database, settings.events_seconds, clock))
