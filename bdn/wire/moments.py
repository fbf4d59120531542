"""Times: seconds since the epoch inside, dates in documents."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(seconds: float) -> datetime:
    """A stored time as it stands in documents."""
    return datetime.fromtimestamp(seconds, UTC)
