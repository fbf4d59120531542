"""How many requests one host is asked at once: as many as pay off, and fewer as soon as it is too much for the host.

Additive increase and multiplicative decrease, steered by what an increase brings: a limit that only grew would find the collapse
of the host. The same holds for the threads that carry chunks to a disk.
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

_LEAST_CHANGE: Final = log(1.08)  # of the number in flight; a smaller one tells nothing


@dataclass(frozen=True, slots=True)
class Measure:
    """One window. ``in_flight`` is the mean while anything was; ``_rates`` and ``_seconds`` are by kind, small and large.

    A small request is judged by the time it takes and a large one by its bytes per second, each against its own kind: a
    host is not slower because large files are followed by small ones.
    """

    in_flight: float
    _rates: Mapping[bool, float]
    _seconds: Mapping[bool, float]

    def speed_against(self, before: Measure) -> float | None:
        """What one request gets, as a multiple of what it got before; None where the two cannot be compared."""
        kinds = self._rates.keys() & before._rates.keys()
        seconds = sum(self._seconds[kind] for kind in kinds)
        if not seconds:
            return None
        return sum(self._rates[kind] / before._rates[kind] * self._seconds[kind] / seconds for kind in kinds)

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
        self._amounts = {False: 0.0, True: 0.0}  # requests that were small, bytes of those that were not
        self._seconds = {False: 0.0, True: 0.0}
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
        rates = {
            kind: self._amounts[kind] / spent for kind, spent in self._seconds.items() if self._amounts[kind] and spent
        }
        busy = self.seconds(now)
        if not (rates and busy > 0 and self._request_seconds):
            return None
        return Measure(self._request_seconds / busy, rates, self._seconds)


_SLOWER: Final = 0.7  # a request that gets less than this share of what it got: the host has become slower
_FASTER: Final = 1.3
_FAILING: Final = 0.1  # share of failures from which they are taken for congestion
_CUT: Final = 0.7
_SHORTEST_SECONDS: Final = 0.25  # of a window
_LONG_SECONDS: Final = 5.0  # a shorter window holds two requests of each slot, a longer one holds one
_SHORTEST_HOLD: Final = 4  # windows
_LONGEST_HOLD: Final = 16


class Outcome(Enum):
    """How a request ended."""

    ARRIVED = auto()
    ANSWERED = auto()  # otherwise, by a host that is well: it says nothing about the pace
    FAILED = auto()  # 5xx, a reset, a timeout: congestion when there are many of them
    REFUSED = auto()  # 429, or any answer that asks to come back later


def outcome_of(error: BaseException) -> Outcome:
    """How a request ended that raised this."""
    asked = asked_to_wait(error) if isinstance(error, BdnError) else None
    if asked is not None or isinstance(error, UpstreamRateLimitedError):
        return Outcome.REFUSED
    if isinstance(error, UpstreamUnavailableError) and error.transient:
        return Outcome.FAILED
    return Outcome.ANSWERED


@dataclass(frozen=True, slots=True)
class PaceRule:
    """``most`` at once, ``first`` before anything is known, never fewer than ``least``.

    Whatever a host asks for, it is looked at again after ``longest_pause_seconds``.
    """

    most: int
    first: int = 4
    least: int = 1
    worthwhile: float = 0.2  # the elasticity of goodput from which on more requests in flight are kept
    longest_pause_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class _Trial:
    """Another limit is being tried; this is what there was before."""

    limit: int
    measure: Measure


class Pace:
    """The pace of one host. Not thread-safe; the caller says what time it is.

    ``limit`` is between the rule's least and its most. ``closed_until`` is when the host may be asked again, over all jobs.
    """

    def __init__(self, rule: PaceRule, now: float) -> None:
        self._rule = rule
        self.limit = max(rule.least, min(rule.first, rule.most))
        self.closed_until = now
        self.slots = 0
        self.active = 0
        self._window = Window(now, 0)
        self._is_used_up = False  # an unused limit is neither raised nor judged
        self._settling = 0  # requests in flight that were sent under another limit, and tell nothing about this one
        self._known: Measure | None = None  # what this limit gave, if it was used up
        self._trial: _Trial | None = None
        self._is_steep = True  # nothing is known yet: double
        self._wait = 0  # windows until the next trial
        self._hold = _SHORTEST_HOLD
        self._next_is_up = True

    @property
    def is_full(self) -> bool:
        """Whether nobody else may start now."""
        return self.slots >= self.limit

    def take(self) -> None:
        """Somebody starts, who has one request in flight at a time."""
        self.slots += 1
        self._is_used_up = self._is_used_up or self.is_full

    def give_back(self) -> None:
        """Somebody has come to an end."""
        self.slots -= 1

    def began(self, now: float) -> None:
        """A request was sent."""
        self._window.advance(now, 1)
        self.active += 1

    def ended(
        self, now: float, outcome: Outcome, size: int, seconds: float, retry_after_seconds: float | None = None
    ) -> None:
        """A request came to its end, brought ``size`` bytes, and took so long; nobody asks before ``retry_after_seconds``."""
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
        # Two rounds of a slow host would take minutes, in which it has too much all the time.
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
        """A slot has to earn its keep: of two limits the higher one, if that is worth it, and otherwise the lower one."""
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
        if following == self.limit:  # the end of the scale; there is only the other direction
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
