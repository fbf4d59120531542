"""The threads that move bytes: a bounded number, each with a buffer of its own while it works."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bdn.core.pace import Outcome, Pace, PaceRule
from bdn.transfer.buffers import BufferPool

_Result = TypeVar("_Result")


class ByteThreads:
    """At most ``count`` threads and as many buffers. Everybody who shares them waits in one fair queue.

    With ``least``, how many of them work at once follows what they achieve, up and down and never below that. The memory
    of the others goes back. Without it all of them work, because somebody else decides how many requests pay off.
    """

    def __init__(
        self, count: int, name: str, *, least: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = count
        self._buffers = BufferPool(count)
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        least = count if least is None else min(least, count)
        self._pace = Pace(PaceRule(count, least=least), clock())
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """How many may work at once now."""
        return self._pace.limit

    @property
    def buffers(self) -> int:
        """How many buffers there are now, of 8 MiB each."""
        return self._buffers.made

    async def run(
        self, size: int, work: Callable[[memoryview], _Result], on_cancel: Callable[[], None] | None = None
    ) -> _Result:
        """``work`` on a buffer of ``size`` bytes, in a thread.

        Cancelling waits for the thread: a thread that is left behind would still write where its caller has cleaned up.
        ``on_cancel`` may tell it to hurry.
        """
        await self._take_slot()
        outcome, begun = Outcome.ANSWERED, self._clock()
        self._pace.began(begun)
        try:
            result = await self._work(size, work, on_cancel)
            outcome = Outcome.ARRIVED
            return result
        finally:
            self._give_slot_back(outcome, size, begun)

    async def _work(
        self, size: int, work: Callable[[memoryview], _Result], on_cancel: Callable[[], None] | None
    ) -> _Result:
        future = self._executor.submit(self._with_buffer, size, work)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if on_cancel is not None:
                on_cancel()
            if not future.cancel():
                await _ended(waiter)
            raise

    def _with_buffer(self, size: int, work: Callable[[memoryview], _Result]) -> _Result:
        with self._buffers.take(size) as buffer:
            return work(buffer)

    async def _take_slot(self) -> None:
        if not self._waiting and not self._pace.is_full:
            self._pace.take()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn  # whoever calls us has taken the slot for us
        except asyncio.CancelledError:
            if not turn.cancelled():  # we were called, and canceled before we heard it
                self._pace.give_back()
                self._call()
            raise

    def _give_slot_back(self, outcome: Outcome, size: int, begun: float) -> None:
        now, before = self._clock(), self._pace.limit
        self._pace.give_back()
        self._pace.ended(now, outcome, size, now - begun)
        if self._pace.limit != before:
            self._buffers.keep(self._pace.limit)
        self._call()

    def _call(self) -> None:
        while self._waiting and not self._pace.is_full:
            turn = self._waiting.popleft()
            if not turn.done():
                self._pace.take()
                turn.set_result(None)

    def close(self) -> None:
        """Wait for the threads to end."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _ended(waiter: asyncio.Future[_Result]) -> None:
    """Wait for the thread whatever happens: being cancelled once more, as by a second Ctrl-C, does not end it sooner."""
    while not waiter.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.exception()  # it is lost with the cancellation, and known to be
