"""The threads that move bytes: a bounded number, each with a buffer of its own while it works."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bdn.transfer.buffers import BufferPool

_Result = TypeVar("_Result")


class ByteThreads:
    """``count`` threads and as many buffers. Everybody who shares them waits in one fair queue."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._buffers = BufferPool(count)
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._slots = asyncio.Semaphore(count)

    async def run(
        self, size: int, work: Callable[[memoryview], _Result], on_cancel: Callable[[], None] | None = None
    ) -> _Result:
        """``work`` on a buffer of ``size`` bytes, in a thread.

        Cancelling waits for the thread: a thread that is left behind would still write where its caller has cleaned up.
        ``on_cancel`` may tell it to hurry.
        """
        async with self._slots:
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
