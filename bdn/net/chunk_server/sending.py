"""Sending one response: ``sendfile`` from the page cache, limited by its reader and by the server's rate.

Over TLS the kernel encrypts it, or this program does, record by record (docs/adr/0049).
"""

import logging
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from bdn.core.pace.retry import StallPolicy, StallWindow
from bdn.net.api_server import queued_bytes
from bdn.net.chunk_server.messages import Response
from bdn.net.chunk_server.served_chunks import OpenChunk
from bdn.net.tls import send_file

logger = logging.getLogger(__name__)
Pace = Callable[[int], float]
_PACED_BYTES: Final = 1024 * 1024
_AHEAD_BYTES: Final = 2 * 1024 * 1024


class EndedError(Exception):
    """The connection is finished; the message is the reason."""


class StalledReaderError(EndedError):
    """The client reads too slowly: unsent bytes in its socket are dropped, too."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Call again when ``events`` (of epoll) happen on the socket, when ``future`` is done, or at ``until``."""

    events: int
    until: float
    future: Future[object] | None = None


NEXT_TURN: Final = Wait(0, 0.0)  # the next request was received; other connections go first


@dataclass(slots=True)
class Sending:
    """Sends a response and its part of ``chunk``, whose file it closes. ``sent`` counts the chunk's bytes.

    ``pace`` gets the size of the next piece and returns the seconds to wait before it.
    """

    answer: Response
    chunk: OpenChunk | None
    slowest: StallPolicy
    pace: Pace | None
    clock: Callable[[], float] = time.monotonic
    is_last: bool = field(init=False)
    sent: int = field(default=0, init=False)
    _opening: memoryview = field(init=False)
    _descriptor: int = field(default=-1, init=False)
    _offset: int = field(default=0, init=False)
    _left: int = field(default=0, init=False)
    _may_send: int = field(default=0, init=False)  # bytes granted by ``pace``
    _is_paced_until: float | None = field(default=None, init=False)
    _window: StallWindow | None = field(default=None, init=False)  # since the first wait for the reader

    def __post_init__(self) -> None:
        self.is_last = self.answer.is_last
        self._opening = memoryview(self.answer.opening)
        if self.chunk is not None and self.answer.size:
            self._descriptor = self.chunk.file.fileno()
            self._offset = self.chunk.offset + self.answer.start
            self._left = self.answer.size
            _read_ahead(self._descriptor, self._offset, self._left)

    def advance(self, connection: socket.socket) -> Wait | None:
        """Send what the socket accepts.

        Returns None when everything was sent, or the file ended early; then ``is_last`` is set.

        Raises ``EndedError`` to give up; ``OSError`` of the socket or of the disk.
        """
        try:
            flags = socket.MSG_MORE if self._left and not self.pace else 0
            while self._opening:
                self._opening = self._opening[connection.send(self._opening, flags) :]
            return self._send_body(connection)
        except BlockingIOError:
            return self._wait_for_reader(connection)

    def close(self) -> None:
        if self.chunk is not None:
            self.chunk.file.close()

    def _send_body(self, connection: socket.socket) -> Wait | None:
        while self._left:
            if self.pace and not self._may_send:
                wait = self._wait_for_pace(connection, self.pace, min(self._left, _PACED_BYTES))
                if wait is not None:
                    return wait
            size = min(self._left, self._may_send) if self.pace else self._left
            count = send_file(connection, self._descriptor, self._offset, size)
            if not count:
                # The reader must not wait for missing bytes, and must never get other bytes in their place.
                logger.error(
                    "a chunk's file is shorter than recorded; closing the reader's connection",
                    extra={"missing_bytes": self._left},
                )
                self.is_last = True
                return None
            self._offset += count
            self._left -= count
            self.sent += count
            self._may_send -= count
        return None

    def _wait_for_pace(self, connection: socket.socket, pace: Pace, size: int) -> Wait | None:
        """Call ``pace`` once for the next ``size`` bytes, then wait as long as it returned."""
        now = self.clock()
        if self._is_paced_until is None:
            self._is_paced_until = now + pace(size)
        if now < self._is_paced_until:
            if has_happened(connection, 0):
                raise EndedError("the client disconnected")
            return Wait(0, self._is_paced_until)
        self._is_paced_until, self._may_send = None, size
        self._window = None  # the server caused this wait, so the reader's window begins anew
        return None

    def _wait_for_reader(self, connection: socket.socket) -> Wait:
        seconds, now = self.slowest.window_seconds, self.clock()
        if self._window is None:
            self._window = StallWindow(self.slowest, self._untaken(connection), now)
        elif now >= self._window.begun + seconds:
            problem = self._window.judge(self._window.missing - self._untaken(connection), now)
            if problem:
                raise StalledReaderError(f"the reader {problem}")
        return Wait(select.EPOLLOUT, self._window.begun + seconds)

    def _untaken(self, connection: socket.socket) -> int:
        """Bytes that the client's kernel has not acknowledged, including bytes not yet sent."""
        return queued_bytes(connection.fileno()) + len(self._opening) + self._left


def _read_ahead(descriptor: int, offset: int, size: int) -> None:
    """Let the kernel read ahead during the transfer.

    Eight clients, files that are not in the page cache, five alternated rounds on a loaded machine, medians: no advice
    1.07 GB/s; SEQUENTIAL alone 1.16; with WILLNEED of the whole range 1.21, because such pages are read one by one
    instead of in large folios; of the first 2 MiB, which spares the slow beginning of the kernel's own window, 1.57
    (fio: 1.16-1.31).
    """
    with suppress(OSError):  # a sandbox may refuse advice
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_SEQUENTIAL)
        os.posix_fadvise(descriptor, offset, min(size, _AHEAD_BYTES), os.POSIX_FADV_WILLNEED)


def has_happened(connection: socket.socket, events: int) -> bool:
    """Whether one of ``events`` (of poll), a reset or the end of both directions has happened."""
    poll = select.poll()
    poll.register(connection, events)
    return bool(poll.poll(0))
