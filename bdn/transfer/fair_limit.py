"""A limit on the event loop whose places go round robin over organisations."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bdn.core.pace.shares import Place, Shares


class FairLimit:
    """``count`` places, granted round robin over organisations. Created and used on one loop."""

    def __init__(self, count: int) -> None:
        self._shares = Shares(count)
        self._waiting: dict[Place, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        place = self._shares.request(owner)
        granted = self._waiting[place] = asyncio.get_running_loop().create_future()
        self._grant()
        try:
            await granted
            yield
        finally:  # also if a place was granted just when its task was canceled
            self._waiting.pop(place, None)
            self._shares.release(place)
            self._grant()

    def _grant(self) -> None:
        for place in self._shares.grant():
            granted = self._waiting.pop(place)
            if not granted.done():
                granted.set_result(None)
