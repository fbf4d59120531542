"""Bytes per second, with a burst, shared by classes of work: stages first, then prefetches, then scrubs.

A class waits while a higher class has bytes to send, except for a small share, so that background work on a busy node
still completes.
"""

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class TokenBucket:
    """A bucket of bytes that may flow now. Not thread-safe; the caller passes the time."""

    def __init__(self, rate_bytes_per_second: float, burst: int, now: float) -> None:
        if rate_bytes_per_second <= 0 or burst <= 0:
            raise ValueError(
                f"a limit of {rate_bytes_per_second} bytes per second with a burst of {burst} lets nothing through"
            )
        self.rate = rate_bytes_per_second
        self.burst = burst
        self._tokens = float(burst)
        self._at = now

    def reserve(self, size: int, now: float) -> float:
        """Reserve tokens, possibly future ones. Returns the seconds after which the bytes may flow.

        Later callers wait longer, so no caller is overtaken. Reservations cannot be given back.
        """
        self._fill(now)
        self._tokens -= size
        return max(0.0, -self._tokens / self.rate)

    def take(self, size: int, now: float) -> bool:
        """Consume the tokens if all are available now."""
        self._fill(now)
        if self._tokens < size:
            return False
        self._tokens -= size
        return True

    def seconds_until(self, size: int, now: float) -> float:
        """Seconds until ``size`` tokens, at most a burst, are available without other consumers."""
        self._fill(now)
        return max(0.0, (size - self._tokens) / self.rate)

    def _fill(self, now: float) -> None:
        if now > self._at:  # threads read the clock before they acquire the lock, so times may be out of order
            self._tokens = min(float(self.burst), self._tokens + (now - self._at) * self.rate)
            self._at = now


SHARE: Final = 0.05  # of the bytes of higher classes, for each lower class that waits meanwhile


class TrafficClass(IntEnum):
    STAGE = 0  # a job waits
    PREFETCH = 1
    SCRUB = 2


@dataclass(eq=False, slots=True)
class BandwidthTurn:
    """A wait to move ``size`` bytes, which is over once ``is_granted``."""

    traffic: TrafficClass
    size: int
    is_granted: bool = False


class RateLimit:
    """Grants turns by class, and within a class first come, first served.

    Not thread-safe; the caller passes the time.

    A turn must not be larger than the burst: the bucket could never hold its tokens.
    """

    def __init__(self, rate_bytes_per_second: float, burst: int, now: float) -> None:
        self._bucket = TokenBucket(rate_bytes_per_second, burst, now)
        self._waiting: dict[TrafficClass, deque[BandwidthTurn]] = {traffic: deque() for traffic in TrafficClass}
        self._owed = dict.fromkeys(TrafficClass, 0.0)  # each waiting class's share of bytes that higher classes moved

    def ask(self, traffic: TrafficClass, size: int) -> BandwidthTurn:
        if size > self._bucket.burst:
            raise ValueError(f"{size} bytes at once are more than the burst of {self._bucket.burst}")
        turn = BandwidthTurn(traffic, size)
        self._waiting[traffic].append(turn)
        return turn

    def withdraw(self, turn: BandwidthTurn) -> None:
        """Leave the queue. A granted turn stays used."""
        if not turn.is_granted:
            self._waiting[turn.traffic].remove(turn)
            self._settle(turn.traffic)

    def grant(self, now: float) -> list[BandwidthTurn]:
        granted: list[BandwidthTurn] = []
        while (turn := self._first()) is not None and self._bucket.take(turn.size, now):
            turn.is_granted = True
            self._waiting[turn.traffic].popleft()
            self._account(turn)
            granted.append(turn)
        return granted

    def seconds_until_next(self, now: float) -> float | None:
        """Seconds until ``grant`` can grant without further requests; None: the queue is empty."""
        turn = self._first()
        return None if turn is None else self._bucket.seconds_until(turn.size, now)

    def _first(self) -> BandwidthTurn | None:
        """The turn whose share is due, otherwise the first turn of the highest waiting class."""
        waiting = [queue[0] for queue in self._waiting.values() if queue]
        due = (turn for turn in waiting if self._owed[turn.traffic] >= turn.size)
        return next(due, waiting[0] if waiting else None)

    def _account(self, turn: BandwidthTurn) -> None:
        if self._owed[turn.traffic] >= turn.size:
            self._owed[turn.traffic] -= turn.size
        for lower in TrafficClass:
            if lower > turn.traffic and self._waiting[lower]:
                self._owed[lower] += SHARE * turn.size
        self._settle(turn.traffic)

    def _settle(self, traffic: TrafficClass) -> None:
        if not self._waiting[traffic]:  # only waiting classes accumulate a share
            self._owed[traffic] = 0.0
