"""What a stretch of requests to one host told about the host: how much each request got, with so many in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Final

from bdn.core.store.slabs import SMALL_FILE_SIZE

_LEAST_CHANGE: Final = log(1.08)  # of the number in flight; a smaller one tells nothing


@dataclass(frozen=True, slots=True)
class _Share:
    amount: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


@dataclass(frozen=True, slots=True)
class Measure:
    """One window. ``in_flight`` is the mean while anything was; ``_shares`` what small and large requests achieved.

    A small request is judged by the time it takes and a large one by its bytes per second, each against its own kind: a
    host is not slower because large files are followed by small ones.
    """

    in_flight: float
    _shares: Mapping[bool, _Share]

    def speed_against(self, before: Measure) -> float | None:
        """What one request gets, as a multiple of what it got before; None where the two cannot be compared."""
        kinds = self._shares.keys() & before._shares.keys()
        seconds = sum(self._shares[kind].seconds for kind in kinds)
        if not seconds:
            return None
        return sum(
            self._shares[kind].rate / before._shares[kind].rate * self._shares[kind].seconds / seconds for kind in kinds
        )

    def worth_against(self, before: Measure) -> float | None:
        """What a change of the number in flight did to goodput: 1 all that it could, 0 nothing, below 0 harm.

        It is the elasticity of goodput: with n times as many in flight, goodput became n ** worth times as much. None where
        the two windows cannot be compared.
        """
        speed = self.speed_against(before)
        change = log(self.in_flight / before.in_flight)
        if not speed or abs(change) < _LEAST_CHANGE:
            return None
        return 1 + log(speed) / change


class Window:
    """Collects one measure. Times are seconds of any clock that does not go back."""

    def __init__(self, now: float, active: int) -> None:
        self._start = now
        self._active = active
        self._last = now
        self._idle = 0.0
        self._request_seconds = 0.0
        self._amounts = [0.0, 0.0]  # requests that were small, bytes of those that were not
        self._seconds = [0.0, 0.0]
        self.ended = 0
        self.failed = 0

    def advance(self, now: float, change: int) -> None:
        """The number in flight changes."""
        passed = now - self._last
        if self._active:
            self._request_seconds += passed * self._active
        else:
            self._idle += passed
        self._last = now
        self._active += change

    def arrived(self, size: int, seconds: float) -> None:
        """A request brought ``size`` bytes."""
        is_large = size >= SMALL_FILE_SIZE
        self._amounts[is_large] += size if is_large else 1
        self._seconds[is_large] += seconds

    def seconds(self, now: float) -> float:
        """How long anything was in flight."""
        return now - self._start - self._idle

    def measure(self, now: float) -> Measure | None:
        """None when nothing arrived."""
        shares = {
            bool(kind): _Share(self._amounts[kind], self._seconds[kind])
            for kind in (0, 1)
            if self._amounts[kind] and self._seconds[kind] > 0
        }
        busy = self.seconds(now)
        return Measure(self._request_seconds / busy, shares) if shares and busy > 0 and self._request_seconds else None
