"""Schedules this node's network reads: stages first, background work with the remaining bandwidth."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.pace.rate_limit import ONE_IN, TokenBucket, TrafficClass

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
    """A rate limit on the loop, shared by classes: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

    One chunk waits for tokens at a time. The next chunk is the one with the lowest start, in virtual time: a chunk of a
    class begins where the class's chunk before it ends, and takes 20 times as long as in the class above. So background
    work on a busy node gets its share, and a stage waits for about one chunk that was requested before it.
    """

    def __init__(self, rate: int | None) -> None:
        self._bucket = rate and TokenBucket(rate, max(CHUNK_SIZE, int(rate * _BURST_SECONDS)), _now())
        self._turns = OrderedLimit(1)
        self._time = 0  # the start of the last chunk
        self._ends = dict.fromkeys(TrafficClass, 0)

    async def wait(self, traffic: TrafficClass, size: int) -> None:
        if not self._bucket:
            return
        start = max(self._time, self._ends[traffic])
        self._ends[traffic] = start + size * ONE_IN**traffic
        async with self._turns.place((start,)):
            self._time = start
            await asyncio.sleep(self._bucket.seconds_until(size, _now()))
            self._bucket.reserve(size, _now())


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
