"""When to try again, and after how long: a request that failed, and a body that came too slowly or broke off."""

from dataclasses import dataclass, field
from typing import Final, Self

from bdn.core.errors import BdnError, UpstreamRateLimitedError, UpstreamUnavailableError

_FREE_FAILURES: Final = 10
_CHUNKS_PER_FAILURE: Final = 10


def asked_to_wait(error: BdnError) -> float | None:
    """The seconds that an upstream asked for (``Retry-After``) with this failure, or None."""
    if isinstance(error, UpstreamRateLimitedError | UpstreamUnavailableError):
        return error.retry_after_seconds
    return None


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
        """Seconds to wait after the ``failures``-th failure in a row, or None to give up. ``random`` is uniform in [0, 1)."""
        if not error.transient or failures >= self.attempts:
            return None
        jitter = random * min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 64))
        asked = asked_to_wait(error)
        if asked is None:
            return jitter
        return asked + jitter if asked <= self.longest_retry_after_seconds else None


@dataclass(slots=True)
class Allowance:
    """What one file or one stage may still spend, over all its chunks and requests: on failures, or in bytes asked for twice.

    Attempts per request alone would let a file of a thousand chunks cost thousands of requests that are thrown away.
    """

    left: int
    used: int = 0

    @classmethod
    def of(cls, chunks: int) -> Self:
        """For so many chunks: ten failures, and one more for every tenth chunk."""
        return cls(_FREE_FAILURES + chunks // _CHUNKS_PER_FAILURE)

    def spend(self, cost: int = 1) -> bool:
        """One more failure, or so many bytes; False when that is too much, and nothing is spent."""
        if cost > self.left:
            return False
        self.left -= cost
        self.used += cost
        return True


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """A body that brings less than ``least_bytes`` in ``window_seconds`` has stalled.

    64 KiB in 10 s: a trickle of 1 KB/s is cut after one window, while one of a hundred connections on a link of 1 MB/s still has
    its share. A shorter window would cut links that lose a packet and wait for it twice (RFC 6298: 1 s, then 2 s, then 4 s).
    """

    least_bytes: int = 64 * 1024
    window_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.least_bytes < 1 or self.window_seconds <= 0:
            raise ValueError(f"not a stall policy: {self.least_bytes} bytes in {self.window_seconds} s")


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """A range that breaks off is gone on with at once, where it broke off, as long as that brings bytes."""

    resumes: int = 16  # in a row, of an upstream that drops every connection after a few bytes
    poor_stalls: int = 1  # connections that stall with less than a window's bytes; after the next one the caller waits


@dataclass(slots=True)
class Persistence:
    """Judges, for one range, whether to go on after each connection that broke."""

    policy: ResumePolicy
    stall: StallPolicy
    resumes: int = field(default=0, init=False)
    _poor_stalls: int = field(default=0, init=False)

    def goes_on(self, gained: int, *, stalled: bool) -> bool:
        """Whether to ask for the rest now, after a connection that brought ``gained`` bytes and then stalled or broke."""
        if stalled and gained < self.stall.least_bytes:
            self._poor_stalls += 1
        if gained == 0 or self.resumes >= self.policy.resumes or self._poor_stalls > self.policy.poor_stalls:
            return False
        self.resumes += 1
        return True


@dataclass(slots=True)
class StallWindow:
    """Counts the bytes of one body, window by window. ``missing`` is what has not come; the last window may hold just that."""

    policy: StallPolicy
    missing: int
    begun: float
    _count: int = field(default=0, init=False)

    def judge(self, count: int, now: float) -> str:
        """``count`` further bytes have come. Says what is wrong when a window is over that brought too little, else nothing."""
        self.missing -= count
        self._count += count
        seconds = now - self.begun
        if seconds < self.policy.window_seconds:
            return ""
        if self._count < min(self.policy.least_bytes, self.missing + self._count):
            return f"stalled: {self._count} bytes in {seconds:.1f} s"
        self.begun, self._count = now, 0
        return ""
