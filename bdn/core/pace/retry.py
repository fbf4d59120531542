"""When to try again, and after how long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Self, TypeVar

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
        """Seconds to wait after the ``failures``-th failure in a row, or None to give up.

        Args:
            failures: how often this has failed, 1 or more.
            error: the last failure; a permanent one is never repeated.
            random: uniform in [0, 1), drawn by the caller so that tests replay.
        """
        if not error.transient or failures >= self.attempts:
            return None
        jitter = random * min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 64))
        asked = asked_to_wait(error)
        if asked is None:
            return jitter
        return asked + jitter if asked <= self.longest_retry_after_seconds else None


@dataclass(slots=True)
class Allowance:
    """How many failures one file or one stage is still forgiven, over all its chunks and requests.

    Attempts per request alone would let a file of a thousand chunks, from an upstream that fails every other time, cost
    thousands of requests that are thrown away.
    """

    left: int
    used: int = 0

    @classmethod
    def of(cls, chunks: int) -> Self:
        """For so many chunks: ten failures, and one more for every tenth chunk."""
        return cls(_FREE_FAILURES + chunks // _CHUNKS_PER_FAILURE)

    def spend(self) -> bool:
        """One more failure; False when it was one too many."""
        if self.left <= 0:
            return False
        self.left -= 1
        self.used += 1
        return True


_Answer = TypeVar("_Answer")


class AskOnce:
    """An ``Asker`` that knows no limits and never asks again."""

    async def ask(self, url: str, request: Callable[[], Awaitable[_Answer]]) -> _Answer:  # noqa: ARG002
        """The answer or the failure."""
        return await request()


ASK_ONCE: Final = AskOnce()
