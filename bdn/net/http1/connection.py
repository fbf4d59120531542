"""One connection: its requests, and its blocking socket.

What cannot be sent safely is refused before anything is sent. Timeouts are the kernel's, so that a large piece of a body is
one system call.
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

Origin = tuple[str, str, int]  # scheme, host and port: what a connection and a credential belong to

_ADDRESS: Final = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_TARGET: Final = re.compile(r"[!-~]+")
_HEADER_LINES: Final = re.compile(r"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++: [\t -~\x80-\xff]*+\r\n)*+")


REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
REDIRECT_LIMIT: Final = 5
REDIRECT_BODY_LIMIT: Final = 64 * 1024  # read to keep the connection; a longer one is not worth it

# Headers that another origin may see. Any other may be a credential, by whatever name a source signs its requests.
_HARMLESS: Final = frozenset(
    {"accept", "accept-encoding", "if-match", "range", "user-agent", "x-amz-checksum-mode", "x-amz-request-payer"}
)


class UnsendableError(ValueError):
    """An address or a header that no request can hold. The message repeats neither: they may be signed, or secret."""


def split_address(url: str) -> tuple[Origin, str]:
    """Where to connect, and what to ask for there, exactly as it stands. ``UnsendableError``: it is no http address."""
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
    """Cached, because thousands of files lie at one place."""
    if _TARGET.fullmatch(place) is None:
        raise UnsendableError("an address has no host that can be asked for")
    try:
        url = urlsplit(f"{scheme}://{place}")
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError:
        raise UnsendableError("an address has no valid host and port") from None
    if not url.hostname:
        raise UnsendableError("an address has no host that can be asked for")
    return url.scheme, url.hostname, port


def host_of(origin: Origin) -> str:
    """Host and port as requests name them: the port where it is not the scheme's own, IPv6 addresses in brackets."""
    scheme, host, port = origin
    name = f"[{host}]" if ":" in host else host
    return name if port == (443 if scheme == "https" else 80) else f"{name}:{port}"


def format_request(method: str, origin: Origin, target: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request that accepts no encoding, unless the headers say so. ``UnsendableError``: one breaks out of its line."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if _HEADER_LINES.fullmatch(lines) is None or lines.count("\n") != len(headers):
        raise UnsendableError("a header cannot be sent")
    given = f"\r\n{lines.lower()}"
    host = "" if "\r\nhost: " in given else f"Host: {host_of(origin)}\r\n"
    accept = "" if "\r\naccept-encoding: " in given else "Accept-Encoding: identity\r\n"
    return f"{method} {target} HTTP/1.1\r\n{host}{accept}{lines}\r\n".encode("latin-1")


class DowngradeError(Exception):
    """A redirect leads from https to http.

    Refused with and without credentials: what comes in the clear may be anybody's, and only some upstreams offer a checksum.
    """


def follow(url: str, headers: dict[str, str], answer: Headers) -> tuple[str, dict[str, str]]:
    """The next address and the headers for it: to another origin, only those that are plainly harmless.

    ``DowngradeError`` when it leads out of https, ``UnsendableError`` when it leads nowhere.
    """
    target = urljoin(url, answer.get("location") or "")
    here, (there, _) = split_address(url)[0], split_address(target)
    if here[0] == "https" and there[0] == "http":
        raise DowngradeError
    if there != here:
        headers = {name: value for name, value in headers.items() if name.lower() in _HARMLESS}
    return target, headers


_HEAD_PIECE: Final = 4096  # small, because bytes of the body that are received along with a head are copied later
_WITH_HEAD_LIMIT: Final = 64 * 1024  # a whole body of this size comes with its head: a copy costs less than a call
_WAKE_BYTES: Final = 512 * 1024  # awaited at once: waking up for less was a third of the work on a fast link
_TLS_PIECE: Final = (
    256 * 1024
)  # sent at once: over TLS a timeout bounds all of one call, and a body may take longer than that
_POLL_FROM_BYTES: Final = 64 * 1024  # below that, one blocking call costs less than a poll before it


class ProtocolError(Exception):
    """The server does not speak HTTP/1.1. The message repeats nothing of what came."""


@dataclass(frozen=True, slots=True)
class FileBody:
    """Some of an open file, as the body of a request. Over plain HTTP the kernel sends it from the page cache."""

    descriptor: int
    part: ByteRange

    def __len__(self) -> int:
        return self.part.size


Body = bytes | Buffer | FileBody


class NoAnswerError(ConnectionResetError):
    """The server closed the connection and had not begun to answer."""


class Connection:
    """One connected socket, and the bytes that were received on it and not yet read."""

    __slots__ = ("_is_plain", "_is_unanswered", "_poll", "_spare", "_timeout_seconds", "_wakes_at", "socket")

    def __init__(self, connected: socket.socket, timeout_seconds: float) -> None:
        """Owns the socket from now on. ``timeout_seconds`` bounds each wait of a send, and each receive until ``set_timeout``."""
        self.socket = connected
        self._spare = memoryview(b"")
        self._is_plain = not isinstance(connected, ssl.SSLSocket)
        self._is_unanswered = False  # something was sent, and nothing came since
        self._timeout_seconds = 0.0
        self._wakes_at = 1  # bytes for which the kernel wakes us
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        if self._is_plain:
            # The kernel's timeouts instead of Python's: those poll before every call, and cannot wait for a whole body.
            connected.setblocking(True)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_seconds))
        self.set_timeout(timeout_seconds)

    @property
    def has_spare(self) -> bool:
        """Whether more was received than was asked for."""
        return len(self._spare) > 0

    def is_readable(self, seconds: float) -> bool:
        """Wait at most so long until something can be received, be it the connection's end."""
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
        """Whether content has come, which is kept, or the end. A session's tickets are neither, nor is a part of a record."""
        encrypted.settimeout(0)
        try:
            piece = encrypted.recv(_HEAD_PIECE)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            return True  # whoever reads on hears of it
        finally:
            encrypted.settimeout(self._timeout_seconds)
        if piece:
            self._spare, self._is_unanswered = memoryview(piece), False
        return True

    def set_timeout(self, seconds: float) -> None:
        """``TimeoutError`` when nothing is received for so long, or over TLS no further 256 KiB are sent."""
        if seconds == self._timeout_seconds:
            return
        self._timeout_seconds = seconds
        if self._is_plain:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
        else:
            self.socket.settimeout(seconds)

    def send(self, content: Body) -> None:
        """Send all of it, without a copy. ``EOFError``: the file is shorter by now."""
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
        """Bytes into the buffer, as many as come in time, at least one; 0 when the connection has ended."""
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
            # A blocking call would wake up for each packet; with a low-water mark it would not wake up for the last ones.
            self._wake_at(min(len(buffer), _WAKE_BYTES))
            self._poll.poll(self._timeout_seconds * 1000)
            return self.socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def receive_until(self, end: bytes, limit: int, along: int = 0) -> bytes:
        """Bytes up to and including ``end``; ``along`` bytes are expected after it, and received in the same call.

        ``ProtocolError``: it is not in the first ``limit`` bytes; ``ConnectionError``: nor before the connection ended
        (``NoAnswerError`` when nothing had come at all).
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
                raise TimeoutError("timed out")  # bytes come, but too slowly
            content += self._receive(room)
        if at + len(end) > limit:
            raise ProtocolError(f"a head or a line of the answer is longer than {limit} bytes")
        self._spare = memoryview(content)[at + len(end) :]
        return content[: at + len(end)]

    def _receive(self, room: int) -> bytes:
        """At least one byte."""
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
        """Make the thread that waits on this connection fail now. From any thread."""
        # Of ``socket``: ``SSLSocket.shutdown`` ends TLS first, and the reader would take ciphertext for content.
        socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def _timeval(seconds: float) -> bytes:
    """At least a microsecond: zero means no timeout to the kernel."""
    whole, micros = divmod(max(1, int(seconds * 1_000_000)), 1_000_000)
    return struct.pack("ll", whole, micros)
