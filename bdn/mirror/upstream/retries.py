"""When a failed request to an upstream is sent again. The rule is ``RetryPolicy`` in ``bdn/core/pace/retry.py``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from bdn.core.errors import UpstreamError
from bdn.core.pace.retry import Allowance, RetryPolicy
from bdn.mirror.upstream.budget import LONGEST_PAUSE_SECONDS, UpstreamBudgets

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class UpstreamRetries:
    """An ``Asker``: one policy for listings, locations and ranges. Waits on the event loop, so no thread waits for a backoff."""

    budgets: UpstreamBudgets = field(default_factory=UpstreamBudgets)
    policy: RetryPolicy = field(default_factory=RetryPolicy)
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
                    with slot.budget.request():
                        return await request()
            except UpstreamError as error:
                failures += 1
                failure = error
            await self.wait_out(failure, failures)

    async def wait_out(self, failure: UpstreamError, failures: int, allowance: Allowance | None = None) -> None:
        """Wait as long as this failure, the n-th in a row, asks for; raise it when it is one too many."""
        delay = self.policy.delay(failures, failure, self.budgets.draw())
        if delay is None or (allowance is not None and not allowance.spend()):
            raise failure
        self.budgets.retries += 1
        await self.budgets.pause(delay)
