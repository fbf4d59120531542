"""Which threads may receive now: as many at once as pay off, in the order in which they came."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bdn.core.pace.limit import Outcome, Pace


@dataclass(eq=False, slots=True)
class Turn:
    """One thread's request to receive ``size`` bytes."""

    size: int
    called: threading.Event = field(default_factory=threading.Event)
    is_withdrawn: bool = False
    begun: float | None = None  # while it holds a slot


class Slots:
    """The pace's slots for threads. A slot is handed over to who waits for longest, so that nobody overtakes."""

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = pace
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[Turn] = deque()

    @property
    def limit(self) -> int:
        """How many may receive at once now."""
        return self._pace.limit

    def take(self, turn: Turn) -> bool:
        """Wait for a slot. False, without one, when the turn is withdrawn."""
        with self._lock:
            if not self._waiting and not self._pace.is_full:
                self._call(turn)
            else:
                self._waiting.append(turn)
        turn.called.wait()
        if is_withdrawn := turn.is_withdrawn:  # looked at once: who withdraws after this look finds a thread at work
            self.give_back(turn, Outcome.ANSWERED)
        return not is_withdrawn

    def give_back(self, turn: Turn, outcome: Outcome) -> None:
        """Let the next one receive; nothing is done for a turn without a slot. The pace learns how it went."""
        with self._lock:
            if turn.begun is None:
                return
            now, begun, turn.begun = self._clock(), turn.begun, None
            self._pace.give_back()
            self._pace.ended(now, outcome, turn.size, now - begun)
            while self._waiting and not self._pace.is_full:
                self._call(self._waiting.popleft())

    def withdraw(self, turn: Turn) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            turn.is_withdrawn = True
            if turn in self._waiting:
                self._waiting.remove(turn)
        turn.called.set()

    def _call(self, turn: Turn) -> None:
        turn.begun = self._clock()
        self._pace.take()
        self._pace.began(turn.begun)
        turn.called.set()
