"""A chunk on its way in: its body lands in one of a bounded number of buffers, as slowly as its sender may be without stalling."""

import mmap
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.pace.retry import StallPolicy, StallWindow
from bdn.net.chunk_server.sending import EndedError, Wait

BUFFERS: Final = 32  # of 8 MiB, which are made when first needed


class ReceiveBuffers:
    """Page-aligned buffers of ``CHUNK_SIZE`` bytes, ``count`` at most. Who finds none is called when one comes back. Any thread."""

    def __init__(self, count: int = BUFFERS) -> None:
        self._left = count  # to be made
        self._free: list[memoryview] = []
        self._waiting: deque[Future[object]] = deque()
        self._lock = threading.Lock()

    def take(self) -> memoryview | Future[object]:
        """A buffer; or a Future, after which to ask again."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._left:
                self._left -= 1
                return _pages()
            call: Future[object] = Future()
            self._waiting.append(call)
            return call

    def give_back(self, buffer: memoryview) -> None:
        """Somebody else may have it."""
        with self._lock:
            self._free.append(buffer)
            call = self._next_call()
        if call is not None:
            call.set_result(None)

    def _next_call(self) -> Future[object] | None:
        while self._waiting:
            call = self._waiting.popleft()
            if call.set_running_or_notify_cancel():  # else its sender has gone, or asks again
                return call
        return None


def _pages() -> memoryview:
    """For direct I/O, in huge pages where the kernel has them: see ``bdn.transfer.byte_threads``."""
    pages = mmap.mmap(-1, CHUNK_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


@dataclass(slots=True)
class Receiving:
    """``size`` bytes into the beginning of ``buffer``, of which some may be ``done``."""

    buffer: memoryview
    size: int
    slowest: StallPolicy
    done: int = 0
    clock: Callable[[], float] = time.monotonic
    _window: StallWindow = field(init=False)

    def __post_init__(self) -> None:
        self._window = StallWindow(self.slowest, self.size - self.done, self.clock())

    @property
    def content(self) -> memoryview:
        """All of it, once it has come."""
        return self.buffer[: self.size]

    def advance(self, connection: socket.socket) -> Wait | None:
        """Receive what has come. None: that was all. ``EndedError``: the sender has gone, or is too slow."""
        while self.done < self.size:
            try:
                count = connection.recv_into(self.buffer[self.done : self.size])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._judge(0)
                return Wait(select.EPOLLIN, self._window.begun + self.slowest.window_seconds)
            if not count:
                raise EndedError("the sender has gone in the middle of a chunk")
            self.done += count
            self._judge(count)
        return None

    def _judge(self, count: int) -> None:
        if problem := self._window.judge(count, self.clock()):
            raise EndedError(f"the sender {problem}")
