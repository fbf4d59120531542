"""Turns and times of an event loop."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Given = TypeVar("Given")
Values = TypeVarTuple("Values")
_LONGEST_SECONDS = 60.0


async def settle() -> None:
    """Every task goes as far as it can without anything from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


class _Hurried(selectors.DefaultSelector):
    """Nobody is waited for: the time that was to be waited has passed."""

    passed = 0.0
    threads = 0  # at work: what they do is waited for, while no time passes

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(_LONGEST_SECONDS if timeout != 0 and (timeout is None or self.threads) else 0)
        if not found:
            assert not self.threads or timeout == 0, "a thread does not end"
            assert timeout is not None, "everybody waits, and nothing will happen"
            self.passed += max(0.0, timeout)
        return found


def run_hurried(program: Coroutine[Any, Any, Result]) -> Result:
    """Run it to its end on a loop whose time passes as soon as everybody waits for it: hours cost nothing."""
    selector = _Hurried()

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return selector.passed

        def run_in_executor(
            self, executor: Executor | None, func: Callable[[*Values], Given], *args: *Values
        ) -> asyncio.Future[Given]:
            selector.threads += 1
            future = super().run_in_executor(executor, func, *args)
            future.add_done_callback(ended)
            return future

    def ended(_: object) -> None:
        selector.threads -= 1

    with asyncio.Runner(loop_factory=lambda: Loop(selector)) as runner:
        return runner.run(program)
