"""A chunk on its way in: its body lands in one of a bounded number of buffers, as slowly as its sender may be without stalling."""

import mmap
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.core.pace.retry import StallPolicy, StallWindow
from bdn.net.chunk_server.sending import EndedError, Wait

# Of 8 MiB each, made when first needed and kept. Fewer than a server has workers: a chunk that is being stored holds both, and a
# store that is slow must leave some workers to those who read.
BUFFERS: Final = 24
_PIECE: Final = 1024 * 1024  # named at once: it is still in the cache of the core that received it


class ReceiveBuffers:
    """Page-aligned buffers of ``CHUNK_SIZE`` bytes, ``count`` at most. Who finds none waits in turn, without a thread. Any thread."""

    def __init__(self, count: int = BUFFERS) -> None:
        self._unmade = count
        self._free: list[memoryview] = []  # the one used last is used next, so that no more are touched than needed
        self._waiting: dict[Future[object], None] = {}  # in their order
        self._lock = threading.Lock()

    def take(self) -> memoryview | Future[object]:
        """A buffer, or a Future whose result will be one; it is given back, or up, by who has it."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._unmade:
                self._unmade -= 1
                return _pages()
            turn: Future[object] = Future()
            self._waiting[turn] = None
            return turn

    def give_back(self, buffer: memoryview) -> None:
        """Whoever has waited longest has it next."""
        with self._lock:
            turn = next(iter(self._waiting), None)
            if turn is None:
                self._free.append(buffer)
                return
            del self._waiting[turn]
        turn.set_result(buffer)  # calls the poller, which has a lock of its own

    def give_up(self, turn: Future[object]) -> None:
        """Wait no more. Its turn may have come meanwhile, or be about to come: then the next one has the buffer."""
        with self._lock:
            if turn in self._waiting:
                del self._waiting[turn]
                return
        turn.add_done_callback(lambda _: self.give_back(buffer_of(turn)))


def buffer_of(turn: Future[object]) -> memoryview:
    """What has come of waiting, once it is done."""
    buffer = turn.result()
    assert isinstance(buffer, memoryview)  # noqa: S101 - nobody else sets it
    return buffer


def _pages() -> memoryview:
    """For direct I/O, in huge pages where the kernel has them: see ``bdn.transfer.byte_threads``."""
    pages = mmap.mmap(-1, CHUNK_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


@dataclass(slots=True)
class Receiving:
    """``size`` bytes into the beginning of ``buffer``, of which the first are ``done`` already. They are named while they come."""

    buffer: memoryview
    size: int
    slowest: StallPolicy
    done: int = 0
    clock: Callable[[], float] = time.monotonic
    _window: StallWindow = field(init=False)
    _hasher: blake3 = field(default_factory=blake3, init=False)
    _hashed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._window = StallWindow(self.slowest, self.size - self.done, self.clock())

    @property
    def content(self) -> memoryview:
        """All of it, once it has come."""
        return self.buffer[: self.size]

    @property
    def digest(self) -> Digest:
        """Its name, once it has come."""
        return Digest(self._hasher.hexdigest())

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
            if self.done - self._hashed >= _PIECE:
                self._hash()
        self._hash()
        return None

    def _hash(self) -> None:
        self._hasher.update(self.buffer[self._hashed : self.done])
        self._hashed = self.done

    def _judge(self, count: int) -> None:
        if problem := self._window.judge(count, self.clock()):
            raise EndedError(f"the sender {problem}")
