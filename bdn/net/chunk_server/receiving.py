"""A chunk on its way in: its body lands in one of a bounded number of buffers, as slowly as its sender may be without stalling."""

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

# Of 8 MiB each, made when first needed and kept; one organisation has half of them at most. As many as a server has workers for
# readers beside them: a chunk that is being stored holds both.
BUFFERS: Final = 32
_PIECE: Final = 1024 * 1024  # named at once: it is still in the cache of the core that received it


@dataclass(eq=False, slots=True)
class BufferTurn:
    """A place for a buffer, which is granted once ``granted`` is done."""

    place: Place
    granted: Future[object] = field(default_factory=Future)
    buffer: memoryview | None = None


class ReceiveBuffers:
    """Page-aligned buffers of ``CHUNK_SIZE`` bytes, ``count`` at most, shared by organisation. Waiting takes no thread. Any thread."""

    def __init__(self, count: int = BUFFERS) -> None:
        self._shares = Shares(count, spares=True)
        self._free: list[memoryview] = []  # the one used last is used next, so that no more are touched than needed
        self._waiting: dict[Place, BufferTurn] = {}
        self._lock = threading.Lock()

    @property
    def lent(self) -> int:
        """How many are held now."""
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
        """The buffer of a turn that was granted."""
        with self._lock:
            if turn.buffer is None:
                turn.buffer = self._free.pop() if self._free else _pages()
            return turn.buffer

    def release(self, turn: BufferTurn) -> None:
        """Give the buffer back, or wait no more."""
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
        turn.granted.set_result(None)  # calls the poller, which has a lock of its own


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
