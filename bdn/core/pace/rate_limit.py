"""Bytes per second with a burst, and the classes of traffic that share them."""

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

    def seconds_until(self, size: int, now: float) -> float:
        """Seconds until ``size`` tokens, at most a burst, are available without other consumers."""
        self._fill(now)
        return max(0.0, (size - self._tokens) / self.rate)

    def _fill(self, now: float) -> None:
        if now > self._at:  # threads read the clock before they acquire the lock, so times may be out of order
            self._tokens = min(float(self.burst), self._tokens + (now - self._at) * self.rate)
            self._at = now


ONE_IN: Final = 20  # chunks are of a lower class, while a higher class has chunks to read, too


class TrafficClass(IntEnum):
    STAGE = 0  # a job waits
    PREFETCH = 1
    SCRUB = 2
