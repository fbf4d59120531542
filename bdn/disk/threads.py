"""Work that a cancellation must not leave half done: blocking calls in threads, and awaited to their end."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


async def in_thread(call: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    """Run a blocking call in a thread and await its end, so that no thread writes after its caller was canceled."""
    return await to_the_end(asyncio.to_thread(call, *args, **kwargs))


async def to_the_end(work: Coroutine[object, object, _Result]) -> _Result:
    """Await work that must not stop half-way: a cancellation is raised after the work has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await ended(task)
        raise


async def ended(work: asyncio.Future[Any]) -> None:
    """Wait for work that continues after a cancellation, even through a second one, as by another Ctrl-C.

    If the work fails, its error is dropped.
    """
    while not work.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([work])
    if not work.cancelled():
        work.exception()
