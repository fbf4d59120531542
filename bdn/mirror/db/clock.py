"""The time by which all processes of one database date its rows, and compare them.

Claims, commands and the liveness of agents are decided by one process from what another has written: with clocks five minutes
apart, each would take the other for dead.
"""

import time
from collections.abc import Callable
from typing import Final

KEPT_SECONDS: Final = 60.0  # clocks drift slowly
_LONGEST_SECONDS: Final = 1.0  # an answer that took longer tells too little


class DatabaseClock:
    """Seconds since the epoch by the database's machine, as far as this process knows its clock; by our own until then.

    Once it was told, it counts on by ``elapsed``, which nobody sets: a step of this machine's clock is no time that passes.
    """

    def __init__(self, clock: Callable[[], float], elapsed: Callable[[], float] = time.monotonic) -> None:
        self.elapsed = elapsed
        self._clock = clock
        self._told: tuple[float, float] | None = None  # when, by ``elapsed``, the database's clock showed what

    def __call__(self) -> float:
        """What rows are dated by."""
        if self._told is None:
            return self._clock()
        at, showed = self._told
        return showed + self.elapsed() - at

    def is_old(self) -> bool:
        """Whether the database should be asked for its time again."""
        return self._told is None or self.elapsed() - self._told[0] >= KEPT_SECONDS

    def set(self, told: float, asked_at: float) -> None:
        """The database has told its time, when it was asked at ``asked_at`` by ``elapsed``."""
        answered_at = self.elapsed()
        if self._told is None or answered_at - asked_at <= _LONGEST_SECONDS:
            self._told = (asked_at + answered_at) / 2, told
