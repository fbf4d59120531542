"""How slow a body may come, and how often what is missing of a range is asked for again before its caller hears of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """A body that brings less than ``least_bytes`` in ``window_seconds`` has stalled.

    64 KiB in 10 s are 6.5 KB/s. A trickle of 1 KB/s is cut after one window, while one of a hundred connections on a link of
    1 MB/s still has its share. A window shorter than a few seconds would cut links that lose a packet and wait for it twice
    (RFC 6298: a retransmission waits 1 s, then 2 s, then 4 s).
    """

    least_bytes: int = 64 * 1024
    window_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.least_bytes < 1 or self.window_seconds <= 0:
            msg = f"not a stall policy: {self.least_bytes} bytes in {self.window_seconds} s"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """A range that breaks off is gone on with at once, where it broke off, as long as that brings bytes.

    ``resumes`` bounds it: an upstream that drops every connection after a few bytes is asked at most so often in a row.
    ``poor_stalls`` is how many connections may stall with less than a window's bytes; the next one is the caller's affair,
    who waits before he tries again.
    """

    resumes: int = 16
    poor_stalls: int = 1


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
