"""Whose bytes come next over this node's network: stages first, and background work with what they leave."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.pace.rate_limit import RateLimit, TrafficClass

_BURST_SECONDS: Final = 0.25
Position = tuple[int, ...]


class Bandwidth:
    """Turns to read a chunk over the network. Waited for on the loop: a byte thread that waited would keep others from it.

    Rates are in bytes per second; None is no limit. Retries of a chunk are not counted again. Made and used on one loop.
    """

    def __init__(self, download_rate: int | None, prefetch_rate: int | None) -> None:
        self._precedence = _Precedence()
        self._download = _Limit(download_rate)
        self._prefetch = _Limit(prefetch_rate)

    @asynccontextmanager
    async def turn(self, traffic: TrafficClass, size: int) -> AsyncIterator[None]:
        """Hold it while ``size`` bytes, at most a chunk, are being read."""
        async with self._precedence.held(traffic):
            if traffic is TrafficClass.PREFETCH:
                await self._prefetch.wait(traffic, size)
            await self._download.wait(traffic, size)
            yield


class _Precedence:
    """While stages read, the rest reads one chunk at a time: whatever the network's rate is, which nobody told us."""

    def __init__(self) -> None:
        self._stages = 0
        self._others = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def held(self, traffic: TrafficClass) -> AsyncIterator[None]:
        if traffic is TrafficClass.STAGE:
            self._stages += 1
            try:
                yield
            finally:
                self._stages -= 1
                self._wake()
            return
        while self._stages and self._others:
            await self._changed.wait()
        self._others += 1
        try:
            yield
        finally:
            self._others -= 1
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _Limit:
    """A rate limit on the loop. Everybody who waits wakes up for the next turn, and grants it to whomever it belongs."""

    def __init__(self, rate: int | None) -> None:
        self._limit = rate and RateLimit(rate, max(CHUNK_SIZE, int(rate * _BURST_SECONDS)), _now())

    async def wait(self, traffic: TrafficClass, size: int) -> None:
        if not self._limit:
            return
        turn = self._limit.ask(traffic, size)
        try:
            self._limit.grant(_now())
            while not turn.is_granted:
                await asyncio.sleep(self._limit.seconds_until_next(_now()) or 0.0)
                self._limit.grant(_now())
        finally:
            self._limit.withdraw(turn)


def _now() -> float:
    return asyncio.get_running_loop().time()


class OrderedLimit:
    """``limit`` places, on one loop, which go to the lowest position first.

    An ``asyncio.Semaphore`` would serve whoever came first. The limit may be changed; a higher one counts from the next time
    that somebody gives a place back.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        self._queue: list[tuple[Position, int, asyncio.Future[None]]] = []
        self._number = count()

    @property
    def is_last(self) -> bool:
        """Whether nobody waits for a place. Any thread may ask."""
        return not self._queue

    @asynccontextmanager
    async def place(self, position: Position) -> AsyncIterator[None]:
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
        heapq.heappush(self._queue, (position, next(self._number), mine))
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # we were given a place just when we were canceled: it is somebody else's
                self._release()
            raise

    def _release(self) -> None:
        self._held -= 1
        while self._queue and self._held < self.limit:
            _, _, next_one = heapq.heappop(self._queue)
            if not next_one.done():
                self._held += 1
                next_one.set_result(None)
