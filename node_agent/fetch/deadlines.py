"""How long a fill waits for one source: for a sign of life, for bytes at all, and for bytes as fast as they usually come."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final, Self

from bdn.core.errors import CanceledError, StoreUnavailableError
from bdn.core.pace.retry import StallPolicy, StallWindow
from bdn.net.http1.answer import TICK_SECONDS

Clock = Callable[[], float]

_HELD_SECONDS: Final = 5.0  # and as long again we wait for a late peer, when nothing more may be asked for twice

# A link that is as slow as one in trouble is told from a busy one by what it brings, in multiples of what is usual: after
# the first of these at the earliest, when the whole would take longer than the last; the one between is for a peer at fault.
# An owner that twenty ask at once for the chunk that it has just read takes six times as long as is usual: whoever leaves it
# finds nobody else who has that chunk, and the mirror sends it once more.
_TRIED: Final = 1.5
_LATE: Final = 2.0
_HOPELESS: Final = 8.0


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest that nothing may come before a source is given up.

    A peer that works on an answer says so every second, over a link that may be full. ``document_seconds`` are for a manifest
    or a layout from the mirror: the first time that it is asked, when peers may have it, and later.
    """

    peer_seconds: float = 10.0
    mirror_seconds: float = 20.0
    stall: StallPolicy = field(default_factory=StallPolicy)
    document_seconds: tuple[float, float] = (10.0, 90.0)


class LateError(Exception):
    """The peer is to be left, and the rest asked for elsewhere. Never seen outside of a fill.

    ``failure`` is empty when a limit has passed and the stage may still ask for bytes a second time. ``is_fault`` is whether
    the peer is to blame; it is not when we have nothing else to do than to ask elsewhere.
    """

    def __init__(self, failure: str = "", *, is_fault: bool = True) -> None:
        super().__init__(failure)
        self.failure = failure
        self.is_fault = is_fault


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds until an answer should begin, and from then on until it should have come; and what a body usually takes.

    The last is for the end of a stage: when an answer that has not begun may be asked for elsewhere.
    """

    head_seconds: float
    body_seconds: float
    usual_seconds: float = inf
    ending_head_seconds: float = inf


@dataclass(frozen=True, slots=True)
class Alternative:
    """There is another source to go to: how late this one may be, and what is to be asked before it is left.

    ``limits`` are asked for at each judgement, because what others achieve meanwhile counts. ``may_leave`` is told the bytes
    that would be asked for again; ``is_ending`` is whether the stage has nothing else left to ask of peers.
    """

    limits: Callable[[], Limits]
    may_leave: Callable[[int], bool]
    is_at_fault: Callable[[], bool]
    is_ending: Callable[[], bool] = lambda: False


_USUAL: Final = Waits()


@dataclass(slots=True)
class SourceDeadline:
    """How long one request for ``size`` bytes is waited for (an ``AnswerDeadline``).

    One that has an ``alternative`` is left when it is late. Head and body are judged apart: an owner that waits for the mirror
    says that it is alive, and asking another one too soon would make the mirror send the chunk twice; but an owner whose link
    is slow is slow with the mirror as well. A body is late, too, when the whole would take many times what is usual, at the
    pace up to now. Once ``is_at_fault``, because another request to the same peer was late, this one is late as well unless it
    will be in time: what is slow is a link, and seldom one chunk. One that is late and may not be left goes on for as long
    again and then fails; to a peer that was at fault before, it fails at once. Towards the end of a stage a node waits less long for
    answers to begin: its last chunks would else be those of the slowest peer, whom nobody had the time to find out.
    """

    size: int
    stop: threading.Event
    silence_seconds: float
    alternative: Alternative | None = None
    stall: StallPolicy = field(default_factory=StallPolicy)
    clock: Clock = time.monotonic
    _asked: float = field(init=False)
    _heard: float = field(init=False)
    _window: StallWindow | None = field(default=None, init=False)
    _begun: float | None = field(default=None, init=False)
    _held_until: float | None = field(default=None, init=False)  # late, and not allowed to leave
    _unjudged: int = field(default=0, init=False)  # bytes
    _next: float = field(default=0.0, init=False)  # when the body is judged again

    def __post_init__(self) -> None:
        self._asked = self._heard = self.clock()

    @classmethod
    def of_peer(
        cls, size: int, stop: threading.Event, alternative: Alternative, clock: Clock, waits: Waits = _USUAL
    ) -> Self:
        """Of a request to a peer, which is left for another source when it is late."""
        return cls(size, stop, waits.peer_seconds, alternative, waits.stall, clock)

    @classmethod
    def of_mirror(cls, size: int, stop: threading.Event, clock: Clock = time.monotonic, waits: Waits = _USUAL) -> Self:
        """Of a request to the mirror, behind which there is nobody."""
        return cls(size, stop, waits.mirror_seconds, stall=waits.stall, clock=clock)

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
        if (other := self.alternative) is not None:
            seconds, limits = self.taken.head_seconds, other.limits()
            if seconds >= limits.ending_head_seconds and other.is_ending():
                raise LateError(is_fault=False)
            is_late = seconds >= limits.head_seconds or other.is_at_fault()
            self._judge(other, seconds, 0, is_late=is_late)  # nothing came: nothing comes twice

    def at_work(self) -> None:
        """A sign of life."""
        self._heard = self.clock()

    def receiving(self, count: int) -> None:
        """Raises ``LateError`` when a peer is to be left, ``StoreUnavailableError`` when the mirror's body has stalled."""
        self._check_stop()
        now = self.clock()
        if self._window is None or self._begun is None:
            self._window = StallWindow(self.stall, self.size, now)
            self._begun, self._held_until = now, None
        self._unjudged += count
        if now < self._next:  # bytes come in small pieces where the link is slow, and there is little to say about each
            return
        self._next = now + TICK_SECONDS
        count, self._unjudged = self._unjudged, 0
        if slow := self._window.judge(count, now):
            self._fail(slow)
        if self.alternative is not None:
            self._judge_body(self.alternative, now - self._begun, self._window.missing)

    def _judge_body(self, other: Alternative, seconds: float, missing: int) -> None:
        limits = other.limits()
        usual, at_this_pace = limits.usual_seconds, seconds * self.size / max(1, self.size - missing)
        is_hopeless = seconds >= _TRIED * usual and at_this_pace > _HOPELESS * usual
        is_late_as_others = at_this_pace > min(_LATE * usual, limits.body_seconds) and other.is_at_fault()
        is_late = seconds >= limits.body_seconds or is_hopeless or is_late_as_others
        self._judge(other, seconds, missing, is_late=is_late)

    def _judge(self, other: Alternative, seconds: float, missing: int, *, is_late: bool) -> None:
        if is_late and self._held_until is None:
            was_at_fault = other.is_at_fault()
            if other.may_leave(missing):
                raise LateError
            if was_at_fault:  # what waits for a peer that is known to be in trouble waits in vain
                self._fail("others had to leave it")
            self._held_until = 2 * seconds + _HELD_SECONDS
        if self._held_until is not None and seconds >= self._held_until:
            self._fail(f"too slow: not done after {seconds:.1f} s")

    def _fail(self, reason: str) -> None:
        raise LateError(reason) if self.alternative is not None else StoreUnavailableError(reason)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise CanceledError("the transfer")
