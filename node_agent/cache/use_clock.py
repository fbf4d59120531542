"""When manifests were used, in an order that survives a clock that is set."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_STEP_SECONDS: Final = 1e-6  # what a float of seconds since the epoch and a file's time can tell apart


class UseClock:
    """The wall's clock, except that it never goes back nor stands still. Shared by threads.

    A story: the clock is a day ahead, A is used, the clock is set right, B is used. By the wall's clock B was used a day
    before A and would be evicted first. Here B's time is A's and a moment more, until the wall has caught up.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._last = 0.0

    def __call__(self) -> float:
        """Now, in seconds since the epoch, and later than ever before."""
        with self._lock:
            self._last = max(self._wall(), self._last + _STEP_SECONDS)
            return self._last

    def seen(self, at: float) -> None:
        """Something was used at this time, perhaps before this process started."""
        with self._lock:
            self._last = max(self._last, at)
