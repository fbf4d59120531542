"""The clock by which all processes of one database date and compare its rows.

One process decides on claims, commands and the liveness of agents from what another process wrote: with clocks five
minutes apart, each would consider the other dead.
"""

import time
from collections.abc import Callable
from typing import Final

_LONGEST_SECONDS: Final = 1.0  # a slower answer is too imprecise


class DatabaseClock:
    """Seconds since the epoch by the database's clock, once it is known; by this machine's clock until then.

    Between two answers it advances by ``elapsed``, which cannot be set: a step of this machine's clock does not count.
    """

    def __init__(self, clock: Callable[[], float], elapsed: Callable[[], float] = time.monotonic) -> None:
        self.elapsed = elapsed
        self._clock = clock
        self._told: tuple[float, float] | None = None  # a time by ``elapsed``, and the database's time then

    def __call__(self) -> float:
        if self._told is None:
            return self._clock()
        at, showed = self._told
        return showed + self.elapsed() - at

    def set(self, told: float, asked_at: float) -> None:
        """Set the clock by an answer that was requested at ``asked_at``, by ``elapsed``. Slow answers are dropped."""
        answered_at = self.elapsed()
        if self._told is None or answered_at - asked_at <= _LONGEST_SECONDS:
            self._told = (asked_at + answered_at) / 2, told
