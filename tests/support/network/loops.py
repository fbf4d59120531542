"""Turns and times of an event loop."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
_LONGEST_SECONDS = 60.0


async def settle() -> None:
    """Every task goes as far as it can without anything from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


class _Hurried(selectors.DefaultSelector):
    """Nobody is waited for: the time that was to be waited has passed."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(_LONGEST_SECONDS if timeout is None else 0)  # of a thread, when no time is waited for
        if not found:
            assert timeout is not None, "everybody waits, and nothing will happen"
            self.passed += max(0.0, timeout)
        return found


def run_hurried(program: Coroutine[Any, Any, Result]) -> Result:
    """Run it to its end on a loop whose time passes as soon as everybody waits for it: hours cost nothing."""
    selector = _Hurried()

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return selector.passed

    with asyncio.Runner(loop_factory=lambda: Loop(selector)) as runner:
        return runner.run(program)
