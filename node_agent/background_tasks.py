"""Background tasks with an owner, whose context cancels and awaits them."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from bdn.core.cache.index import Steps
from bdn.core.errors import single_error

_Result = TypeVar("_Result")


class BackgroundTasks:
    """A ``TaskGroup`` whose tasks last as long as the context: leaving it cancels running tasks and awaits them.

    Tasks handle their own failures. A task that raises is a bug: it ends the context, as in any ``TaskGroup``.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        # A TaskGroup would wrap an error of the context's body in a group; the caller expects the bare error.
        is_canceled = kind is not None and issubclass(kind, asyncio.CancelledError)
        with single_error():
            await self._group.__aexit__(*((kind, error, traceback) if is_canceled else (None, None, None)))

    def start(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def happens_within(seconds: float, event: asyncio.Event) -> bool:
    """Wait for the event, at most ``seconds``; returns whether it was set in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def in_steps(steps: Steps[_Result]) -> _Result:
    """Run ``steps`` on the event loop, yielding to other tasks between them."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: _Result = ended.value
            return result
        await asyncio.sleep(0)
