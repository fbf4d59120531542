"""Which stages that have ended are forgotten: those of long ago, and the oldest of too many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KEPT_SECONDS: Final = 7 * 86400.0  # so that an eviction by job can find what they used
KEPT: Final = 10_000  # each takes 1 KiB of memory and a file; a node of short jobs ends thousands in an hour


def to_forget(ended_at: Mapping[str, float], now: float) -> list[str]:
    """Of stages by id, with the seconds since the epoch when each ended: those to forget, the oldest first."""
    by_age = sorted(ended_at, key=lambda stage: (ended_at[stage], stage))
    surplus = max(0, len(by_age) - KEPT)
    return by_age[:surplus] + [stage for stage in by_age[surplus:] if ended_at[stage] < now - KEPT_SECONDS]
