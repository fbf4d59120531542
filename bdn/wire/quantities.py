"""Times and amounts in documents: a date that exists, an amount that a database column holds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

from pydantic import Field

LARGEST: Final = 2**63 - 1

_FIRST: Final = datetime.min.replace(tzinfo=UTC).timestamp()
_LAST: Final = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()


def moment(seconds: float) -> datetime:
    """A stored time as it stands in documents. Of a clock that is far off it is the first or the last that a date can say."""
    return datetime.fromtimestamp(min(max(seconds, _FIRST), _LAST), UTC)


Quantity = Annotated[int, Field(ge=0, le=LARGEST)]


def added(one: int, other: int) -> int:
    """Their sum; the largest quantity where it would be more."""
    return min(one + other, LARGEST)
