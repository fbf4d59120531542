"""How long a fill waits for one source: for a sign of life, for bytes at all, and for bytes as fast as they usually come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self

from bdn.core.errors import CanceledError, StoreUnavailableError
from bdn.core.streaming import StallPolicy, StallWindow

Clock = Callable[[], float]

_PEER_SILENCE_SECONDS: Final = 5.0  # a peer that works on an answer says so every second
_MIRROR_SILENCE_SECONDS: Final = 20.0

_HELD = 2.0  # so many limits we wait for a late peer, when nothing more may be asked for twice


class LateError(Exception):
    """The peer is to be left, and the rest asked for elsewhere. Never seen outside of a fill.

    ``failure`` is empty when a limit has passed and the stage may still ask for bytes a second time.
    """

    def __init__(self, failure: str = "") -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds until an answer should begin, and from then on until it should have come."""

    head_seconds: float
    body_seconds: float


@dataclass(slots=True)
class SourcePatience:
    """The ``Patience`` with one request for ``size`` bytes.

    A source has ``limits`` when there is another one. Head and body are judged apart: an owner that waits for the mirror
    says that it is alive, and asking another one too soon would make the mirror send the chunk twice; but an owner whose link
    is slow is slow with the mirror as well. When a limit has passed, ``may_leave`` is asked with the bytes that are missing;
    refused, the request goes on for as long again and then fails. Once ``is_at_fault``, because another request to the same
    peer was left, this one ends as well unless it will be in time: what is slow is its link, not that one chunk.
    """

    size: int
    stop: threading.Event
    silence_seconds: float
    limits: Callable[[], Limits] | None = None  # asked at each judgement: what others achieve meanwhile counts
    may_leave: Callable[[int], bool] = lambda _: True
    is_at_fault: Callable[[], bool] = lambda: False
    stall: StallPolicy = field(default_factory=StallPolicy)
    clock: Clock = time.monotonic
    _asked: float = field(init=False)
    _heard: float = field(init=False)
    _window: StallWindow | None = field(default=None, init=False)
    _begun: float | None = field(default=None, init=False)
    _is_held: bool = field(default=False, init=False)  # late, and not allowed to leave

    def __post_init__(self) -> None:
        self._asked = self._heard = self.clock()

    @classmethod
    def with_peer(
        cls,
        size: int,
        stop: threading.Event,
        limits: Callable[[], Limits],
        may_leave: Callable[[int], bool],
        is_at_fault: Callable[[], bool],
        clock: Clock,
    ) -> Self:
        """With a peer, whom we leave for another source when it is late."""
        return cls(size, stop, _PEER_SILENCE_SECONDS, limits, may_leave, is_at_fault, clock=clock)

    @classmethod
    def with_mirror(cls, size: int, stop: threading.Event) -> Self:
        """With the mirror, behind which there is nobody."""
        return cls(size, stop, _MIRROR_SILENCE_SECONDS)

    @property
    def has_begun(self) -> bool:
        """Whether the head of the answer came."""
        return self._begun is not None

    @property
    def taken(self) -> Limits:
        """How long head and body took, up to now."""
        now = self.clock()
        begun = now if self._begun is None else self._begun
        return Limits(begun - self._asked, now - begun)

    def waiting(self) -> None:
        """Raises ``LateError`` when a peer is to be left, ``StoreUnavailableError`` when the mirror is silent for too long."""
        self._check_stop()
        if (silence := self.clock() - self._heard) >= self.silence_seconds:
            self._fail(f"no sign of life for {silence:.1f} s")
        if self.limits is not None:
            if self.is_at_fault():
                self._fail("others wait for it in vain")
            self._judge(self.taken.head_seconds, self.limits().head_seconds, self.size)

    def at_work(self) -> None:
        """A sign of life."""
        self._heard = self.clock()

    def receiving(self, count: int) -> None:
        """Raises ``LateError`` when a peer is to be left, ``StoreUnavailableError`` when the mirror's body has stalled."""
        self._check_stop()
        now = self.clock()
        if self._window is None:
            self._window = StallWindow(self.stall, self.size, now)
            self._begun, self._is_held = now, False
        if slow := self._window.judge(count, now):
            self._fail(slow)
        if self.limits is not None:
            seconds, limit, missing = self.taken.body_seconds, self.limits().body_seconds, self._window.missing
            if self.is_at_fault() and seconds * self.size > limit * (self.size - missing):
                self._fail(f"too slow, as others: {missing} bytes are missing after {seconds:.1f} s")
            self._judge(seconds, limit, missing)

    def _judge(self, seconds: float, limit: float, missing: int) -> None:
        if seconds >= limit and not self._is_held:
            if self.may_leave(missing):
                raise LateError
            self._is_held = True
        if seconds >= _HELD * limit:
            self._fail(f"too slow: {missing} bytes are missing after {seconds:.1f} s")

    def _fail(self, reason: str) -> None:
        raise LateError(reason) if self.limits is not None else StoreUnavailableError(reason)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise CanceledError("the transfer")
