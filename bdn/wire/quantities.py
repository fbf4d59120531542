"""How much of something there is, as others say it: never less than nothing, and no more than a column holds."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

LARGEST: Final = 2**63 - 1
Quantity = Annotated[int, Field(ge=0, le=LARGEST)]


def added(one: int, other: int) -> int:
    """Their sum; the largest quantity where it would be more."""
    return min(one + other, LARGEST)
