"""A blocking connection: request formatting, redirects, and the socket.

Unsafe requests are refused before any byte is sent. Timeouts are the kernel's, so that a large piece of a body is one
system call.
"""

import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import urljoin, urlsplit

from bdn.core.chunk import Buffer, ByteRange
from bdn.core.source.upstream import Headers
from bdn.net.tls import send_file

Origin = tuple[str, str, int]  # scheme, host and port: the scope of a connection and of a credential

_ADDRESS: Final = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_TARGET: Final = re.compile(r"[!-~]+")
_HEADER_LINES: Final = re.compile(r"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++: [\t -~\x80-\xff]*+\r\n)*+")


REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
REDIRECT_LIMIT: Final = 5
REDIRECT_BODY_LIMIT: Final = 64 * 1024  # read to reuse the connection; for a longer body a new connection is cheaper

# Headers that may follow a redirect to another origin. Any other may be a credential, whatever its name.
_HARMLESS: Final = frozenset(
    {"accept", "accept-encoding", "if-match", "range", "user-agent", "x-amz-checksum-mode", "x-amz-request-payer"}
)


class UnsendableError(ValueError):
    """An address or a header that cannot be sent. The message repeats neither: they may be signed, or secret."""


def split_address(url: str) -> tuple[Origin, str]:
    """Split a URL into its origin and its unchanged request target.

    Raises ``UnsendableError`` for anything but http(s).
    """
    found = _ADDRESS.match(url)
    if found is None:
        raise UnsendableError("an address is neither http nor https")
    scheme, place, target = found.groups()
    if not target.startswith("/"):
        target = f"/{target}"
    if _TARGET.fullmatch(target) is None:
        raise UnsendableError("an address holds characters that cannot be sent")
    return _origin_at(scheme, place), target


@lru_cache(maxsize=256)
def _origin_at(scheme: str, place: str) -> Origin:
    """Cached, because thousands of files share one origin."""
    if _TARGET.fullmatch(place) is None:
        raise UnsendableError("an address has no valid host")
    try:
        url = urlsplit(f"{scheme}://{place}")
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError:
        raise UnsendableError("an address has no valid host and port") from None
    if not url.hostname:
        raise UnsendableError("an address has no valid host")
    return url.scheme, url.hostname, port


def host_of(origin: Origin) -> str:
    """The ``Host`` value: no default port, brackets around IPv6."""
    scheme, host, port = origin
    name = f"[{host}]" if ":" in host else host
    return name if port == (443 if scheme == "https" else 80) else f"{name}:{port}"


def format_request(method: str, origin: Origin, target: str, headers: Mapping[str, str]) -> bytes:
    """Format a request header, which accepts no encoding unless ``headers`` do.

    Raises ``UnsendableError`` when a header would break out of its line.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if _HEADER_LINES.fullmatch(lines) is None or lines.count("\n") != len(headers):
        raise UnsendableError("a header cannot be sent")
    given = f"\r\n{lines.lower()}"
    host = "" if "\r\nhost: " in given else f"Host: {host_of(origin)}\r\n"
    accept = "" if "\r\naccept-encoding: " in given else "Accept-Encoding: identity\r\n"
    return f"{method} {target} HTTP/1.1\r\n{host}{accept}{lines}\r\n".encode("latin-1")


class ProtocolError(Exception):
    """The server's response is not valid HTTP/1.1. The message repeats no received byte."""


class DowngradeError(ProtocolError):
    """A redirect from https to http.

    Refused with and without credentials: plain HTTP can be forged, and only some upstreams offer a checksum.
    """


def follow(url: str, headers: dict[str, str], answer: Headers) -> tuple[str, dict[str, str]]:
    """The redirect's target and its headers: for another origin, only harmless ones.

    Raises ``DowngradeError`` for a redirect from https to http, and ``UnsendableError`` for an invalid target.
    """
    target = urljoin(url, answer.get("location") or "")
    here, (there, _) = split_address(url)[0], split_address(target)
    if here[0] == "https" and there[0] == "http":
        raise DowngradeError("it redirects from https to http")
    if there != here:
        headers = {name: value for name, value in headers.items() if name.lower() in _HARMLESS}
    return target, headers


_HEAD_PIECE: Final = 4096  # small, because body bytes received together with a header are copied later
# A whole body of this size is received with its header: a copy costs less than a call.
_WITH_HEAD_LIMIT: Final = 64 * 1024
_WAKE_BYTES: Final = 512 * 1024  # awaited at once: waking up for less was a third of the work on a fast link
_TLS_PIECE: Final = 256 * 1024  # sent per call: over TLS a timeout bounds one whole call, and a body may take longer
_POLL_FROM_BYTES: Final = 64 * 1024  # below that, one blocking call costs less than an extra poll


@dataclass(frozen=True, slots=True)
class FileBody:
    """A range of an open file, as a request body. Over plain HTTP the kernel sends it from the page cache."""

    descriptor: int
    part: ByteRange

    def __len__(self) -> int:
        return self.part.size


Body = bytes | Buffer | FileBody


class NoAnswerError(ConnectionResetError):
    """The server closed the connection before it began a response."""


class Connection:
    """A connected socket, with its received and still unread bytes."""

    __slots__ = ("_is_plain", "_is_unanswered", "_poll", "_spare", "_timeout_seconds", "_wakes_at", "socket")

    def __init__(self, connected: socket.socket, timeout_seconds: float) -> None:
        """Takes ownership of the socket.

        ``timeout_seconds`` bounds each send, and each receive until ``set_timeout``.
        """
        self.socket = connected
        self._spare = memoryview(b"")
        self._is_plain = not isinstance(connected, ssl.SSLSocket)
        self._is_unanswered = False  # no byte received since the last send
        self._timeout_seconds = 0.0
        self._wakes_at = 1  # the current SO_RCVLOWAT, in bytes
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        if self._is_plain:
            # Kernel timeouts, because Python's poll before every call and cannot wait for a whole body.
            connected.setblocking(True)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_seconds))
        self.set_timeout(timeout_seconds)

    @property
    def has_spare(self) -> bool:
        return len(self._spare) > 0

    def is_readable(self, seconds: float) -> bool:
        """Wait until bytes or the connection's end can be received, at most ``seconds``."""
        if len(self._spare):
            return True
        ends = time.monotonic() + seconds
        while True:
            if isinstance(self.socket, ssl.SSLSocket) and self._is_decrypted(self.socket):
                return True
            left = ends - time.monotonic()
            if self._is_plain:
                self._wake_at(1)
                return bool(self._poll.poll(max(0.0, left) * 1000))
            if left <= 0 or not self._poll.poll(left * 1000):
                return False

    def _is_decrypted(self, encrypted: ssl.SSLSocket) -> bool:
        """Whether content, which is buffered, or the end arrived. Session tickets and partial records do not count."""
        encrypted.settimeout(0)
        try:
            piece = encrypted.recv(_HEAD_PIECE)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            return True  # the next read raises the error again
        finally:
            encrypted.settimeout(self._timeout_seconds)
        if piece:
            self._spare, self._is_unanswered = memoryview(piece), False
        return True

    def set_timeout(self, seconds: float) -> None:
        """Raise ``TimeoutError`` when no byte arrives for so long, or over TLS no further 256 KiB are sent."""
        if seconds == self._timeout_seconds:
            return
        self._timeout_seconds = seconds
        if self._is_plain:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
        else:
            self.socket.settimeout(seconds)

    def send(self, content: Body) -> None:
        """Send everything, without a copy. Raises ``EOFError`` when the file has become shorter."""
        self._is_unanswered = True
        try:
            if isinstance(content, FileBody):
                self._send_file(content.descriptor, content.part)
                return
            if self._is_plain:
                self.socket.sendall(content)
                return
            with memoryview(content) as view:
                for start in range(0, len(view), _TLS_PIECE):
                    self.socket.sendall(view[start : start + _TLS_PIECE])
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def _send_file(self, descriptor: int, part: ByteRange) -> None:
        start = part.start
        while start < part.stop:
            count = send_file(self.socket, descriptor, start, part.stop - start)
            if not count:
                raise EOFError
            start += count

    def receive_into(self, buffer: memoryview) -> int:
        """Receive at least one byte, as many as arrive in time; 0 at the end of the connection."""
        if len(self._spare):
            count = min(len(self._spare), len(buffer))
            buffer[:count] = self._spare[:count]
            self._spare = self._spare[count:]
            return count
        try:
            if not self._is_plain:
                return self.socket.recv_into(buffer)
            if len(buffer) < _POLL_FROM_BYTES:
                self._wake_at(1)
                return self.socket.recv_into(buffer, 0, socket.MSG_WAITALL)
            # A blocking call would wake up for each packet; with a low-water mark it would not wake up for the last
            # bytes.
            self._wake_at(min(len(buffer), _WAKE_BYTES))
            self._poll.poll(self._timeout_seconds * 1000)
            return self.socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def receive_until(self, end: bytes, limit: int, along: int = 0) -> bytes:
        """Receive up to and including ``end``. ``along`` bytes are expected after it, and received in the same call.

        Raises ``ProtocolError`` when it is not in the first ``limit`` bytes; ``ConnectionError`` when the connection
        ends before (``NoAnswerError`` when no byte arrived).
        """
        self._wake_at(1)
        room = _HEAD_PIECE + (along if along <= _WITH_HEAD_LIMIT else 0)
        content, searched, begun = bytes(self._spare) or self._receive(room), 0, 0.0
        while (at := content.find(end, searched)) < 0:
            if len(content) >= limit:
                raise ProtocolError(f"a head or a line of the answer is longer than {limit} bytes")
            searched = max(0, len(content) - len(end) + 1)
            now = time.monotonic()
            begun = begun or now
            if now - begun > self._timeout_seconds:
                raise TimeoutError("timed out")  # bytes arrive, but too slowly
            content += self._receive(room)
        if at + len(end) > limit:
            raise ProtocolError(f"a head or a line of the answer is longer than {limit} bytes")
        self._spare = memoryview(content)[at + len(end) :]
        return content[: at + len(end)]

    def _receive(self, room: int) -> bytes:
        try:
            piece = self.socket.recv(room)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        except ConnectionError as error:
            kind = NoAnswerError if self._is_unanswered else ConnectionResetError
            raise kind(error.errno, error.strerror) from None
        if piece:
            self._is_unanswered = False
            return piece
        if self._is_unanswered:
            raise NoAnswerError("Remote end closed connection without response")
        raise ConnectionResetError("the connection ended inside the answer")

    def _wake_at(self, count: int) -> None:
        """Sleep until so many bytes can be received, or the connection ends (``SO_RCVLOWAT``, tcp(7))."""
        if self._is_plain and count != self._wakes_at:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wakes_at = count

    def break_off(self) -> None:
        """Fail the thread that waits on this connection. Callable from any thread."""
        # Not ``SSLSocket.shutdown``: it ends TLS first, and the reader thread would take ciphertext for content.
        socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def _timeval(seconds: float) -> bytes:
    """At least a microsecond, because the kernel takes zero for no timeout."""
    whole, micros = divmod(max(1, int(seconds * 1_000_000)), 1_000_000)
    return struct.pack("ll", whole, micros)
