"""One answer on its way into a socket: from the page cache with ``sendfile``, as fast as its reader and the server's own rate allow."""

import fcntl
import io
import logging
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from bdn.core.pace.retry import StallPolicy, StallWindow
from bdn.net.chunk_server.messages import Response
from bdn.net.chunk_server.served_chunks import OpenChunk

logger = logging.getLogger(__name__)
Pace = Callable[[int], float]
_PACED_BYTES: Final = 1024 * 1024

_COPY_BYTES: Final = 256 * 1024  # at once, of a file without a descriptor
_AHEAD_BYTES: Final = 2 * 1024 * 1024


class ChunkBody:
    """The part of an open chunk that is to be sent: ``left`` bytes. Its maker closes it, and the chunk's file with it."""

    __slots__ = ("_descriptor", "_file", "_offset", "left", "sent")

    def __init__(self, chunk: OpenChunk, start: int, size: int) -> None:
        self._file = chunk.file
        self._descriptor = _descriptor(chunk)
        self._offset = chunk.offset + start
        self.left = size
        self.sent = 0
        if self._descriptor is not None and size:
            _read_ahead(self._descriptor, self._offset, size)

    def send(self, connection: socket.socket, limit: int) -> int:
        """As many bytes as the socket takes now, at most ``limit``; 0 when the file ends too early.

        Blocks while they come from the disk, and raises ``BlockingIOError`` when the socket takes none.
        """
        size = min(self.left, limit)
        if self._descriptor is not None:
            count = os.sendfile(connection.fileno(), self._descriptor, self._offset, size)
        else:
            self._file.seek(self._offset)
            piece = self._file.read(min(size, _COPY_BYTES))
            count = connection.send(piece) if piece else 0
        self._offset += count
        self.left -= count
        self.sent += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _descriptor(chunk: OpenChunk) -> int | None:
    """None for a chunk in memory, as the memory store has them."""
    try:
        return chunk.file.fileno()
    except io.UnsupportedOperation:
        return None


def _read_ahead(descriptor: int, offset: int, size: int) -> None:
    """Let the kernel read ahead while this is sent.

    Eight clients, files that are not in the page cache, five alternated rounds on a loaded machine, medians: no advice 1.07 GB/s;
    SEQUENTIAL alone 1.16; with WILLNEED of the whole range 1.21, because pages asked for that way come one by one instead of in
    large folios; of the first 2 MiB, which spares the slow beginning of the kernel's own window, 1.57 (fio: 1.16-1.31).
    """
    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_SEQUENTIAL)
    os.posix_fadvise(descriptor, offset, min(size, _AHEAD_BYTES), os.POSIX_FADV_WILLNEED)


class EndedError(Exception):
    """Nothing more is to be done on this connection; the message says why."""


class StalledReaderError(EndedError):
    """The client reads nothing, or too slowly: what is left in its socket is dropped, too."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Call again when ``events`` (of epoll) happen on the socket, when ``future`` is done, or when it is ``until``."""

    events: int
    until: float
    future: Future[object] | None = None


class Sending:
    """Owns ``body``. ``pace`` is given how many bytes come next, and says how many seconds to wait before them."""

    __slots__ = (
        "_body",
        "_clock",
        "_is_paced_until",
        "_may_send",
        "_opening",
        "_pace",
        "_slowest",
        "_window",
        "is_last",
    )

    def __init__(
        self,
        answer: Response,
        body: ChunkBody | None,
        slowest: StallPolicy,
        pace: Pace | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_last = answer.is_last
        self._opening = memoryview(answer.opening)
        self._body = body
        self._slowest = slowest
        self._pace = pace
        self._clock = clock
        self._may_send = 0  # of what is paced
        self._is_paced_until: float | None = None
        self._window: StallWindow | None = None  # since the reader first had to be waited for

    @property
    def sent(self) -> int:
        """Bytes of the body that were given to the socket."""
        return self._body.sent if self._body else 0

    def advance(self, connection: socket.socket) -> Wait | None:
        """Send what can be sent now. None: all of it was, or all that the file has; then ``is_last`` holds.

        Raises:
            StalledReaderError, EndedError: it is not worth going on.
            OSError: of the socket or of the disk.
        """
        try:
            self._send_opening(connection)
            return self._send_body(connection, self._body) if self._body else None
        except BlockingIOError:
            return self._wait_for_reader(connection)

    def close(self) -> None:
        """Close the chunk's file."""
        if self._body is not None:
            self._body.close()

    def _send_opening(self, connection: socket.socket) -> None:
        flags = socket.MSG_MORE if self._body is not None and not self._pace else 0
        while self._opening:
            self._opening = self._opening[connection.send(self._opening, flags) :]

    def _send_body(self, connection: socket.socket, body: ChunkBody) -> Wait | None:
        while body.left:
            if self._pace and not self._may_send:
                wait = self._wait_for_pace(connection, self._pace, min(body.left, _PACED_BYTES))
                if wait is not None:
                    return wait
            count = body.send(connection, self._may_send if self._pace else body.left)
            if not count:
                # The reader must not wait for bytes that do not exist, and is never given others for them.
                logger.error("a chunk's file is too short", extra={"missing_bytes": body.left})
                self.is_last = True
                return None
            self._may_send -= count
        return None

    def _wait_for_pace(self, connection: socket.socket, pace: Pace, size: int) -> Wait | None:
        """Ask for the next ``size`` bytes once, and then wait as long as was said."""
        now = self._clock()
        if self._is_paced_until is None:
            self._is_paced_until = now + pace(size)
        if now < self._is_paced_until:
            if has_hung_up(connection, 0):
                raise EndedError("the client went away")
            return Wait(0, self._is_paced_until)
        self._is_paced_until, self._may_send = None, size
        self._window = None  # the wait was ours; the reader's time begins anew
        return None

    def _wait_for_reader(self, connection: socket.socket) -> Wait:
        seconds, now = self._slowest.window_seconds, self._clock()
        if self._window is None:
            self._window = StallWindow(self._slowest, self._untaken(connection), now)
        elif now >= self._window.begun + seconds:
            problem = self._window.judge(self._window.missing - self._untaken(connection), now)
            if problem:
                raise StalledReaderError(f"the reader {problem}")
        return Wait(select.EPOLLOUT, self._window.begun + seconds)

    def _untaken(self, connection: socket.socket) -> int:
        """Bytes that the client's kernel has not acknowledged, those in our own socket included.

        Counting what the socket takes would be unfair: it takes nothing before a third of its buffer is free, which is a
        megabyte and takes an honest reader with 50 KB/s 20 s.
        """
        (queued,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
        return int(queued) + len(self._opening) + (self._body.left if self._body else 0)


def has_hung_up(connection: socket.socket, events: int) -> bool:
    """Whether one of ``events`` (of poll), a reset or the end of both directions has happened."""
    poll = select.poll()
    poll.register(connection, events)
    return bool(poll.poll(0))
