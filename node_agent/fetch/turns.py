"""A limit on what happens at once, whose places go to the lowest position first."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

Position = tuple[int, ...]


class Turns:
    """``limit`` at once, on one loop. An ``asyncio.Semaphore`` would serve whoever came first.

    The limit may be changed; a higher one counts from the next end of a turn.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        self._waiting: list[tuple[Position, int, asyncio.Future[None]]] = []
        self._number = count()

    @property
    def is_last(self) -> bool:
        """Whether nobody waits for a place. Any thread may ask."""
        return not self._waiting

    @asynccontextmanager
    async def take(self, position: Position) -> AsyncIterator[None]:
        """Hold one place until the block ends."""
        await self._acquire(position)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, position: Position) -> None:
        if self._held < self.limit:
            self._held += 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (position, next(self._number), mine))
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was our turn just when we were canceled: somebody else's, then
                self._release()
            raise

    def _release(self) -> None:
        self._held -= 1
        while self._waiting and self._held < self.limit:
            _, _, next_one = heapq.heappop(self._waiting)
            if not next_one.done():
                self._held += 1
                next_one.set_result(None)
