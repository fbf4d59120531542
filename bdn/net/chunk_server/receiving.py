"""Receiving pushed chunks: each body is received into one of a bounded number of buffers, unless its sender stalls."""

import mmap
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.core.pace.retry import StallPolicy, StallWindow
from bdn.core.pace.shares import Place, Shares
from bdn.net.chunk_server.sending import EndedError, Wait

# 8 MiB each, allocated when first needed and never freed; one organisation gets at most half of them. A chunk that is
# being stored holds a buffer and a worker, so more buffers would leave too few workers to readers.
BUFFERS: Final = 32
_PIECE: Final = 1024 * 1024  # hashed at once: still in the cache of the core that received it


@dataclass(eq=False, slots=True)
class BufferTurn:
    """A place for a buffer. ``granted`` is done once the place is granted."""

    place: Place
    granted: Future[object] = field(default_factory=Future)
    buffer: memoryview | None = None


class ReceiveBuffers:
    """At most ``count`` page-aligned buffers of ``CHUNK_SIZE`` bytes, shared by organisation.

    Waiting occupies no thread. Thread-safe.
    """

    def __init__(self, count: int = BUFFERS) -> None:
        self._shares = Shares(count, spares=True)
        self._free: list[memoryview] = []  # last in, first out, so that few buffers are touched
        self._waiting: dict[Place, BufferTurn] = {}
        self._lock = threading.Lock()

    @property
    def lent(self) -> int:
        return self._shares.taken

    def request(self, organisation: str) -> BufferTurn:
        """Queue up. The caller releases the turn, granted or not."""
        with self._lock:
            turn = BufferTurn(self._shares.request(organisation))
            self._waiting[turn.place] = turn
            granted = self._grant()
        _notify(granted)
        return turn

    def buffer_of(self, turn: BufferTurn) -> memoryview:
        with self._lock:
            if turn.buffer is None:
                turn.buffer = self._free.pop() if self._free else _pages()
            return turn.buffer

    def release(self, turn: BufferTurn) -> None:
        with self._lock:
            self._waiting.pop(turn.place, None)
            if turn.buffer is not None:
                self._free.append(turn.buffer)
                turn.buffer = None
            self._shares.release(turn.place)
            granted = self._grant()
        _notify(granted)

    def _grant(self) -> list[BufferTurn]:
        return [self._waiting.pop(place) for place in self._shares.grant()]


def _notify(turns: Iterable[BufferTurn]) -> None:
    for turn in turns:
        turn.granted.set_result(None)  # calls the poller, which acquires its own lock


def _pages() -> memoryview:
    """For direct I/O, in huge pages if available: see ``bdn.transfer.byte_threads``."""
    pages = mmap.mmap(-1, CHUNK_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


@dataclass(slots=True)
class Receiving:
    """Receives ``size`` bytes into ``buffer``, which already has the first ``done``, and hashes them on arrival."""

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
        return self.buffer[: self.size]

    @property
    def digest(self) -> Digest:
        """The hash of the received bytes, valid at the end."""
        return Digest(self._hasher.hexdigest())

    def advance(self, connection: socket.socket) -> Wait | None:
        """Receive available bytes.

        Returns None at the end. Raises ``EndedError`` when the sender is gone or too slow.
        """
        while self.done < self.size:
            try:
                count = connection.recv_into(self.buffer[self.done : self.size])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._judge(0)
                return Wait(select.EPOLLIN, self._window.begun + self.slowest.window_seconds)
            if not count:
                raise EndedError("the sender disconnected in the middle of a chunk")
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
