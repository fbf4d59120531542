"""When to try again, and after how long: a request that failed, and a body that came too slowly or broke off.

Time and rounds are counted, not requests. Sixteen requests in flight to a host that is away fail at once, and again at each
attempt: counted one by one, three seconds of 503 would use up all that a file is forgiven.
"""

from dataclasses import dataclass, field
from typing import Final, Self

from bdn.core.errors import BdnError, UpstreamRateLimitedError, UpstreamUnavailableError

OUTAGE_SECONDS: Final = 120.0
_FREE_ROUNDS: Final = 10
_CHUNKS_PER_ROUND: Final = 10


def asked_to_wait(error: BdnError) -> float | None:
    """The seconds that an upstream asked for (``Retry-After``) with this failure, or None."""
    if isinstance(error, UpstreamRateLimitedError | UpstreamUnavailableError):
        return error.retry_after_seconds
    return None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Full jitter: after the n-th failure, a random time up to ``first_seconds`` x 2^(n-1), at most ``longest_seconds``.

    Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog. ``Retry-After`` is honoured as a lower bound.
    A request is given up when it has failed for ``outage_seconds``, but not before its ``attempts`` are used up. Failures that pass soon
    or not at all, such as a host that does not exist, are given up after ``attempts`` in a row.
    """

    outage_seconds: float = OUTAGE_SECONDS
    attempts: int = 6
    first_seconds: float = 0.25
    longest_seconds: float = 10.0
    longest_retry_after_seconds: float = 300.0


@dataclass(slots=True)
class Outage:
    """The failures of one request in a row: ``failures``, and the ``seconds`` of it, to which pauses that were asked for do not count."""

    policy: RetryPolicy
    failures: int = 0
    seconds: float = 0.0
    brief: int = 0  # failures in a row that pass soon or not at all

    def delay(self, error: BdnError, taken: float, random: float) -> float | None:
        """Seconds to wait after one more failure, or None to give up.

        ``taken`` is how long it took to fail, ``random`` is uniform in [0, 1). The last attempt is made when the time is over: a
        shorter outage is always survived.
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
    """What one file or one stage may still spend, over all its chunks and requests: rounds of failures, or bytes asked for twice."""

    left: int
    used: int = 0

    def spend(self, cost: int = 1) -> bool:
        """So much more; False when that is too much, and nothing is spent."""
        if cost > self.left:
            return False
        self.left -= cost
        self.used += cost
        return True


@dataclass(slots=True)
class FailureRounds:
    """The failures of all requests of one file or one stage, in rounds. Times are seconds of any clock that does not go back.

    A round begins with a failure, and ends when a request that was sent after that arrives. So an outage is one round, however
    long it is and however many requests it fails. Without a bound on rounds an upstream that fails every second request could
    make a file of a thousand chunks cost thousands of requests.
    """

    allowance: Allowance
    _began: float = field(default=float("-inf"), init=False)  # of the last round
    _is_under_way: bool = field(default=False, init=False)

    @classmethod
    def of(cls, chunks: int) -> Self:
        """For so many chunks: ten rounds, and one more for every tenth chunk."""
        return cls(Allowance(_FREE_ROUNDS + chunks // _CHUNKS_PER_ROUND))

    def failed(self, sent: float, now: float) -> bool:
        """A request that was sent then has failed. False when that is a round too many."""
        if self._is_under_way or sent <= self._began:
            return True
        self._is_under_way, self._began = True, now
        return self.allowance.spend()

    def arrived(self, sent: float) -> None:
        """A request that was sent then has succeeded."""
        if sent > self._began:
            self._is_under_way = False


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
