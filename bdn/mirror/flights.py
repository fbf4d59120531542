"""One piece of work at a time per key, whoever asks: others wait for its result.

When the leader fails or is canceled, its failure is its own; a waiter takes over and tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class Flights(Generic[_Result]):
    """Work in progress by key. A result stays until ``forget``: the caller says when others can find it elsewhere."""

    def __init__(self) -> None:
        self._flights: dict[str, asyncio.Future[_Result]] = {}

    async def run(self, key: str, work: Callable[[], Awaitable[_Result]]) -> tuple[_Result, bool]:
        """The result, and whether this call did the work itself."""
        while (flight := self._flights.get(key)) is not None:
            await asyncio.wait([flight])
            if not flight.cancelled():
                return flight.result(), False
        # A looks and sees nothing; B looks and sees nothing; but between the look above and the entry below there is no
        # await, so one of them enters first and the other sees it.
        flight = asyncio.get_running_loop().create_future()
        self._flights[key] = flight
        try:
            result = await work()
        except BaseException:
            flight.cancel()
            del self._flights[key]
            raise
        flight.set_result(result)
        return result, True

    def forget(self, key: str) -> None:
        """The result can be found elsewhere now."""
        self._flights.pop(key, None)
