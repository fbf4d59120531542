"""Times: seconds since the epoch inside, dates in documents."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_FIRST: Final = datetime.min.replace(tzinfo=UTC).timestamp()
_LAST: Final = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()


def moment(seconds: float) -> datetime:
    """A stored time as it stands in documents. Of a clock that is far off it is the first or the last that a date can say."""
    return datetime.fromtimestamp(min(max(seconds, _FIRST), _LAST), UTC)
