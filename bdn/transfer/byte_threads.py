"""The threads that move bytes: a bounded number, each with a buffer of its own while it works."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from bdn.core.errors import CanceledError
from bdn.core.pace.limit import Outcome, Pace, PaceRule
from bdn.transfer.buffers import BufferPool


@dataclass(eq=False, slots=True)
class SlotRequest:
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
        self._waiting: deque[SlotRequest] = deque()

    @property
    def limit(self) -> int:
        """How many may receive at once now."""
        return self._pace.limit

    def take(self, turn: SlotRequest) -> bool:
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

    def give_back(self, turn: SlotRequest, outcome: Outcome) -> None:
        """Let the next one receive; nothing is done for a turn without a slot. The pace learns how it went."""
        with self._lock:
            if turn.begun is None:
                return
            now, begun, turn.begun = self._clock(), turn.begun, None
            self._pace.give_back()
            self._pace.ended(now, outcome, turn.size, now - begun)
            while self._waiting and not self._pace.is_full:
                self._call(self._waiting.popleft())

    def withdraw(self, turn: SlotRequest) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            turn.is_withdrawn = True
            if turn in self._waiting:
                self._waiting.remove(turn)
        turn.called.set()

    def _call(self, turn: SlotRequest) -> None:
        turn.begun = self._clock()
        self._pace.take()
        self._pace.began(turn.begun)
        turn.called.set()


_WORTHWHILE: Final = 0.4  # threads that take the processor from each other seem to bring a little
_Result = TypeVar("_Result")


class ByteThreads:
    """At most ``count`` threads and as many buffers. Everybody who shares them waits in one fair queue.

    With ``least``, how many of them receive at once follows what they achieve, up and down and never below that; the others
    write what they have received, or wait. Without it nobody waits, because somebody else decides how many requests pay off.
    """

    def __init__(
        self, count: int, name: str, *, least: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = count
        self._buffers = BufferPool(count)
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        least = count if least is None else min(least, count)
        self._slots = Slots(Pace(PaceRule(count, least=least, worthwhile=_WORTHWHILE), clock()), clock)
        self._here = threading.local()
        self._in_hand = 0

    @property
    def limit(self) -> int:
        """How many may receive at once now."""
        return self._slots.limit

    @property
    def buffers(self) -> int:
        """How many buffers there are now, of 8 MiB each."""
        return self._buffers.made

    async def run(
        self, size: int, work: Callable[[memoryview], _Result], on_cancel: Callable[[], None] | None = None
    ) -> _Result:
        """``work`` on a buffer of ``size`` bytes, in a thread.

        Cancelling waits for the thread: a thread that is left behind would still write where its caller has cleaned up.
        ``on_cancel`` may tell it to hurry.
        """
        self._begin()
        turn = SlotRequest(size)
        future = self._executor.submit(self._work, turn, work)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if on_cancel is not None:
                on_cancel()
            if not future.cancel():
                self._slots.withdraw(turn)
                await _ended(waiter)
            raise
        finally:
            self._end()

    def received(self) -> None:
        """To be called by work that has received all its bytes: what it still does is the disk's, and another may receive.

        Network and disk are kept busy at the same time that way, by few threads.
        """
        turn = getattr(self._here, "turn", None)
        if turn is not None:
            self._slots.give_back(turn, Outcome.ARRIVED)

    def _work(self, turn: SlotRequest, work: Callable[[memoryview], _Result]) -> _Result:
        if not self._slots.take(turn):
            raise CanceledError("the transfer")  # which nobody hears
        self._here.turn = turn
        outcome = Outcome.ANSWERED
        try:
            with self._buffers.take(turn.size) as buffer:
                result = work(buffer)
            outcome = Outcome.ARRIVED
            return result
        finally:
            self._here.turn = None
            self._slots.give_back(turn, outcome)

    def _begin(self) -> None:
        if not self._in_hand:
            self._buffers.keep(self.count)
        self._in_hand += 1

    def _end(self) -> None:
        """Who has nothing to do holds no more memory than those who may receive will need."""
        self._in_hand -= 1
        if not self._in_hand:
            self._buffers.keep(self._slots.limit)

    def close(self) -> None:
        """Wait for the threads to end."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _ended(waiter: asyncio.Future[_Result]) -> None:
    """Wait for the thread whatever happens: being cancelled once more, as by a second Ctrl-C, does not end it sooner."""
    while not waiter.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.exception()  # it is lost with the cancellation, and known to be
