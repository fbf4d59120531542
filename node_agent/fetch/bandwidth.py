"""Schedules this node's network reads: stages first, background work with the remaining bandwidth."""

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
    """Turns to read a chunk over the network. Callers wait on the loop, so that no byte thread is blocked.

    Rates are in bytes per second; None is unlimited. Retries of a chunk are not counted again. Created and used on one
    loop.
    """

    def __init__(self, download_rate: int | None, prefetch_rate: int | None) -> None:
        self._precedence = _Precedence()
        self._download = _Limit(download_rate)
        self._prefetch = _Limit(prefetch_rate)

    @asynccontextmanager
    async def turn(self, traffic: TrafficClass, size: int) -> AsyncIterator[None]:
        """Acquire a turn to read ``size`` bytes, at most a chunk; released at the end of the block."""
        async with self._precedence.held(traffic):
            if traffic is TrafficClass.PREFETCH:
                await self._prefetch.wait(traffic, size)
            await self._download.wait(traffic, size)
            yield


class _Precedence:
    """While stages read, other traffic reads one chunk at a time. Works without knowing the network's rate."""

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
    """A rate limit on the loop. Each waiting task wakes up for the next turn, and grants it to the task that is due."""

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
    """``limit`` places on one loop, granted to the lowest position first, unlike ``asyncio.Semaphore``.

    The limit may be changed. A higher limit takes effect at the next release.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        self._queue: list[tuple[Position, int, asyncio.Future[None]]] = []
        self._number = count()

    @property
    def is_last(self) -> bool:
        return not self._queue

    @asynccontextmanager
    async def place(self, position: Position) -> AsyncIterator[None]:
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
            if not mine.cancelled():  # granted a place just when canceled: pass it on
                self._release()
            raise

    def _release(self) -> None:
        self._held -= 1
        while self._queue and self._held < self.limit:
            _, _, next_one = heapq.heappop(self._queue)
            if not next_one.done():
                self._held += 1
                next_one.set_result(None)
