"""How many byte threads and tasks may ask one upstream host now: its pace, made to wait for.

The pace decides; here is who waits, and where a request's failure becomes what the pace is told.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from bdn.core.errors import BdnError, UpstreamRateLimitedError, UpstreamUnavailableError
from bdn.core.pace.limit import Outcome, Pace, PaceRule
from bdn.core.pace.retry import asked_to_wait

Pause = Callable[[float], Awaitable[None]]
LONGEST_PAUSE_SECONDS: Final = 300.0
_SPREAD_SECONDS: Final = 0.5  # after a pause, so that not everybody is back in the same instant


@dataclass
class UpstreamTotals:
    """What this process has done to its upstreams, for the metrics."""

    requests: Counter[Outcome] = field(default_factory=Counter)
    retries: int = 0
    pauses: int = 0
    pause_seconds: float = 0.0


@dataclass(frozen=True)
class Conditions:
    """What all hosts' budgets have in common.

    Args:
        rule: of every host's pace.
        pause: waits.
        clock: seconds that never go back.
        draw: uniform in [0, 1).
    """

    rule: PaceRule
    pause: Pause
    clock: Callable[[], float]
    draw: Callable[[], float]
    totals: UpstreamTotals = field(default_factory=UpstreamTotals)


class Budget:
    """The budget of one host. Slots are given on the event loop, in the order of asking; requests may run in any thread."""

    def __init__(self, host: str, conditions: Conditions) -> None:
        self.host = host
        self._conditions = conditions
        self._pace = Pace(conditions.rule, conditions.clock())
        self._lock = threading.Lock()  # around every change of the pace
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def limit(self) -> int:
        """How many may ask at once, now."""
        return self._pace.limit

    @property
    def slots(self) -> int:
        """How many do."""
        return self._pace.slots

    @property
    def closed_until(self) -> float:
        """When the host may be asked again; in the past where it asked for nothing."""
        return self._pace.closed_until

    @property
    def is_idle(self) -> bool:
        """Whether nothing but what was learned would be lost if this budget were forgotten."""
        return not (self._pace.slots or self._waiting or self.closed_until > self._conditions.clock())

    def slot(self, longest_pause_seconds: float = LONGEST_PAUSE_SECONDS) -> _Entry:
        """``async with budget.slot() as slot``: the right to have one request in flight, one after the other.

        Waits for the limit, and for the end of a pause that the host asked for.

        Raises:
            UpstreamRateLimitedError: the pause is too long to wait for; nothing is sent.
        """
        return _Entry(self, longest_pause_seconds)

    async def take(self, longest_pause_seconds: float) -> Slot:
        """A slot that has to be given back; ``slot`` does."""
        while True:
            seen = await self._until_open(longest_pause_seconds)
            await self._until_free()
            if self.closed_until <= seen:
                return Slot(self, seen)
            self.give_back()  # while this one waited for its turn, the host asked everybody to wait

    def give_back(self) -> None:
        """The end of a slot."""
        with self._lock:
            self._pace.give_back()
        self._admit()

    def began(self) -> float:
        """A request is sent; returns the time."""
        with self._lock:
            now = self._conditions.clock()
            self._pace.began(now)
        return now

    def ended(self, outcome: Outcome, size: int, began: float, retry_after_seconds: float | None) -> None:
        """The request ended."""
        with self._lock:
            now, before = self._conditions.clock(), self._pace.limit
            self._pace.ended(now, outcome, size, now - began, retry_after_seconds)
            self._conditions.totals.requests[outcome] += 1
            is_higher = self._pace.limit > before
        if is_higher and self._loop is not None:
            self._loop.call_soon_threadsafe(self._admit)

    async def _until_open(self, longest_pause_seconds: float) -> float:
        """Wait while the host is closed; returns the latest time for which that was looked at.

        A pause is waited for once: who has waited does not ask the clock whether that was true.
        """
        conditions = self._conditions
        seen = conditions.clock()
        while (until := self.closed_until) > seen:
            seconds = until - conditions.clock()
            if seconds > longest_pause_seconds:
                raise UpstreamRateLimitedError(self.host, seconds)
            conditions.totals.pauses += 1
            conditions.totals.pause_seconds += seconds
            await conditions.pause(seconds + _SPREAD_SECONDS * conditions.draw())
            seen = until
        return seen

    async def _until_free(self) -> None:
        if not self._waiting and not self._pace.is_full:
            with self._lock:
                self._pace.take()
            return
        self._loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()  # it was given a slot in the same instant
            else:
                with suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    def _admit(self) -> None:
        while self._waiting and not self._pace.is_full:
            turn = self._waiting.popleft()
            if not turn.done():
                with self._lock:
                    self._pace.take()
                turn.set_result(None)


class _Entry:
    """The block of a slot. A class of its own, because a generator would cost as much again as the rest."""

    __slots__ = ("_budget", "_longest")

    def __init__(self, budget: Budget, longest_pause_seconds: float) -> None:
        self._budget = budget
        self._longest = longest_pause_seconds

    async def __aenter__(self) -> Slot:
        return await self._budget.take(self._longest)

    async def __aexit__(self, *_: object) -> None:
        self._budget.give_back()


class Slot:
    """One of the places at a host. Its holder asks as often as it likes, but one request at a time."""

    __slots__ = ("_budget", "_seen")

    def __init__(self, budget: Budget, seen: float) -> None:
        self._budget = budget
        self._seen = seen

    @property
    def is_open(self) -> bool:
        """False once the host has asked everybody to wait: who has more to ask gives the slot back and takes another."""
        return self._budget.closed_until <= self._seen

    def asking(self) -> Asking:
        """``with slot.asking() as asked``: exactly one request. What it raises is told to the pace, and raised."""
        return Asking(self._budget)


class Asking:
    """One request. ``size`` is what arrived of its body; whoever reads the body sets it."""

    __slots__ = ("_began", "_budget", "size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.size = 0

    def __enter__(self) -> Self:
        self._began = self._budget.began()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        asked = asked_to_wait(error) if isinstance(error, BdnError) else None
        self._budget.ended(_outcome(error, asked), self.size, self._began, asked)


def _outcome(error: BaseException | None, asked: float | None) -> Outcome:
    if error is None:
        return Outcome.ARRIVED
    if asked is not None or isinstance(error, UpstreamRateLimitedError):
        return Outcome.REFUSED
    if isinstance(error, UpstreamUnavailableError) and error.transient:
        return Outcome.FAILED
    return Outcome.ANSWERED
