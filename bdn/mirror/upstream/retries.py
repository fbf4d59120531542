"""Requests to upstreams, each inside its host's budget, and retried after failures that may pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from bdn.core.errors import UpstreamError
from bdn.core.pace.retry import Allowance, RetryPolicy
from bdn.mirror.upstream.budget import LONGEST_PAUSE_SECONDS, Pause, UpstreamBudgets

_Answer = TypeVar("_Answer")
_MOST_AT_ONCE: Final = 16


@dataclass(frozen=True)
class UpstreamRetries:
    """An ``Asker``: one policy for listings, locations and ranges. Waits on the event loop, so no thread waits for a backoff."""

    pause: Pause = asyncio.sleep
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    draw: Callable[[], float] = random.random
    budgets: UpstreamBudgets = field(default_factory=lambda: UpstreamBudgets(_MOST_AT_ONCE))
    longest_pause_seconds: float = LONGEST_PAUSE_SECONDS

    def for_a_caller_who_waits(self) -> UpstreamRetries:
        """The same budgets without retries: somebody holds a connection open for the answer."""
        return replace(self, policy=RetryPolicy(attempts=1), longest_pause_seconds=0)

    async def ask(self, url: str, request: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The answer of ``request``, sent when the budget of this address's host allows, or the last failure."""
        failures = 0
        while True:
            try:
                async with self.budgets.of(url).slot(self.longest_pause_seconds) as slot:
                    with slot.request():
                        return await request()
            except UpstreamError as error:
                failures += 1
                failure = error
            await self.wait_out(failure, failures)

    async def wait_out(self, failure: UpstreamError, failures: int, allowance: Allowance | None = None) -> None:
        """Wait as long as this failure, the ``failures``-th in a row, asks for; raise it when it is one too many.

        ``allowance`` is how many failures the file is still forgiven; this one spends of it.
        """
        delay = self.policy.delay(failures, failure, self.draw())
        if delay is None or (allowance is not None and not allowance.spend()):
            raise failure
        self.budgets.totals.retries += 1
        await self.pause(delay)
