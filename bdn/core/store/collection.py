"""What is collected out of a mirror's store, and what is old enough for it while others copy and read."""

from __future__ import annotations

from typing import Final, Literal

# manifests that everybody gave up, with what only they name · complete files that no manifest names · chunks of files that
# nobody went on with · files that came wrong · chunks that no row names · what was left half-written
Kind = Literal["manifests", "contents", "half_copied", "evidence", "chunks", "incoming"]
KINDS: Final[tuple[Kind, ...]] = ("manifests", "contents", "half_copied", "evidence", "chunks", "incoming")

TOMBSTONE_SECONDS: Final = 7 * 86400
GRACE_SECONDS: Final = 86400
EVIDENCE_SECONDS: Final = 30 * 86400
CLOCKS_SECONDS: Final = 60.0  # by which the clocks of workers may differ


def collectable_before(now: float, grace_seconds: float, oldest_at_work: float | None) -> float:
    """Only what was put, kept or recorded before this may be collected.

    A copy puts or keeps every chunk that it counts on, and nothing says so until its rows are written. So whatever happened
    since the oldest mirror that is being worked on began is left alone, however long it takes.
    """
    latest = now - grace_seconds
    return latest if oldest_at_work is None else min(latest, oldest_at_work - CLOCKS_SECONDS)
