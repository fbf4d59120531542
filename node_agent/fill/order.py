"""What a fill is asked for: which files, where their chunks come from, whom to tell, and how to make it stop trying."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.pace.rate_limit import TrafficClass
from bdn.core.store.layout import FileLayout
from bdn.wire.eviction_schema import Tier
from node_agent.fetch.supply import Supply
from node_agent.fill.lanes import PlaceOf

Report = Callable[[Tier, int], None]  # bytes that are here now, and the tier that they came from
FileReport = Callable[[Digest, Tier, int], None]  # and of which file they are
KeepSlab = Callable[[Digest, memoryview], None]  # a slab that was cut into files; called from a byte thread


@dataclass(frozen=True)
class Order:
    """Files to fill: one with chunks of its own, or several that lie in one slab.

    ``traffic`` is asked for each chunk, because a stage may join what a prefetch began.
    """

    files: tuple[FileLayout, ...]
    supply: Supply
    place: PlaceOf
    keep_slab: KeepSlab
    traffic: Callable[[], TrafficClass]
    report: FileReport
    stop: threading.Event
