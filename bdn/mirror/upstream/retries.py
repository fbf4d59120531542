"""Asking an upstream again after failures that may pass: on the event loop, so that nobody's thread waits for a backoff."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from bdn.core.errors import BdnError, UpstreamError
from bdn.core.pace.retry import Allowance, RetryPolicy
from bdn.mirror.upstream.budget import LONGEST_PAUSE_SECONDS, Pause
from bdn.mirror.upstream.budgets import UpstreamBudgets

_Answer = TypeVar("_Answer")
_MOST_AT_ONCE: Final = 16

__all__ = ["Patience", "Pause"]


@dataclass(frozen=True)
class Patience:
    """An ``Asker``: one policy for listings, locations and ranges alike."""

    pause: Pause = asyncio.sleep
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    draw: Callable[[], float] = random.random
    budgets: UpstreamBudgets = field(default_factory=lambda: UpstreamBudgets(_MOST_AT_ONCE))
    longest_pause_seconds: float = LONGEST_PAUSE_SECONDS

    def for_a_caller_who_waits(self) -> Patience:
        """The same budgets, but a failure is told at once: somebody holds a connection open for the answer."""
        return replace(self, policy=RetryPolicy(attempts=1), longest_pause_seconds=0)

    async def ask(
        self, url: str, request: Callable[[], Awaitable[_Answer]], allowance: Allowance | None = None
    ) -> _Answer:
        """The answer to one request to this address's host, sent when its budget allows, or the last failure."""

        async def once() -> _Answer:
            async with self.budgets.of(url).slot(self.longest_pause_seconds) as slot:
                with slot.asking():
                    return await request()

        return await self.run(once, allowance)

    async def run(self, ask: Callable[[], Awaitable[_Answer]], allowance: Allowance | None = None) -> _Answer:
        """The answer, or the last failure. Can be canceled while it waits.

        Args:
            ask: asks once, inside a slot of the host.
            allowance: what the file, of which this is a part, is still forgiven; each failure spends of it.
        """
        failures = 0
        while True:
            try:
                return await ask()
            except UpstreamError as error:
                failures += 1
                failure = error
            await self.wait_out(failure, allowance, failures)

    async def wait_out(self, failure: BdnError, allowance: Allowance | None = None, failures: int = 1) -> None:
        """Wait as long as this failure, the ``failures``-th in a row, asks for; raise it when it is one too many."""
        delay = self.policy.delay(failures, failure, self.draw())
        if delay is None or (allowance is not None and not allowance.spend()):
            raise failure
        self.budgets.totals.retries += 1
        await self.pause(delay)
