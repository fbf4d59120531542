"""Retry rules: when and after how long to retry a failed request, or to resume a stalled or broken body.

The rules count time and rounds, not requests. When a host is down, sixteen requests in flight fail at once, and again
at each attempt: counted one by one, three seconds of 503 would exhaust a file's allowance.
"""

from dataclasses import dataclass, field
from typing import Final, Self

from bdn.core.errors import BdnError, UpstreamRateLimitedError, UpstreamUnavailableError

OUTAGE_SECONDS: Final = 120.0
_FREE_ROUNDS: Final = 10
_CHUNKS_PER_ROUND: Final = 10


def asked_to_wait(error: BdnError) -> float | None:
    """The ``Retry-After`` seconds of this failure, or None."""
    if isinstance(error, UpstreamRateLimitedError | UpstreamUnavailableError):
        return error.retry_after_seconds
    return None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Full jitter: after failure n, a random time up to ``first_seconds`` x 2^(n-1), at most ``longest_seconds``.

    Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog. ``Retry-After`` is a lower bound. A
    request is given up after failing for ``outage_seconds``, but not before ``attempts`` attempts. Failures that pass
    soon or never, such as an unknown host, are given up after ``attempts`` in a row.
    """

    outage_seconds: float = OUTAGE_SECONDS
    attempts: int = 6
    first_seconds: float = 0.25
    longest_seconds: float = 10.0
    longest_retry_after_seconds: float = 300.0


@dataclass(slots=True)
class Outage:
    """Consecutive failures of one request. ``seconds`` excludes pauses of ``Retry-After``."""

    policy: RetryPolicy
    failures: int = 0
    seconds: float = 0.0
    brief: int = 0  # consecutive failures that pass soon or never

    def delay(self, error: BdnError, taken: float, random: float) -> float | None:
        """Seconds to wait after one more failure, or None to give up.

        ``taken`` is how long the attempt took, ``random`` is uniform in [0, 1). The last attempt is made when the time
        is over, so every shorter outage is survived.
        """
        if self.failures:
            self.seconds += taken
        self.failures += 1
        asked = asked_to_wait(error) or 0.0
        left = self.policy.outage_seconds - self.seconds
        self.brief = self.brief + 1 if error.is_brief else 0
        is_over = (left <= 0 and self.failures >= self.policy.attempts) or self.brief >= self.policy.attempts
        if not error.transient or is_over or asked > self.policy.longest_retry_after_seconds:
            return None
        longest = min(self.policy.longest_seconds, self.policy.first_seconds * 2.0 ** min(self.failures - 1, 64))
        jitter = min(random * longest, left if left > 0 else longest)
        self.seconds += jitter
        return asked + jitter


@dataclass(slots=True)
class Allowance:
    """The budget of one file or stage over all its chunks: rounds of failures, or bytes requested twice."""

    left: int
    used: int = 0

    def spend(self, cost: int = 1) -> bool:
        """Spend ``cost``. Returns False, and spends nothing, when too little is left."""
        if cost > self.left:
            return False
        self.left -= cost
        self.used += cost
        return True


@dataclass(slots=True)
class FailureRounds:
    """Failures of all requests of one file or stage, in rounds. Times are seconds of a clock that never goes back.

    A round begins with a failure, and ends when a request that was sent after the failure arrives. So an outage is one
    round, however long it is and however many requests it fails. Without a bound on rounds, an upstream that fails
    every second request could make a file of a thousand chunks cost thousands of requests.
    """

    allowance: Allowance
    _began: float = field(default=float("-inf"), init=False)  # start of the last round
    _is_under_way: bool = field(default=False, init=False)

    @classmethod
    def of(cls, chunks: int) -> Self:
        """Ten rounds, and one more for every tenth chunk."""
        return cls(Allowance(_FREE_ROUNDS + chunks // _CHUNKS_PER_ROUND))

    def failed(self, sent: float, now: float) -> bool:
        """Report the failure of a request sent at ``sent``. Returns False when no round is left."""
        if self._is_under_way or sent <= self._began:
            return True
        self._is_under_way, self._began = True, now
        return self.allowance.spend()

    def arrived(self, sent: float) -> None:
        """Report the success of a request sent at ``sent``."""
        if sent > self._began:
            self._is_under_way = False


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """A body has stalled when fewer than ``least_bytes`` arrive in ``window_seconds``.

    64 KiB in 10 s: a trickle of 1 KB/s is cut after one window, while one of a hundred connections on a link of 1 MB/s
    still gets its share. A shorter window would cut links that lose a packet and wait for it twice (RFC 6298: 1 s, then
    2 s, then 4 s).
    """

    least_bytes: int = 64 * 1024
    window_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.least_bytes < 1 or self.window_seconds <= 0:
            raise ValueError(f"not a stall policy: {self.least_bytes} bytes in {self.window_seconds} s")


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """A broken range is resumed at once, at its break, as long as each connection delivers bytes."""

    resumes: int = 16  # consecutive, for upstreams that drop every connection after a few bytes
    poor_stalls: int = 1  # stalls within a window's bytes; after the next one the caller waits


@dataclass(slots=True)
class Persistence:
    """Decides, for one range, whether to resume after each broken connection."""

    policy: ResumePolicy
    stall: StallPolicy
    resumes: int = field(default=0, init=False)
    _poor_stalls: int = field(default=0, init=False)

    def goes_on(self, gained: int, *, stalled: bool) -> bool:
        """Whether to request the rest now, after a connection with ``gained`` bytes that stalled or broke."""
        if stalled and gained < self.stall.least_bytes:
            self._poor_stalls += 1
        if gained == 0 or self.resumes >= self.policy.resumes or self._poor_stalls > self.policy.poor_stalls:
            return False
        self.resumes += 1
        return True


@dataclass(slots=True)
class StallWindow:
    """Counts the bytes of one body per window. ``missing`` bytes remain; the last window may need fewer."""

    policy: StallPolicy
    missing: int
    begun: float
    _count: int = field(default=0, init=False)

    def judge(self, count: int, now: float) -> str:
        """Report ``count`` further bytes. Returns the problem when a window ends with too few bytes, else ""."""
        self.missing -= count
        self._count += count
        seconds = now - self.begun
        if seconds < self.policy.window_seconds:
            return ""
        if self._count < min(self.policy.least_bytes, self.missing + self._count):
            return f"stalled: {self._count} bytes in {seconds:.1f} s"
        self.begun, self._count = now, 0
        return ""
