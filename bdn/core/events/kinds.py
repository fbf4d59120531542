"""Every kind of decision, by its name on the wire and in journals."""

from __future__ import annotations

from typing import Final

from bdn.core.events import caches, mirrors, stages
from bdn.core.events.decision import Decision

KINDS: Final[dict[str, type[Decision]]] = {
    one.kind: one
    for one in (
        stages.Admitted,
        stages.Refused,
        stages.Arrived,
        stages.Failed,
        stages.NotMended,
        stages.Renewed,
        stages.Ended,
        stages.Resumed,
        caches.MadeRoom,
        caches.Trimmed,
        caches.EvictedOnRequest,
        caches.EvictionRefused,
        caches.Kept,
        caches.Dropped,
        caches.Found,
        caches.Damaged,
        caches.Repaired,
        caches.Lost,
        mirrors.Mirrored,
        mirrors.Reused,
        mirrors.Tombstoned,
        mirrors.Restored,
        mirrors.Collected,
    )
}
