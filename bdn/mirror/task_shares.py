"""``Shares`` for the tasks of one event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bdn.core.pace.shares import Place, Shares


class TaskShares:
    """``count`` places that tasks hold, round robin over the owners that wait."""

    def __init__(self, count: int) -> None:
        self._shares = Shares(count)
        self._granted: dict[Place, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Hold a place for the block. A task canceled while it waits leaves no place held."""
        place = self._shares.request(owner)
        granted = self._granted[place] = asyncio.get_running_loop().create_future()
        self._grant()
        try:
            await granted
            yield
        finally:
            del self._granted[place]
            self._shares.release(place)
            self._grant()

    def _grant(self) -> None:
        for place in self._shares.grant():
            if not self._granted[place].done():  # canceled: its task releases the place once it runs
                self._granted[place].set_result(None)
