"""A host whose goodput depends on how many requests it has, in simulated time: what a pace has to find its way with."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from bdn.core.pace.limit import Outcome, Pace

# What the host does with one request: seconds that it takes, bytes, outcome, and what it asks for with Retry-After.
Treatment = tuple[float, int, Outcome, float | None]
Host = Callable[[float, int], Treatment]  # of the time, and of the number in flight, the new one included


@dataclass
class Run:
    """What happened. ``limits`` holds (time, limit, requests in flight) after every event."""

    limits: list[tuple[float, int, int]] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)

    def goodput(self, start: float, stop: float) -> float:
        """Bytes per second."""
        return sum(size for at, size in self.arrivals if start <= at < stop) / (stop - start)

    def requests(self, start: float, stop: float) -> float:
        """Successes per second."""
        return sum(start <= at < stop for at, _ in self.arrivals) / (stop - start)


def simulate(pace: Pace, host: Host, *, seconds: float, workers: int = 1000) -> Run:
    """``workers`` want to ask all the time, and begin as soon as the pace lets them."""
    now, run, number = 0.0, Run(), 0
    ends: list[tuple[float, int, Treatment]] = []
    while now < seconds:
        while not pace.is_full and pace.slots < workers and pace.closed_until <= now:
            pace.take()
            pace.began(now)
            run.starts.append(now)
            treatment = host(now, pace.active)
            number += 1
            heapq.heappush(ends, (now + treatment[0], number, treatment))
        if not ends:
            now = pace.closed_until
            continue
        now, _, (taken, size, outcome, retry_after) = heapq.heappop(ends)
        pace.give_back()
        pace.ended(now, outcome, size, taken, retry_after)
        if outcome is Outcome.ARRIVED:
            run.arrivals.append((now, size))
        run.limits.append((now, pace.limit, pace.active))
    return run


@dataclass
class Capacity:
    """Every request gets ``each`` bytes per second until together they reach ``total``; from ``knee`` on it collapses.

    ``noise`` is how much the time of a request varies, as a share.
    """

    each: float
    total: float
    size: int = 8 * 1024 * 1024
    knee: float = float("inf")
    noise: float = 0.0
    random: Random = field(default_factory=lambda: Random(20261121))

    def goodput(self, active: int) -> float:
        """What so many requests get together."""
        full = min(active * self.each, self.total)
        return full if active <= self.knee else full * (self.knee / active) ** 2

    def best(self, most: int) -> float:
        return max(map(self.goodput, range(1, most + 1)))

    def __call__(self, _: float, active: int) -> Treatment:
        seconds = self.size * active / self.goodput(active)
        return seconds * (1 + self.noise * self.random.uniform(-1, 1)), self.size, Outcome.ARRIVED, None


@dataclass
class RateLimited:
    """So many requests per second, in a bucket of one second; 429 to the rest."""

    per_second: float
    latency_seconds: float
    retry_after_seconds: float | None = None
    refused: list[float] = field(default_factory=list)
    _tokens: float = 0.0
    _at: float = 0.0

    def __call__(self, now: float, _: int) -> Treatment:
        self._tokens = min(self.per_second, self._tokens + (now - self._at) * self.per_second)
        self._at = now
        if self._tokens < 1:
            self.refused.append(now)
            return self.latency_seconds, 0, Outcome.REFUSED, self.retry_after_seconds
        self._tokens -= 1
        return self.latency_seconds, 1000, Outcome.ARRIVED, None
