"""The places that a stage passes on its way, in the loop and in threads: at each of them a test may have it released."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import pytest

from node_agent.app import Agent
from node_agent.cache.node_cache import NodeCache
from node_agent.fetch.documents import Catalogue
from node_agent.fill.part import PackedParts, PartialFile
from node_agent.stage.view.views import Views

_IN_THREADS = {PartialFile: ("open", "write", "commit"), PackedParts: ("write",), Views: ("publish", "expose")}
_IN_LOOP = {Catalogue: ("obtain",), NodeCache: ("admit",), PackedParts: ("commit",)}


class Points:
    """Counts the points that are passed, before and behind each of these steps; at the ``chosen`` one ``job`` is released."""

    def __init__(self, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = 0
        self.chosen: int | None = None
        self.job = ""
        self.releasing: asyncio.Task[Any] | None = None
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        for owner, names in _IN_THREADS.items():
            for name in names:
                monkeypatch.setattr(owner, name, self._around(getattr(owner, name)))
        for owner, names in _IN_LOOP.items():
            for name in names:
                monkeypatch.setattr(owner, name, self._around_awaited(getattr(owner, name)))

    def aim(self, number: int | None, job: str) -> None:
        """From now on count anew; the stage of ``job`` is released at the point with this number, if it passes it."""
        self.passed, self.chosen, self.job, self.releasing = 0, number, job, None

    def pass_in_thread(self) -> None:
        """A thread has come to a point. At the chosen one it goes on once the stage has been told to stop."""
        if self._is_chosen():
            stage = next(one for one in self._agent.stages.registry.all() if one.record.job_id == self.job)
            self._loop.call_soon_threadsafe(self._release)
            assert stage.stop.wait(60)

    async def _pass_in_loop(self) -> None:
        if self._is_chosen():
            self._release()
            for _ in range(5):  # meanwhile the release cancels whoever is here
                await asyncio.sleep(0)

    def _is_chosen(self) -> bool:
        with self._lock:
            self.passed += 1
            return self.passed - 1 == self.chosen

    def _release(self) -> None:
        stage = next(one for one in self._agent.stages.registry.all() if one.record.job_id == self.job)
        self.releasing = asyncio.create_task(self._agent.stages.release(stage.record.id))

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def passing(*given: Any, **options: Any) -> Any:
            self.pass_in_thread()
            result = step(*given, **options)
            self.pass_in_thread()
            return result

        return passing

    def _around_awaited(self, step: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @wraps(step)
        async def passing(*given: Any, **options: Any) -> Any:
            await self._pass_in_loop()
            result = await step(*given, **options)
            await self._pass_in_loop()
            return result

        return passing
