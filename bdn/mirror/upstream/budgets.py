"""One budget of requests per upstream host, over all jobs of this process: listings, locations and ranges share it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from bdn.core.pace.limit import PaceRule
from bdn.mirror.upstream.budget import Budget, Conditions, Pause, UpstreamTotals

_HOSTS_REMEMBERED: Final = 1024


class UpstreamBudgets:
    """The budgets of all hosts.

    Args:
        most: requests in flight to one host; its own pace is often less.
        pause: waits for the end of what a host asked for.
        clock: seconds that never go back.
        draw: uniform in [0, 1).
    """

    def __init__(
        self,
        most: int,
        *,
        pause: Pause = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._conditions = Conditions(PaceRule(most), pause, clock, draw)
        self._budgets: dict[str, Budget] = {}

    @property
    def totals(self) -> UpstreamTotals:
        """What was done so far."""
        return self._conditions.totals

    def of(self, url: str) -> Budget:
        """The budget of this address's host and port. On the event loop."""
        host = urlsplit(url).netloc.rpartition("@")[2].lower()
        budget = self._budgets.get(host)
        if budget is None:
            if len(self._budgets) >= _HOSTS_REMEMBERED:
                self._budgets = {name: budget for name, budget in self._budgets.items() if not budget.is_idle}
            budget = self._budgets[host] = Budget(host, self._conditions)
        return budget

    def now(self) -> tuple[Budget, ...]:
        """Every host's that is remembered."""
        return tuple(self._budgets.values())

    def closed(self) -> int:
        """How many hosts have asked to wait, and for longer than until now."""
        now = self._conditions.clock()
        return sum(budget.closed_until > now for budget in self._budgets.values())
