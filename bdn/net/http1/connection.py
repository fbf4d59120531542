"""One connection's socket: blocking, with the kernel's own timeouts, so that a large piece of a body is one system call."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from typing import Final

from bdn.net.http1.head import ProtocolError

_HEAD_PIECE: Final = 4096  # what is received beyond a head is copied later, so this is small,
_WAKE_BYTES: Final = 512 * 1024  # slept for at once: of a body on a fast link, waking up was a third of the work
_WORTH_A_CALL: Final = 64 * 1024  # below that, one blocking call costs less than asking whether enough has come
_ALONG_LIMIT: Final = (
    64 * 1024
)  # unless the whole body is: then it comes along, and a system call costs more than a copy


class NoAnswerError(ConnectionResetError):
    """The server closed the connection and had not begun to answer."""


class Wire:
    """One connected socket, and what was received on it and belongs to what comes next."""

    __slots__ = ("_is_plain", "_is_unanswered", "_patience_seconds", "_poll", "_spare", "_wakes_at", "socket")

    def __init__(self, connected: socket.socket, timeout_seconds: float) -> None:
        """Takes the socket over. ``timeout_seconds`` bounds each send, and each wait until told otherwise."""
        self.socket = connected
        self._spare = memoryview(b"")
        self._is_plain = not isinstance(connected, ssl.SSLSocket)
        self._is_unanswered = False  # something was sent, and nothing came since
        self._patience_seconds = 0.0
        self._wakes_at = 1  # bytes for which the kernel wakes us
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        if self._is_plain:
            # The kernel's timeouts instead of Python's: those poll before every call, and cannot wait for a whole body.
            connected.setblocking(True)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_seconds))
        self.wait_at_most(timeout_seconds)

    @property
    def has_spare(self) -> bool:
        """Whether more was received than was asked for."""
        return len(self._spare) > 0

    def has_come(self, seconds: float) -> bool:
        """Wait at most so long until something can be received, be it the connection's end."""
        if len(self._spare) or (isinstance(self.socket, ssl.SSLSocket) and self.socket.pending()):
            return True
        self._wake_at(1)
        return bool(self._poll.poll(seconds * 1000))

    def wait_at_most(self, seconds: float) -> None:
        """From now on, ``TimeoutError`` when nothing comes for so long."""
        if seconds == self._patience_seconds:
            return
        self._patience_seconds = seconds
        if self._is_plain:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
        else:
            self.socket.settimeout(seconds)

    def send(self, content: bytes) -> None:
        """All of it."""
        self._is_unanswered = True
        try:
            self.socket.sendall(content)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

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
            if len(buffer) < _WORTH_A_CALL:
                self._wake_at(1)
                return self.socket.recv_into(buffer, 0, socket.MSG_WAITALL)
            # A blocking call would be woken up for each packet; and with a mark of its own, for the last ones never.
            self._wake_at(min(len(buffer), _WAKE_BYTES))
            self._poll.poll(self._patience_seconds * 1000)
            return self.socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def receive_until(self, end: bytes, limit: int, along: int = 0) -> bytes:
        """Bytes up to and with ``end``; ``along`` is how many bytes behind it are expected, to receive them in one go.

        Raises:
            ProtocolError: there is no ``end`` in the first ``limit`` bytes.
            ConnectionError: the connection ended before; ``NoAnswerError`` when nothing had come at all.
        """
        self._wake_at(1)
        room = _HEAD_PIECE + (along if along <= _ALONG_LIMIT else 0)
        content, searched, begun = bytes(self._spare) or self._receive(room), 0, 0.0
        while (at := content.find(end, searched)) < 0:
            if len(content) >= limit:
                raise ProtocolError(f"a head or a line of the answer is longer than {limit} bytes")
            searched = max(0, len(content) - len(end) + 1)
            now = time.monotonic()
            begun = begun or now
            if now - begun > self._patience_seconds:
                raise TimeoutError("timed out")  # it trickles
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
        """From now on, sleep until so many bytes can be received, or the connection ends (``SO_RCVLOWAT``, tcp(7))."""
        if self._is_plain and count != self._wakes_at:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wakes_at = count

    def break_off(self) -> None:
        """Let whoever waits on this connection fail now. From any thread."""
        # The socket's own: that of a TLS socket would make its reader take ciphertext for content.
        socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def _timeval(seconds: float) -> bytes:
    """At least a microsecond: for the kernel, nothing means for ever."""
    whole, micros = divmod(max(1, int(seconds * 1_000_000)), 1_000_000)
    return struct.pack("ll", whole, micros)
