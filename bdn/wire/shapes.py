"""What documents share: dates, amounts, lists, requests, and operations that are recorded."""

from datetime import UTC, datetime
from typing import Annotated, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from bdn.core.errors import InvalidRequestError

LARGEST: Final = 2**63 - 1

_Item = TypeVar("_Item")
_FIRST: Final = datetime.min.replace(tzinfo=UTC).timestamp()
_LAST: Final = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()


def moment(seconds: float) -> datetime:
    """A stored time as it stands in documents. Of a clock that is far off it is the first or the last that a date can say."""
    return datetime.fromtimestamp(min(max(seconds, _FIRST), _LAST), UTC)


Quantity = Annotated[int, Field(ge=0, le=LARGEST)]


def added(one: int, other: int) -> int:
    """Their sum; the largest quantity where it would be more."""
    return min(one + other, LARGEST)


class Items(BaseModel, Generic[_Item]):
    """All of something."""

    items: list[_Item]


class Page(BaseModel, Generic[_Item]):
    """Some of something, newest first. ``next_cursor`` is null on the last page."""

    items: list[_Item]
    next_cursor: str | None = None


class StrictModel(BaseModel):
    """A request in which an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid")

    def check_one_of(self, *names: str) -> None:
        """Refuse a selector that says nothing or several things."""
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            choices = f"{', '.join(names[:-1])} and {names[-1]}"
            raise InvalidRequestError(f"select by exactly one of {choices}, not by {given or 'nothing'}")


class OperationModel(BaseModel):
    """What is recorded of an operation of any kind."""

    id: str
    status: str
    created_at: datetime
    completed_at: datetime | None = None
