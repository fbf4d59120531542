"""When to try again, and after how long."""

from __future__ import annotations

from dataclasses import dataclass

from bdn.core.errors import BdnError, UpstreamRateLimitedError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Full jitter: after the n-th failure, a random time up to ``first_seconds`` x 2^(n-1), at most ``longest_seconds``.

    Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog. ``Retry-After`` is honoured as a lower bound.
    """

    attempts: int = 6
    first_seconds: float = 0.25
    longest_seconds: float = 15.0
    longest_retry_after_seconds: float = 300.0

    def delay(self, failures: int, error: BdnError, random: float) -> float | None:
        """Seconds to wait after the ``failures``-th failure in a row, or None to give up.

        Args:
            failures: how often this has failed, 1 or more.
            error: the last failure; a permanent one is never repeated.
            random: uniform in [0, 1), drawn by the caller so that tests replay.
        """
        if not error.transient or failures >= self.attempts:
            return None
        jitter = random * min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 64))
        asked = error.retry_after_seconds if isinstance(error, UpstreamRateLimitedError) else None
        if asked is None:
            return jitter
        return asked + jitter if asked <= self.longest_retry_after_seconds else None
