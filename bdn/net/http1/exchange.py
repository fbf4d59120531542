"""HTTP/1.1 over a blocking socket, for byte threads: the head is parsed here, the body lands in the caller's buffer.

Why code of our own: a request for 32 KiB over a warm connection costs so much CPU in one thread, bytes and all (Python 3.11,
nginx on the same machine):

    this file 29 us · http.client with ``readinto`` 79 us · h11 on the same socket 82 us

With 20,000 files of 32 KiB that is the mirror's throughput. And a body in ``http.client`` passes through a ``BufferedReader``,
which takes the GIL for every piece; here one system call fills a large piece of an 8 MiB buffer, which somebody may want to see
while it is hot. System calls are few because each one gives the GIL away and has to win it back: with 8 threads,
that costs more than the call.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Final

from bdn.core.errors import CanceledError
from bdn.core.pace.streaming import StallPolicy, StallWindow
from bdn.core.ports import OnBytes
from bdn.net.http1.chunked import ChunkedBody
from bdn.net.http1.connection import NoAnswerError, Wire
from bdn.net.http1.deadlines import TICK_SECONDS, Patience
from bdn.net.http1.head import HEAD_LIMIT, Head, Headers, ProtocolError, parse_head

_TICK_SECONDS: Final = 0.02  # the kernel's clock is coarse: without this, it may give up just before a window is over
_CLOSED: Final = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_PIECE: Final = 1024 * 1024  # shown at once: fits the cache of a core, and is worth giving the GIL away for
_INTERIM_LIMIT: Final = 16  # answers before the answer (1xx)

Clock = Callable[[], float]


class StalledError(OSError):
    """A body came too slowly to wait for it."""


class _Pieces:
    """Shows a buffer that is being filled, piece by piece. ``stop`` is where the piece that comes now ends."""

    __slots__ = ("_buffer", "_on_bytes", "_shown", "stop")

    def __init__(self, buffer: memoryview, on_bytes: OnBytes | None) -> None:
        self._buffer = buffer
        self._on_bytes = on_bytes
        self._shown = 0
        self.stop = len(buffer) if on_bytes is None else min(_PIECE, len(buffer))

    def come(self, done: int) -> None:
        """The buffer is right up to ``done``."""
        if done == self.stop:
            self.show(done)
            self.stop = min(done + _PIECE, len(self._buffer))

    def show(self, done: int) -> None:
        """Everything up to ``done`` that was not shown yet, of a piece that may come no further."""
        start, self._shown = self._shown, done
        if self._on_bytes is not None and start < done:
            self._on_bytes(self._buffer[start:done])


class Answer:
    """The answer to one GET, whose body the caller reads. ``received`` counts the bytes of the body so far."""

    __slots__ = ("_body", "_head", "_left", "_wire", "headers", "received", "status")

    def __init__(self, wire: Wire, head: Head) -> None:
        self.status = head.status
        self.headers: Headers = head.headers
        self.received = 0
        self._wire = wire
        self._head = head
        self._left = head.length  # None while it is not known
        self._body = ChunkedBody(wire.receive_into, wire.receive_until) if head.is_chunked else None

    @property
    def length(self) -> int | None:
        """The body's length as announced; None where the end of the body shows only when it comes."""
        return self._head.length

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can carry another request: the body was read to its end and nothing came after it."""
        return self._head.keeps_alive and self._left == 0 and not self._wire.has_spare

    def fill(
        self,
        buffer: memoryview,
        stall: StallPolicy | None = None,
        clock: Clock = time.monotonic,
        is_wanted: Callable[[], bool] | None = None,
        on_bytes: OnBytes | None = None,
    ) -> int:
        """Bytes of the body until the buffer is full; fewer only when the body has ended.

        ``on_bytes`` is shown them in consecutive pieces as they come; after an error, too, it has seen all that came.

        Raises:
            StalledError: they come too slowly for ``stall``. What came is in the buffer, as after any error.
            CanceledError: ``is_wanted`` said no; it is asked whenever bytes have come, and once in every window.
        """
        done, size, window = 0, len(buffer), None
        pieces = _Pieces(buffer, on_bytes)
        if stall is not None:
            window = StallWindow(stall, size, clock())
            self._wire.wait_at_most(stall.window_seconds + _TICK_SECONDS)
        try:
            while done < size:
                try:
                    count = self._some(buffer[done : pieces.stop])
                except TimeoutError:
                    if window is None:
                        raise
                    count = 0
                else:
                    if not count:
                        break
                done += count
                self.received += count
                pieces.come(done)
                if done == size:
                    break
                if is_wanted is not None and not is_wanted():
                    raise CanceledError("the transfer")
                if window is not None and (slow := window.judge(count, clock())):
                    raise StalledError(slow)
        finally:
            pieces.show(done)
        return done

    def has_ended(self) -> bool:
        """Whether nothing of the body is left. Reads the mark of its end, where it has one."""
        return self._left == 0 or not self._some(memoryview(bytearray(1)))

    def read(self, limit: int) -> bytes:
        """The body, or its first ``limit`` bytes."""
        content = bytearray(limit if self._left is None else min(limit, self._left))
        with memoryview(content) as buffer:
            done = self.fill(buffer)
        return bytes(content[:done])

    def _some(self, buffer: memoryview) -> int:
        if self._body is not None:
            count = self._body.receive_into(buffer)
            if not count:
                self._left = 0
            return count
        if self._left is None:
            return self._wire.receive_into(buffer)
        if len(buffer) > self._left:
            buffer = buffer[: self._left]
        if not self._left:
            return 0
        count = self._wire.receive_into(buffer)
        self._left -= count
        return count


def ask(
    wire: Wire, request: bytes, timeout_seconds: float, expected: int = 0, patience: Patience | None = None
) -> Answer:
    """Send a request and wait for the head of its answer, whose body should have about ``expected`` bytes.

    With ``patience``, that one judges how long the answer may take to begin, and how many interim answers come before.

    Raises:
        NoAnswerError: the connection is closed, and nothing of an answer came.
        ProtocolError, OSError: what came is not an answer, or came too late.
    """
    try:
        wire.send(request)
    except _CLOSED as error:
        raise NoAnswerError(error.errno, error.strerror) from None
    wire.wait_at_most(timeout_seconds)
    interim = 0
    while patience is not None or interim < _INTERIM_LIMIT:
        while patience is not None and not wire.has_come(TICK_SECONDS):
            patience.waiting()
        head = parse_head(wire.receive_until(b"\r\n\r\n", HEAD_LIMIT, expected))
        if head.status >= 200:
            return Answer(wire, head)
        if head.status == 101:  # nobody asked for another protocol
            break
        interim += 1
        if patience is not None:
            patience.waiting()
            patience.at_work()
    raise ProtocolError("the answer does not begin")
