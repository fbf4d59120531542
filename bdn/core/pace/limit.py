"""Adaptive limit of concurrent requests to one host: as many as increase goodput, fewer at signs of overload.

Additive increase and multiplicative decrease, steered by what each increase gains: a limit that only grew would end in
congestion collapse. The same rule limits the threads that write chunks to a disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from math import log
from typing import Final

from bdn.core.errors import BdnError, UpstreamRateLimitedError, UpstreamUnavailableError
from bdn.core.manifest import SMALL_FILE_SIZE
from bdn.core.pace.retry import asked_to_wait

_LEAST_CHANGE: Final = log(1.08)  # of the number in flight; smaller changes are noise


@dataclass(frozen=True, slots=True)
class Measure:
    """One window.

    ``in_flight`` is the mean while not idle; ``_rates`` and ``_seconds`` are by kind, small and large.

    Small requests are judged by duration and large requests by bytes per second, each against its own kind: a host is
    not slower because large files are followed by small ones.
    """

    in_flight: float
    _rates: Mapping[bool, float]
    _seconds: Mapping[bool, float]

    def speed_against(self, before: Measure) -> float | None:
        """Speed of one request, as a multiple of its speed before; None where the windows cannot be compared."""
        kinds = self._rates.keys() & before._rates.keys()
        seconds = sum(self._seconds[kind] for kind in kinds)
        if not seconds:
            return None
        return sum(self._rates[kind] / before._rates[kind] * self._seconds[kind] / seconds for kind in kinds)

    def worth_against(self, before: Measure) -> float | None:
        """Gain of goodput by a change of the number in flight: 1 proportional, 0 none, below 0 loss.

        The elasticity of goodput: n times as many in flight multiplied goodput by n ** worth. None where the windows
        cannot be compared.
        """
        speed = self.speed_against(before)
        change = log(self.in_flight / before.in_flight)
        if not speed or abs(change) < _LEAST_CHANGE:
            return None
        return 1 + log(speed) / change


class Window:
    """Collects one measure. Times are seconds of a clock that never goes back."""

    def __init__(self, now: float, active: int) -> None:
        self._start = now
        self._active = active
        self._last = now
        self._idle = 0.0
        self._request_seconds = 0.0
        self._amounts = {False: 0.0, True: 0.0}  # small requests as a count, large requests in bytes
        self._seconds = {False: 0.0, True: 0.0}
        self.ended = 0
        self.failed = 0

    def advance(self, now: float, change: int) -> None:
        passed = now - self._last
        if self._active:
            self._request_seconds += passed * self._active
        else:
            self._idle += passed
        self._last = now
        self._active += change

    def arrived(self, size: int, seconds: float) -> None:
        is_large = size >= SMALL_FILE_SIZE
        self._amounts[is_large] += size if is_large else 1
        self._seconds[is_large] += seconds

    def seconds(self, now: float) -> float:
        """Seconds with at least one request in flight."""
        return now - self._start - self._idle

    def measure(self, now: float) -> Measure | None:
        """None when no request arrived."""
        rates = {
            kind: self._amounts[kind] / spent for kind, spent in self._seconds.items() if self._amounts[kind] and spent
        }
        busy = self.seconds(now)
        if not (rates and busy > 0 and self._request_seconds):
            return None
        return Measure(self._request_seconds / busy, rates, self._seconds)


_SLOWER: Final = 0.7  # a request below this share of its earlier speed: the host has become slower
_FASTER: Final = 1.3
_FAILING: Final = 0.1  # share of failures that counts as congestion
_CUT: Final = 0.7
_SHORTEST_SECONDS: Final = 0.25  # length of a window
_LONG_SECONDS: Final = 5.0  # a shorter window holds two requests per slot, a longer window one
_SHORTEST_HOLD: Final = 4  # windows
_LONGEST_HOLD: Final = 16


class Outcome(Enum):
    ARRIVED = auto()
    ANSWERED = auto()  # any other response of a healthy host: does not count for the pace
    FAILED = auto()  # 5xx, a reset, a timeout: congestion when frequent
    REFUSED = auto()  # 429, or any response with ``Retry-After``


def outcome_of(error: BaseException) -> Outcome:
    asked = asked_to_wait(error) if isinstance(error, BdnError) else None
    if asked is not None or isinstance(error, UpstreamRateLimitedError):
        return Outcome.REFUSED
    if isinstance(error, UpstreamUnavailableError) and error.transient:
        return Outcome.FAILED
    return Outcome.ANSWERED


@dataclass(frozen=True, slots=True)
class PaceRule:
    """``most`` at once, ``first`` before any measurement, never fewer than ``least``.

    A host that requests a longer pause is retried after ``longest_pause_seconds``.
    """

    most: int
    first: int = 4
    least: int = 1
    worthwhile: float = 0.2  # the elasticity of goodput from which a higher limit stays
    longest_pause_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class _Trial:
    """The limit and measure before the trial of another limit."""

    limit: int
    measure: Measure


class Pace:
    """The pace of one host. Not thread-safe; the caller passes the time.

    ``limit`` is between the rule's least and most. No job sends the host a request before ``closed_until``.
    """

    def __init__(self, rule: PaceRule, now: float) -> None:
        self._rule = rule
        self.limit = max(rule.least, min(rule.first, rule.most))
        self.closed_until = now
        self.slots = 0
        self.active = 0
        self._window = Window(now, 0)
        self._is_used_up = False  # an unused limit is neither raised nor judged
        self._settling = 0  # requests in flight that were sent under another limit, and so do not count for this one
        self._known: Measure | None = None  # the last measure of this limit, if it was used up
        self._trial: _Trial | None = None
        self._is_steep = True  # no overload seen yet: double
        self._wait = 0  # windows until the next trial
        self._hold = _SHORTEST_HOLD
        self._next_is_up = True

    @property
    def is_full(self) -> bool:
        return self.slots >= self.limit

    def take(self) -> None:
        """Acquire a slot for a sender with one request in flight at a time."""
        self.slots += 1
        self._is_used_up = self._is_used_up or self.is_full

    def give_back(self) -> None:
        self.slots -= 1

    def began(self, now: float) -> None:
        self._window.advance(now, 1)
        self.active += 1

    def ended(
        self, now: float, outcome: Outcome, size: int, seconds: float, retry_after_seconds: float | None = None
    ) -> None:
        """Report the end of a request of ``size`` bytes. ``retry_after_seconds`` closes the host for that time."""
        self._window.advance(now, -1)
        self.active -= 1
        if retry_after_seconds is not None:
            pause = min(retry_after_seconds, self._rule.longest_pause_seconds)
            self.closed_until = max(self.closed_until, now + pause)
        if self._settling:
            self._settling -= 1
            if not self._settling:
                self._restart(now)
            return
        if outcome is Outcome.REFUSED:
            self._cut(now)
            return
        self._window.ended += 1
        self._window.failed += outcome is Outcome.FAILED
        if outcome is Outcome.ARRIVED:
            self._window.arrived(size, seconds)
        seconds, rounds = self._window.seconds(now), self._window.ended / self.limit
        # Two rounds of a slow, overloaded host would take minutes.
        if rounds >= (2 if seconds < _LONG_SECONDS else 1) and seconds >= _SHORTEST_SECONDS:
            self._judge(now)

    def _judge(self, now: float) -> None:
        window, is_used_up = self._window, self._is_used_up
        measure = window.measure(now)
        if window.failed >= _FAILING * window.ended:
            self._cut(now)
        elif measure is None or not is_used_up:
            self._unused(now)
        elif self._trial is not None:
            self._tried(now, self._trial, measure)
        else:
            self._held(now, measure)

    def _unused(self, now: float) -> None:
        if self._trial is not None:
            self.limit = min(self.limit, self._trial.limit)
        self._trial = self._known = None
        self._restart(now)

    def _tried(self, now: float, trial: _Trial, measure: Measure) -> None:
        """Of two limits choose the higher if its extra goodput is worthwhile, otherwise the lower."""
        self._trial = None
        worth = measure.worth_against(trial.measure)
        was_up = self.limit > trial.limit
        if worth is None or (worth >= self._rule.worthwhile) == was_up:
            self._known = measure
            if worth is None:
                self._rest()
            else:
                self._hold = _SHORTEST_HOLD
            self._restart(now)
            return
        self._known = trial.measure
        self._is_steep = False
        self._next_is_up = not was_up
        self._rest()
        self._set(now, trial.limit)

    def _held(self, now: float, measure: Measure) -> None:
        speed = measure.speed_against(self._known) if self._known is not None else None
        self._known = measure
        if speed is not None and speed < _SLOWER:
            self._try(now, measure, min(self.limit - 1, int(self.limit * _CUT)))
        elif speed is not None and speed > _FASTER:
            self._try(now, measure, self._next(is_up=True))
        elif self._wait:
            self._wait -= 1
            self._restart(now)
        else:
            self._try(now, measure, self._next(is_up=self._next_is_up))

    def _next(self, *, is_up: bool) -> int:
        if is_up and self._is_steep:
            return 2 * self.limit
        step = max(1, self.limit // 4)
        return self.limit + step if is_up else self.limit - step

    def _try(self, now: float, measure: Measure, following: int) -> None:
        following = max(self._rule.least, min(following, self._rule.most))
        if following == self.limit:  # at the end of the scale: reverse the direction
            self._next_is_up = not self._next_is_up
            self._rest()
        else:
            self._trial = _Trial(self.limit, measure)
        self._set(now, following)

    def _cut(self, now: float) -> None:
        self._is_steep = False
        self._trial = self._known = None
        self._wait = 1
        self._set(now, min(self.limit - 1, int(self.limit * _CUT)))

    def _rest(self) -> None:
        self._wait = self._hold
        self._hold = min(2 * self._hold, _LONGEST_HOLD)

    def _set(self, now: float, limit: int) -> None:
        self.limit = max(self._rule.least, min(limit, self._rule.most))
        self._settling = self.active
        self._restart(now)

    def _restart(self, now: float) -> None:
        self._window = Window(now, self.active)
        self._is_used_up = self.is_full
