"""HTTP/1.1 responses over a blocking socket, for byte threads: strict headers, bodies into the caller's buffer.

A client that misjudges the end of a body takes one file for another. So lines end with CRLF and are not folded, names
are tokens, and a body has one length; ambiguous messages are refused (RFC 9112, sections 2.2, 5 and 6.3). ADR 0007
explains why this module replaces ``http.client`` and h11.
"""

import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from bdn.core.chunk import OnBytes
from bdn.core.errors import CanceledError
from bdn.core.pace.retry import StallPolicy, StallWindow
from bdn.net.http1.connection import Body, Connection, NoAnswerError, ProtocolError
from bdn.wire.http_fields import HeadRefusedError, keeps_alive, parse_headers

TICK_SECONDS: Final = 0.25  # interval at which ``AnswerDeadline`` is called
TICK: Final = StallPolicy(least_bytes=1, window_seconds=TICK_SECONDS)
HEAD_LIMIT: Final = 64 * 1024  # bytes, status line included
HEADERS_LIMIT: Final = 200
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\x00-\x08\x0a-\x1f\x7f]*+)?\r\n")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_BODILESS: Final = frozenset({204, 304})
_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*+)?\r\n")
_SIZE_LINE_LIMIT: Final = 4096  # includes extensions, which are ignored
# The kernel's clock is coarse: without this, a receive may time out just before the window is over.
_TICK_SECONDS: Final = 0.02
_CLOSED: Final = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_PIECE: Final = 1024 * 1024  # bytes per ``on_bytes``: fits the cache of a core, and is worth releasing the GIL
_INTERIM_LIMIT: Final = 16  # interim responses (1xx)

Clock = Callable[[], float]


class AnswerDeadline(Protocol):
    """Observes one request. Each method may raise, which ends the wait and closes the connection."""

    def waiting(self) -> None:
        """Called at least every tick until the response begins."""

    def at_work(self) -> None:
        """An interim response (1xx) arrived: the server is working on the request."""

    def receiving(self, count: int) -> None:
        """Called with the number of new body bytes; 0 for the header, and for a tick without bytes."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """``headers`` are by lower-case name.

    ``length`` is the body's; None: delimited by chunks, or by the connection's end.
    """

    status: int
    headers: dict[str, str]
    length: int | None
    is_chunked: bool
    keeps_alive: bool


def parse_head(content: bytes, *, is_of_head: bool = False) -> AnswerHead:
    """Parse a response header that ends with its empty line. RFC 9112, section 6.3, defines the body's length.

    ``is_of_head``: a response to HEAD, which has no body whatever its header says.

    Raises ``ProtocolError`` for a malformed header, and for contradictory framing.
    """
    found = _STATUS_LINE.match(content)
    if found is None:
        raise ProtocolError("the answer is not HTTP/1.1")
    try:
        fields = parse_headers(content, found.end(), HEADERS_LIMIT, "the answer")
    except HeadRefusedError as error:
        raise ProtocolError(str(error)) from None
    status, is_http_1_0 = int(found[2]), found[1] == b"0"
    stated, coding = fields.get("content-length"), fields.get("transfer-encoding")
    if coding is not None and (is_http_1_0 or stated is not None or coding.lower() != "chunked"):
        raise ProtocolError("the answer has no single, known framing")
    if stated is not None and _LENGTH.fullmatch(stated) is None:
        raise ProtocolError("the answer has no single, known length")
    length: int | None = 0
    if status >= 200 and status not in _BODILESS and not is_of_head:
        length = int(stated) if stated is not None else None
    is_chunked = coding is not None and length is None
    goes_on = keeps_alive(fields, is_http_1_0=is_http_1_0) and (length is not None or is_chunked)
    return AnswerHead(status, fields, length, is_chunked, goes_on)


class _ChunkedBody:
    """Decodes the chunked transfer coding (RFC 9112, section 7.1)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left = 0  # bytes left in the current chunk
        self._is_first = True
        self._has_ended = False

    def receive_into(self, buffer: memoryview) -> int:
        """Receive body bytes into the buffer; 0 at the end of the body. Raises if the connection ends before."""
        if self._has_ended or not (self._left or self._begin_piece()):
            return 0
        count = self._connection.receive_into(buffer[: self._left])
        if not count:
            raise ConnectionResetError("the connection ended inside the answer")
        self._left -= count
        return count

    def _begin_piece(self) -> bool:
        """Read up to the content of the next chunk. Returns False after the last one."""
        read_line = self._connection.receive_until
        if not self._is_first:
            read_line(b"\r\n", 2)  # the line end after the previous chunk
        self._is_first = False
        found = _SIZE_LINE.fullmatch(read_line(b"\r\n", _SIZE_LINE_LIMIT))
        if found is None:
            raise ProtocolError("a piece of the answer has no size")
        self._left = int(found[1], 16)
        if not self._left:
            room = HEAD_LIMIT
            while (trailer := read_line(b"\r\n", room)) != b"\r\n":
                room -= len(trailer)
            self._has_ended = True
        return not self._has_ended


class StalledError(OSError):
    pass


class Answer:
    """The response to one request; the caller reads its body. ``received`` counts the body's bytes so far.

    ``length`` is the announced body length; None: unknown until its end.
    """

    __slots__ = ("_body", "_connection", "_head", "_left", "headers", "length", "received", "status")

    def __init__(self, connection: Connection, head: AnswerHead) -> None:
        self.status = head.status
        self.headers = head.headers
        self.length = head.length
        self.received = 0
        self._connection = connection
        self._head = head
        self._left = head.length  # None: unknown
        self._body = _ChunkedBody(connection) if head.is_chunked else None

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection is reusable: the body was read to its end, and no byte arrived after it."""
        return self._head.keeps_alive and self._left == 0 and not self._connection.has_spare

    def fill(
        self,
        buffer: memoryview,
        stall: StallPolicy | None = None,
        clock: Clock = time.monotonic,
        is_wanted: Callable[[], bool] | None = None,
        on_bytes: OnBytes | None = None,
    ) -> int:
        """Receive body bytes until the buffer is full; returns fewer only at the end of the body.

        ``on_bytes`` gets all bytes in consecutive pieces as they arrive, also the bytes before an error.

        Raises:
            StalledError: bytes arrive too slowly for ``stall``. As after any error, the buffer has all received bytes.
            CanceledError: ``is_wanted`` returned False; it is called after each receive, at least once per window.
        """
        done, shown, size, window = 0, 0, len(buffer), None
        piece = size if on_bytes is None else _PIECE
        if stall is not None:
            window = StallWindow(stall, size, clock())
            self._connection.set_timeout(stall.window_seconds + _TICK_SECONDS)
        try:
            while done < size:
                stop = min(shown + piece, size)
                try:
                    count = self._some(buffer[done:stop])
                except TimeoutError:
                    if window is None:
                        raise
                    count = 0
                else:
                    if not count:
                        break
                done += count
                self.received += count
                if on_bytes is not None and done == stop:
                    start, shown = shown, done
                    on_bytes(buffer[start:done])
                if done == size:
                    break
                if is_wanted is not None and not is_wanted():
                    raise CanceledError("the transfer")
                if window is not None and (slow := window.judge(count, clock())):
                    raise StalledError(slow)
        finally:
            if on_bytes is not None and shown < done:
                on_bytes(buffer[shown:done])
        return done

    def has_ended(self) -> bool:
        """Whether the whole body was read. Reads the end marker of a chunked body."""
        return self._left == 0 or not self._some(memoryview(bytearray(1)))

    def read(self, limit: int) -> bytes:
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
            return self._connection.receive_into(buffer)
        if not self._left:
            return 0
        if len(buffer) > self._left:
            buffer = buffer[: self._left]
        count = self._connection.receive_into(buffer)
        self._left -= count
        return count


def ask(
    connection: Connection,
    request: bytes,
    timeout_seconds: float,
    expected: int = 0,
    deadline: AnswerDeadline | None = None,
    *,
    body: Body = b"",
    is_head: bool = False,
) -> Answer:
    """Send a request with its body and wait for the response header; about ``expected`` body bytes should follow it.

    ``deadline`` limits the wait and the number of interim responses. ``is_head``: the request is a HEAD.

    Raises ``NoAnswerError`` when the connection closed without a response byte; ``ProtocolError`` or ``OSError`` for an
    invalid or late response.
    """
    is_cut_short = False
    connection.set_timeout(timeout_seconds)  # replaces the timeout of the previous body
    try:
        connection.send(request)
        if body:
            connection.send(body)
    except _CLOSED as error:
        # A server that refuses a body may respond and close before the body was sent: the response is the better error.
        is_cut_short = bool(body) and connection.is_readable(0)
        if not is_cut_short:
            raise NoAnswerError(error.errno, error.strerror) from None
    interim = 0
    while deadline is not None or interim < _INTERIM_LIMIT:
        while deadline is not None and not connection.is_readable(TICK_SECONDS):
            deadline.waiting()
        content = connection.receive_until(b"\r\n\r\n", HEAD_LIMIT, expected)
        head = parse_head(content, is_of_head=is_head)
        if head.status >= 200:
            return Answer(connection, replace(head, keeps_alive=False) if is_cut_short else head)
        if head.status == 101:  # the client never requests a protocol switch
            break
        interim += 1
        if deadline is not None:
            deadline.waiting()
            deadline.at_work()
    raise ProtocolError("the answer has only interim responses")
