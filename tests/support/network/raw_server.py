"""A TCP address whose connections are played byte by byte, for answers that no HTTP library would give."""

import contextlib
import socket
import struct
from collections.abc import Callable
from threading import Event, Thread
from typing import Self

Play = Callable[[socket.socket], None]


class RawServer:
    """The n-th connection is played by the n-th play and then closed; there is no connection after the last one.

    A play that fails is raised when the server closes; a client that goes away is no failure.
    """

    def __init__(self, *plays: Play) -> None:
        self._plays = plays
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._current: socket.socket | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.closed = [Event() for _ in plays]
        self.failures: list[Exception] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._listener, self._current):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        if self.failures:
            raise ExceptionGroup("a play failed", self.failures)

    def _run(self) -> None:
        for play, closed in zip(self._plays, self.closed, strict=True):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the test is over
            self.connections += 1
            with connection:
                self._current = connection
                try:
                    play(connection)
                except OSError:
                    pass
                except Exception as error:
                    self.failures.append(error)
                self._current = None
            closed.set()


def read_head(connection: socket.socket) -> bytes:
    """A request without a body; ``ConnectionError`` when the client hung up instead."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        if not piece:
            raise ConnectionError("the client hung up")
        head += piece
    return head


def message(status: str, *headers: str, body: bytes = b"") -> bytes:
    """An answer's bytes, exactly with these headers."""
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode("latin-1") + body


def partial(body: bytes, start: int, size: int, *headers: str) -> bytes:
    """A right 206 with these bytes of a file of ``size`` bytes."""
    stated = f"Content-Range: bytes {start}-{start + len(body) - 1}/{size}"
    return message("206 Partial Content", stated, f"Content-Length: {len(body)}", *headers, body=body)


def answering(*answers: bytes) -> Play:
    """One answer for each request on the connection, then the end of the connection."""

    def play(connection: socket.socket) -> None:
        for content in answers:
            read_head(connection)
            connection.sendall(content)

    return play


DONE = message("200 OK", "Content-Length: 2", body=b"ok")


def taking(*bodies: bytes) -> Play:
    """Each request brings its body, or the play fails; all are answered with ``DONE``."""

    def play(connection: socket.socket) -> None:
        for body in bodies:
            head = read_head(connection)
            assert head.startswith(b"PUT ")
            assert b"\r\nContent-Length: %d\r\n" % len(body) in head
            came = bytearray()
            while len(came) < len(body):
                came += connection.recv(1 << 20)
            assert came == body
            connection.sendall(DONE)

    return play


def waiting_after(*answers: bytes) -> Play:
    """As ``answering``; but the connection ends only when the client ends it, or asks once more."""

    def play(connection: socket.socket) -> None:
        answering(*answers)(connection)
        connection.recv(1)

    return play


def resetting_after(content: bytes) -> Play:
    """The connection is reset (RST, not FIN) once the client has all of ``content`` and waits for more."""

    def play(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(content)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return play
