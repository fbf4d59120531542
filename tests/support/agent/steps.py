"""What is done step by step, on the loop and in threads: before or after one of the steps something else comes between."""

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, Final

import pytest

import node_agent.fill.part
import node_agent.stage.view.build
from node_agent.app import Agent

# What is done to the disk.
_CALLS: Final = (
    *("open", "pwrite", "write", "fsync", "fdatasync", "ftruncate", "rename", "replace", "link", "unlink", "mkdir"),
    *("fchmod", "utime", "stat", "scandir"),
)
DISK: Final[Mapping[Any, tuple[str, ...]]] = {
    os: _CALLS,
    node_agent.fill.part: ("allocate",),
    node_agent.stage.view.build: ("exchange",),
}


class Steps:
    """Counts the points before and after each step of this process; at the ``chosen`` one, ``begin`` is begun.

    In a thread, the step waits until that has ended, or waits for the stage: for its lock, for the cache's, or for its task
    to end; ``seconds`` at most, as it may wait for a lock that this very thread holds. On the loop, where nothing can wait,
    it goes on at the next point where tasks take turns.
    """

    def __init__(
        self,
        agent: Agent,
        monkeypatch: pytest.MonkeyPatch,
        steps: Mapping[Any, tuple[str, ...]] = DISK,
        seconds: float = 0.3,
    ) -> None:
        self.passed = 0
        self.between: asyncio.Task[Any] | None = None
        self.last = ""
        self._seconds = seconds
        self._chosen = 0
        self._begin: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        for owner, names in steps.items():
            for name in names:
                monkeypatch.setattr(owner, name, self._around(name, getattr(owner, name)))

    def aim(self, chosen: int, begin: Callable[[], Coroutine[Any, Any, Any]] | None) -> None:
        """From now on count anew."""
        self.passed, self._chosen, self._begin, self.between = 0, chosen, begin, None

    def rest(self) -> None:
        """Count no more; what should have come between and did not, as there were too few points, does not."""
        with self._lock:
            self._begin = None

    def reach(self, point: str) -> None:
        """A step has come to this point."""
        with self._lock:
            self.passed += self._begin is not None
            begin = self._begin if self._begin and self.passed == self._chosen else None
            if begin:
                self.last, self._begin = point, None
        if begin and threading.get_ident() == self._loop_thread:
            self.between = self._loop.create_task(begin())
        elif begin:
            may_go_on = threading.Event()
            self._loop.call_soon_threadsafe(self._start, begin, may_go_on)
            may_go_on.wait(self._seconds)

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def step(*given: Any, **options: Any) -> Any:
            told = f"{name}{given[:2]}"[:200]
            self.reach(f"before {told}")
            result = call(*given, **options)
            self.reach(f"after {told}")
            return result

        @wraps(call)
        async def awaited(*given: Any, **options: Any) -> Any:
            await self._take_turns(f"before {name}")
            result = await call(*given, **options)
            await self._take_turns(f"after {name}")
            return result

        return awaited if inspect.iscoroutinefunction(call) else step

    async def _take_turns(self, point: str) -> None:
        self.reach(point)
        for _ in range(5):  # meanwhile what comes between may cancel whoever is here
            await asyncio.sleep(0)

    def _start(self, begin: Callable[[], Coroutine[Any, Any, Any]], may_go_on: threading.Event) -> None:
        self.between = self._loop.create_task(begin())
        self._look(may_go_on)

    def _look(self, may_go_on: threading.Event) -> None:
        """Again at each turn of the loop."""
        assert self.between is not None
        stages = self._agent.stages.registry.all()
        waited = [self._agent.cache._lock, *(stage.lock for stage in stages)]
        is_waiting = any(lock._waiters for lock in waited)
        if self.between.done() or is_waiting or any(stage.stop.is_set() and stage.is_working for stage in stages):
            may_go_on.set()
        else:
            self._loop.call_later(0.0005, self._look, may_go_on)
