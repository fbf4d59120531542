"""Limits the concurrent requests to each host of an upstream.

Listings, locations and ranges of all jobs share a host's budget. The pace (``bdn/core/pace/limit.py``) decides how many
run; this module queues requests and reports their outcomes to the pace.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from bdn.core.errors import BdnError, UpstreamRateLimitedError
from bdn.core.pace.limit import Outcome, Pace, PaceRule, outcome_of
from bdn.core.pace.retry import asked_to_wait

Pause = Callable[[float], Awaitable[None]]
LONGEST_PAUSE_SECONDS: Final = 300.0
_HOSTS_REMEMBERED: Final = 1024
_SPREAD_SECONDS: Final = 0.5  # after a pause, so that requests do not all resume at the same instant


class HostBudget:
    """Grants slots on the event loop, in the order of requests for them; a slot may be used in any thread."""

    def __init__(self, host: str, budgets: UpstreamBudgets) -> None:
        self.host = host
        self._all = budgets
        self.pace = Pace(PaceRule(budgets.most), budgets.clock())
        self._lock = threading.Lock()  # guards every change of the pace
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_idle(self) -> bool:
        """Whether removing this budget would lose nothing but the learned pace."""
        return not (self.pace.slots or self._waiting or self.pace.closed_until > self._all.clock())

    @asynccontextmanager
    async def slot(self, longest_pause_seconds: float = LONGEST_PAUSE_SECONDS) -> AsyncIterator[BudgetSlot]:
        """The right to have one request in flight at a time, any number in sequence.

        Waits for the limit, and for a pause that the host requested: ``UpstreamRateLimitedError`` if the pause is too
        long.
        """
        seen = await self.acquire(longest_pause_seconds)
        try:
            yield BudgetSlot(self, seen)
        finally:
            self.release()

    async def acquire(self, longest_pause_seconds: float) -> float:
        """Begin a slot. Returns the time until which the host was known to be open."""
        while True:
            seen = await self._until_open(longest_pause_seconds)
            await self._until_free()
            if self.pace.closed_until <= seen:
                return seen
            self.release()  # while this request was queued, the host requested a pause

    def release(self) -> None:
        with self._lock:
            self.pace.give_back()
        self._admit()

    @contextmanager
    def request(self) -> Iterator[SentRequest]:
        """Send exactly one request in a slot. An exception is reported to the pace and raised again."""
        with self._lock:
            began = self._all.clock()
            self.pace.began(began)
        sent, outcome, asked = SentRequest(), Outcome.ARRIVED, None
        try:
            yield sent
        except BaseException as error:
            asked = asked_to_wait(error) if isinstance(error, BdnError) else None
            outcome = outcome_of(error)
            raise
        finally:
            with self._lock:
                now, before = self._all.clock(), self.pace.limit
                self.pace.ended(now, outcome, sent.size, now - began, asked)
                self._all.requests[outcome] += 1
                is_higher = self.pace.limit > before
            if is_higher and self._loop is not None:
                self._loop.call_soon_threadsafe(self._admit)

    async def _until_open(self, longest_pause_seconds: float) -> float:
        """Wait while the host is closed. Returns the time until which the host is known to be open."""
        seen = self._all.clock()
        while (until := self.pace.closed_until) > seen:
            seconds = until - self._all.clock()
            if seconds > longest_pause_seconds:
                raise UpstreamRateLimitedError(self.host, seconds)
            self._all.pauses += 1
            self._all.pause_seconds += seconds
            await self._all.pause(seconds + _SPREAD_SECONDS * self._all.draw())
            seen = until
        return seen

    async def _until_free(self) -> None:
        if not self._waiting and not self.pace.is_full:
            with self._lock:
                self.pace.take()
            return
        self._loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # it was granted a slot at the same instant
            else:
                with suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    def _admit(self) -> None:
        while self._waiting and not self.pace.is_full:
            turn = self._waiting.popleft()
            if not turn.done():
                with self._lock:
                    self.pace.take()
                turn.set_result(None)


@dataclass(slots=True)
class BudgetSlot:
    """A place at a host. Its holder sends any number of requests, one at a time."""

    budget: HostBudget
    seen: float  # the time until which the host was known to be open

    @property
    def is_open(self) -> bool:
        """False once the host has requested a pause: the holder then releases the slot before its next request."""
        return self.budget.pace.closed_until <= self.seen


@dataclass(slots=True)
class SentRequest:
    """``size`` is the bytes of the body that arrived; the reader of the body sets it."""

    size: int = 0


@dataclass
class UpstreamBudgets:
    """The budgets of all hosts, and counters of requests to upstreams by this process.

    Args:
        most: requests in flight to one host; the host's pace is often less.
        pause: waits before a request to an upstream is retried.
        clock: monotonic seconds.
        draw: uniform in [0, 1).
    """

    most: int = 16
    pause: Pause = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    requests: Counter[Outcome] = field(default_factory=Counter)
    retries: int = 0
    pauses: int = 0
    pause_seconds: float = 0.0
    silent_until: float = float("-inf")  # no warning about an outage before this time
    hosts: dict[str, HostBudget] = field(default_factory=dict)

    def of(self, url: str) -> HostBudget:
        """The budget of this address's host and port. Call on the event loop."""
        host = urlsplit(url).netloc.rpartition("@")[2].lower()
        budget = self.hosts.get(host)
        if budget is None:
            if len(self.hosts) >= _HOSTS_REMEMBERED:
                self.hosts = {name: budget for name, budget in self.hosts.items() if not budget.is_idle}
            budget = self.hosts[host] = HostBudget(host, self)
        return budget


class UpstreamMetrics(Collector):
    """For Prometheus; reads the budgets when scraped. Hosts are not labels: there may be thousands."""

    def __init__(self, budgets: UpstreamBudgets) -> None:
        self._budgets = budgets

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        all_, hosts, now = self._budgets, self._budgets.hosts.values(), self._budgets.clock()
        requests = CounterMetricFamily(
            "bdn_upstream_requests", "Requests to upstreams, by how they ended", labels=["outcome"]
        )
        for outcome in Outcome:
            requests.add_metric([outcome.name.lower()], all_.requests[outcome])
        yield requests
        yield CounterMetricFamily("bdn_upstream_retries", "Retries of failed requests", all_.retries)
        yield CounterMetricFamily("bdn_upstream_pauses", "Pauses that hosts requested", all_.pauses)
        yield CounterMetricFamily("bdn_upstream_pause_seconds", "Seconds of these pauses", all_.pause_seconds)
        for name, what, value in (
            ("limit", "Requests that may be in flight, over all hosts", sum(host.pace.limit for host in hosts)),
            ("slots", "Threads and tasks that send requests to upstreams now", sum(host.pace.slots for host in hosts)),
            ("hosts_closed", "Hosts with a requested pause now", sum(host.pace.closed_until > now for host in hosts)),
        ):
            yield GaugeMetricFamily(f"bdn_upstream_{name}", what, value)
