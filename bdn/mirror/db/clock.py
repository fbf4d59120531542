"""The time by which all processes of one database date its rows, and compare them.

Claims, commands and the liveness of agents are decided by one process from what another has written: with clocks five minutes
apart, each would take the other for dead.
"""

import time
from collections.abc import Callable
from typing import Final

KEPT_SECONDS: Final = 60.0  # clocks drift slowly, and are set seldom
_LONGEST_SECONDS: Final = 1.0  # an answer that took longer tells too little


class DatabaseClock:
    """Seconds since the epoch by the database's machine, as far as this process knows its clock; by our own until then."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ahead = 0.0
        self._set_at: float | None = None

    def __call__(self) -> float:
        """What rows are dated by."""
        return self._clock() + self._ahead

    def own(self) -> float:
        """What the clock of this machine says, by which its files are dated."""
        return self._clock()

    def is_old(self) -> bool:
        """Whether the database should be asked for its time again."""
        return self._set_at is None or time.monotonic() - self._set_at >= KEPT_SECONDS

    def set(self, told: float, asked_at: float) -> None:
        """The database has told its time, when it was asked at ``asked_at`` of this machine's clock."""
        answered_at = self._clock()
        if self._set_at is None or answered_at - asked_at <= _LONGEST_SECONDS:
            self._ahead = told - (asked_at + answered_at) / 2
            self._set_at = time.monotonic()
