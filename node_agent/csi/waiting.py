"""Calls of the kubelet that wait: one at a time for a target, each until shortly before its deadline."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from grpc import StatusCode

from bdn.core.errors import BdnError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.client import OutageRetry
from node_agent.csi.refusal import Refusal, still_waiting

_Answer = TypeVar("_Answer")
# The kubelet backs off after each failed call, from 0.5 s to 122 s: one call that is held for two minutes costs one step.
_ANSWER_SECONDS: Final = 5.0  # before the deadline
_DEADLINE_SECONDS: Final = 120.0  # of the kubelet (csiTimeout), if a call says none
_POLICY: Final = RetryPolicy(outage_seconds=_DEADLINE_SECONDS, attempts=1, first_seconds=0.5, longest_seconds=5.0)


@dataclass
class Call:
    """A call at work. ``step`` is what it waits for; ``outage`` the error of a service that does not answer now."""

    source: str = "this volume"
    step: str = "waiting for the agent of this node"
    outage: BdnError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _limit: asyncio.Timeout | None = None
    _is_stopped: bool = False

    def stop(self) -> None:
        """Let the call end with its figures: another call for the target came, or the driver stops."""
        self._is_stopped = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def hold(self, seconds_left: float | None, work: Awaitable[_Answer]) -> _Answer | None:
        """What ``work`` returns, or None when the time to answer comes."""
        left = _DEADLINE_SECONDS if seconds_left is None else seconds_left
        try:
            async with asyncio.timeout(0 if self._is_stopped else max(left - _ANSWER_SECONDS, left / 2)) as self._limit:
                return await work
        except TimeoutError:
            return None
        finally:
            self._limit = None

    def refusal(self) -> Refusal:
        """The answer to a call that waits: the work goes on, and the kubelet calls again."""
        if self.outage is not None:
            return Refusal.of(self.outage)
        return Refusal(StatusCode.ABORTED, still_waiting(self.source, self.step))

    async def ask(self, question: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Ask a service that may be restarting. Raises its errors, except that it is not available."""
        retry = OutageRetry(partial(setattr, self, "outage"), _POLICY)
        return await retry.ask(question, but=lambda error: error.code != "STORE_UNAVAILABLE")


class Calls:
    """The calls at work, by target. A new call stops the one before: its caller has given up, or is this one."""

    def __init__(self) -> None:
        self._by_target: dict[Path, Call] = {}

    @asynccontextmanager
    async def alone(self, target: Path) -> AsyncIterator[Call]:
        while (other := self._by_target.get(target)) is not None:
            other.stop()
            await other.ended.wait()
        call = self._by_target[target] = Call()
        try:
            yield call
        finally:
            del self._by_target[target]
            call.ended.set()

    def stop(self) -> None:
        for call in self._by_target.values():
            call.stop()
