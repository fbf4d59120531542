"""An event loop on a thread of its own, for programs that block."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from threading import Event, Thread
from typing import Any, TypeVar

from bdn.net.host_lookups import ServiceLoop

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines for other threads, inside a context, until ``close``. The end of a program does not wait for it."""

    def __init__(self, context: AbstractAsyncContextManager[object]) -> None:
        self._context = context
        self._runs = Event()
        self._thread = Thread(target=self._serve, name="bdn client", daemon=True)
        self._thread.start()
        self._runs.wait()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Block until the coroutine has ended. An interrupt cancels it first; a second one leaves it to its thread."""
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("the client is closed")
        tasks: list[asyncio.Task[Any] | None] = []
        ended = Event()

        async def to_its_end() -> _Result:
            tasks.append(asyncio.current_task())
            try:
                return await coroutine
            finally:
                ended.set()

        def cancel() -> None:
            if not tasks:  # it is about to start
                self._loop.call_soon(cancel)
            elif tasks[0] is not None:
                tasks[0].cancel()

        future = asyncio.run_coroutine_threadsafe(to_its_end(), self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                self._loop.call_soon_threadsafe(cancel)
                ended.wait()
            raise

    @contextmanager
    def inside(self, context: AbstractAsyncContextManager[_Result]) -> Iterator[_Result]:
        """``async with`` for a block of this thread. The context is left, too, if an interrupt lost its value."""
        stack = AsyncExitStack()
        try:
            yield self.run(stack.enter_async_context(context))
        except BaseException as error:
            self.run(stack.__aexit__(type(error), error, error.__traceback__))
            raise
        self.run(stack.aclose())

    def close(self) -> None:
        """End the thread, and what it runs. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=ServiceLoop) as runner:
            runner.run(self._wait())

    async def _wait(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._context:
            self._runs.set()
            await self._stop.wait()
