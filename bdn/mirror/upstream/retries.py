"""Retries of failed requests to upstreams, by the rules of ``RetryPolicy`` in ``bdn/core/pace/retry.py``."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from bdn.core.errors import BdnError, UpstreamError
from bdn.core.pace.retry import FailureRounds, Outage, RetryPolicy
from bdn.mirror.upstream.budget import LONGEST_PAUSE_SECONDS, UpstreamBudgets

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_WORTH_A_WORD: Final = 4  # failures in a row before a warning, after a second or so
_SILENCE_SECONDS: Final = 60.0  # between two warnings


@dataclass(frozen=True)
class UpstreamRetries:
    """An ``Asker``: one policy for listings, locations and ranges.

    Waits on the event loop, so no thread blocks on a backoff.
    """

    budgets: UpstreamBudgets = field(default_factory=UpstreamBudgets)
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    longest_pause_seconds: float = LONGEST_PAUSE_SECONDS

    def for_a_caller_who_waits(self) -> UpstreamRetries:
        """The same budgets without retries, for a caller that holds a connection open for the answer."""
        return replace(self, policy=RetryPolicy(outage_seconds=0, attempts=1), longest_pause_seconds=0)

    async def ask(self, url: str, request: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Send ``request`` when the budget of this address's host allows. Raises the last failure."""
        outage = Outage(self.policy)
        while True:
            sent = self.budgets.clock()
            try:
                async with self.budgets.of(url).slot(self.longest_pause_seconds) as slot:
                    sent = self.budgets.clock()
                    with slot.budget.request():
                        return await request()
            except UpstreamError as error:
                failure = error
            await self.wait_out(failure, outage, sent)

    async def wait_out(
        self, failure: BdnError, outage: Outage, sent: float, rounds: FailureRounds | None = None
    ) -> None:
        """Wait before a retry of a request that began at ``sent``; raise ``failure`` if no retry is left."""
        now = self.budgets.clock()
        delay = outage.delay(failure, now - sent, self.budgets.draw())
        if delay is None or (rounds is not None and not rounds.failed(sent, now)):
            raise failure
        if outage.failures >= _WORTH_A_WORD and now >= self.budgets.silent_until:
            self.budgets.silent_until = now + _SILENCE_SECONDS
            logger.warning(
                "%s; retrying for up to %.0f s", failure, max(0.0, self.policy.outage_seconds - outage.seconds)
            )
        self.budgets.retries += isinstance(failure, UpstreamError)
        await self.budgets.pause(delay)
