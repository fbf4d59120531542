"""The threads that move bytes: a bounded number, each with a buffer of its own while it works. And how fast they may send.

The buffers are the bound on memory: a thread that finds none waits. They are page-aligned (``mmap``) for direct I/O.
"""

import asyncio
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import CanceledError
from bdn.core.pace.limit import Outcome, Pace, PaceRule
from bdn.core.pace.rate_limit import TokenBucket

_LOOK_SECONDS: Final = 0.1  # how long a waiting thread may overlook that it shall stop


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

    def take(self, turn: SlotRequest, stop: threading.Event | None = None) -> bool:
        """Wait for a slot. False, without one, when the turn is withdrawn; ``stop`` withdraws it."""
        with self._lock:
            if not self._waiting and not self._pace.is_full:
                self._call(turn)
            else:
                self._waiting.append(turn)
        while not turn.called.wait(None if stop is None else _LOOK_SECONDS):
            if stop is not None and stop.is_set():
                self.withdraw(turn)
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


_BURST_SECONDS: Final = 0.25
_LEAST_BURST: Final = 1024 * 1024
_WORTHWHILE: Final = 0.4  # threads that take the processor from each other seem to bring a little
_Result = TypeVar("_Result")


class ByteThreads:
    """At most ``count`` threads and as many buffers. Everybody who shares them waits in one fair queue.

    With ``least``, how many of them receive at once follows what they achieve, up and down and never below that; the others
    write what they have received, or wait. Without it nobody waits, because somebody else decides how many requests pay off.
    ``on_start`` is called in each thread before all else.
    """

    def __init__(
        self,
        count: int,
        name: str,
        *,
        least: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.count = count
        self._buffers = BufferPool(count)
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=on_start)
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
        if not self._in_hand:
            self._buffers.keep(self.count)
        self._in_hand += 1
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
                await ended(waiter)
            raise
        finally:
            self._in_hand -= 1
            if not self._in_hand:  # who has nothing to do holds no more memory than those who may receive will need
                self._buffers.keep(self._slots.limit)

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

    def close(self) -> None:
        """Wait for the threads to end."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def ended(work: asyncio.Future[_Result]) -> None:
    """Wait for work that goes on after a cancellation. A second one, as by another Ctrl-C, does not end it sooner.

    If the work fails, its error is lost with the cancellation.
    """
    while not work.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


class BufferPool:
    """``count`` buffers of ``CHUNK_SIZE`` bytes, made when first needed. Shared by threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._permits = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._kept = count
        self._made = 0

    @property
    def made(self) -> int:
        """How many there are now, in use or not."""
        return self._made

    @contextmanager
    def take(self, size: int) -> Iterator[memoryview]:
        """The first ``size`` bytes of a buffer, until the block ends. Blocks while all buffers are out."""
        with self._permits:
            buffer = self._take()
            try:
                yield buffer[:size]
            finally:
                self._give_back(buffer)

    def keep(self, count: int) -> None:
        """From now on no more than so many are kept; the memory of others goes back as soon as nobody uses them."""
        with self._lock:
            self._kept = count
            while self._free and self._made > count:
                self._free.pop()
                self._made -= 1

    def _take(self) -> memoryview:
        with self._lock:
            if self._free:
                return self._free.pop()
            buffer = memoryview(_pages())
            self._made += 1
            return buffer

    def _give_back(self, buffer: memoryview) -> None:
        with self._lock:
            if self._made > self._kept:
                self._made -= 1  # its memory is unmapped with the last reference
            else:
                self._free.append(buffer)


def _pages() -> mmap.mmap:
    """A chunk's worth of memory, in huge pages where the kernel has them.

    A direct write then hands the disk 4 pages instead of 2048, in fewer and larger requests: measured here 3.4 GB/s instead
    of 2.4, with a sixth of the processor time.
    """
    pages = mmap.mmap(-1, CHUNK_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class Pacer:
    """A rate limit that threads share: how long to wait before so many bytes are sent. Who asks promises to send them then."""

    def __init__(self, rate_bytes_per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        burst = max(_LEAST_BURST, int(rate_bytes_per_second * _BURST_SECONDS))
        self._clock = clock
        self._bucket = TokenBucket(rate_bytes_per_second, burst, clock())
        self._lock = threading.Lock()

    def __call__(self, size: int) -> float:
        """Seconds; 0 is now."""
        with self._lock:
            return self._bucket.reserve(size, self._clock())


def pacer(rate_bytes_per_second: int | None) -> Pacer | None:
    """A pacer, or None where no limit was set."""
    return None if rate_bytes_per_second is None else Pacer(rate_bytes_per_second)
