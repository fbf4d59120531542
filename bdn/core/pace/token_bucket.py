"""So many bytes per second, with a burst: what flows in any period is at most rate x period + burst."""

from __future__ import annotations


class TokenBucket:
    """Tokens are bytes that may flow now. Not thread-safe; the caller says what time it is."""

    def __init__(self, rate_bytes_per_second: float, burst: int, now: float) -> None:
        if rate_bytes_per_second <= 0 or burst <= 0:
            msg = f"a limit of {rate_bytes_per_second} bytes per second with a burst of {burst} lets nothing through"
            raise ValueError(msg)
        self.rate = rate_bytes_per_second
        self.burst = burst
        self._tokens = float(burst)
        self._at = now

    def reserve(self, size: int, now: float) -> float:
        """Take the tokens, also those that are still to come; returns the seconds after which the bytes may flow.

        Who reserves later waits longer, so nobody is overtaken. What is reserved cannot be given back.
        """
        self._fill(now)
        self._tokens -= size
        return max(0.0, -self._tokens / self.rate)

    def take(self, size: int, now: float) -> bool:
        """Take the tokens if they are all here."""
        self._fill(now)
        if self._tokens < size:
            return False
        self._tokens -= size
        return True

    def seconds_until(self, size: int, now: float) -> float:
        """When ``size`` tokens, at most a burst, will be here if nobody takes any."""
        self._fill(now)
        return max(0.0, (size - self._tokens) / self.rate)

    def _fill(self, now: float) -> None:
        if now > self._at:  # threads read the clock before they take the lock, and may come in another order
            self._tokens = min(float(self.burst), self._tokens + (now - self._at) * self.rate)
            self._at = now
