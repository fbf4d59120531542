"""A threaded HTTP/1.1 server for doubles: keep-alive, ranges, a log of requests and scripted failures."""

import contextlib
import gzip
import os
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Self
from urllib.parse import SplitResult, urlsplit

from tests.doubles.content import Content, pieces_of, size_of
from tests.doubles.faults import Fault, Script
from tests.doubles.request_log import NOTED_HEADERS, LoggedRequest, RequestLog


@dataclass(frozen=True, slots=True)
class Request:
    """``target`` is path and query exactly as sent."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def url(self) -> SplitResult:
        return urlsplit(self.target)


@dataclass(frozen=True, slots=True)
class Answer:
    """``ranged`` asks the server to honour Range; ``size`` is what HEAD announces when there is no body to measure."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    content: Content = b""
    ranged: bool = False
    size: int | None = None


_THROTTLED = 16 * 1024  # bytes that are sent at once
Responder = Callable[[Request], Answer]


class Origin:
    """One address, of the loopback unless ``host`` says another, that answers through ``responder``, from ``with`` until its end.

    A failure inside the double itself is raised when it closes. Origins may share ``log`` and ``script``.
    """

    def __init__(
        self,
        name: str,
        responder: Responder,
        *,
        log: RequestLog | None = None,
        script: Script | None = None,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.name = name
        self.responder = responder
        self.log = log or RequestLog()
        self.script = script or Script()
        self.go_on = Event()
        self.clock: Callable[[], float] = time.time  # what the answers say
        self.failures: list[Exception] = []
        self.most_at_once = 0
        self._active = 0
        self._counting = Lock()
        self._server = _Server(self, host)
        port = self._server.server_address[1]
        self.url = f"https://localhost:{port}" if tls else f"http://{host}:{port}"
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def fail(self, fault: Fault, path: str = "", *, times: int | None = 1, skip: int = 0) -> None:
        """Order a failure; see :class:`tests.doubles.faults.Script`."""
        self.script.add(fault, path, origin=self.name, times=times, skip=skip)

    def now(self) -> float:
        """The clock may be another one later."""
        return self.clock()

    def count(self, change: int) -> None:
        """Requests come and go; one is over when its last bytes are about to be sent, for then its client may go on."""
        with self._counting:
            self._active += change
            self.most_at_once = max(self.most_at_once, self._active)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()
        if self.failures:
            raise ExceptionGroup(f"the double {self.name} failed", self.failures)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close waits for them, and every socket is closed by then
    request_queue_size = 128

    def __init__(self, origin: Origin, host: str) -> None:
        self.origin = origin
        self._open: set[socket.socket] = set()
        self._lock = Lock()
        super().__init__((host, 0), _Handler)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, address = super().get_request()
        with self._lock:
            self._open.add(connection)
        return connection, address

    def close_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        if isinstance(request, socket.socket):
            with self._lock:
                self._open.discard(request)
        super().close_request(request)

    def hang_up(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is its own business; everything else was kept by the handler."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    headers: HTTPMessage

    def log_message(self, *_: object) -> None:
        """The log is the origin's."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.server.origin.clock() if timestamp is None else timestamp)

    def _serve(self) -> None:
        origin = self.server.origin
        noted = {name: self.headers[name] for name in NOTED_HEADERS if name in self.headers}
        record = LoggedRequest(self.command, self.path, origin.name, noted)
        origin.log.add(record)
        length = int(self.headers.get("Content-Length", 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(length)
        if len(body) < length:  # a killed client has nothing to hear
            self.close_connection = True
            return
        request = Request(self.command, self.path, headers, body)
        fault = origin.script.take(self.command, self.path, origin.name)
        self._is_counted = True
        origin.count(+1)
        try:
            self._answer(request, record, fault)
        except OSError:
            self.close_connection = True
        except Exception as error:
            origin.failures.append(error)
            raise
        finally:
            self._over()

    def _over(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self.server.origin.count(-1)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - http.server's names

    def _answer(self, request: Request, record: LoggedRequest, fault: Fault | None) -> None:
        kind = fault.kind if fault else None
        if kind == "drop":
            self.close_connection = True
            return
        if fault and fault.before:
            fault.before()
        if kind == "hang":
            self.server.origin.go_on.wait()
            self.close_connection = True
            return
        if kind == "work":
            for _ in range(100):
                self.send_response_only(102)
                self.end_headers()
        if kind == "ignore range":
            request = replace(request, headers={k: v for k, v in request.headers.items() if k != "range"})
        if kind == "shift":
            first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
            request = replace(request, headers={**request.headers, "range": f"bytes=0-{int(last) - int(first)}"})
        if fault and kind == "answer":
            answer = Answer(fault.status, fault.headers, fault.body)
        else:
            answer = self.server.origin.responder(request)
        start, stop, answer = _altered(*_cut(answer, request.headers.get("range")), fault)
        record.status = answer.status
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(stop - start if answer.size is None else answer.size))
        has_body = request.method != "HEAD" and answer.status != 304
        if not has_body or start == stop:
            self._over()
        self.end_headers()
        if not has_body:
            return
        for piece in self._spoil(pieces_of(answer.content, start, stop), fault):
            record.bytes_served += len(piece)  # first: the client may look as soon as it has the bytes
            if record.bytes_served == stop - start:
                self._over()
            self.connection.sendall(piece)

    def _spoil(self, pieces: Iterator[memoryview], fault: Fault | None) -> Iterator[memoryview]:
        if fault and fault.throttle:
            for piece in pieces:
                for start in range(0, len(piece), _THROTTLED):
                    part = piece[start : start + _THROTTLED]
                    self.server.origin.go_on.wait(fault.throttle.seconds_for(len(part)))
                    yield part
            return
        if fault is None or fault.kind not in {"truncate", "stall", "cut", "flip", "reset"}:
            yield from pieces
            return
        sent = 0
        for piece in pieces:
            until = fault.at - sent
            sent += len(piece)
            if not 0 <= until < len(piece):
                yield piece
                continue
            yield piece[:until]
            if fault.kind in {"truncate", "cut"}:
                if fault.kind == "cut":
                    self.server.origin.go_on.wait()
                self.close_connection = True
                return
            if fault.kind == "reset":
                self._reset()
                return
            if fault.kind == "stall":
                self.server.origin.go_on.wait()
                yield piece[until:]
            else:
                yield memoryview(bytes([piece[until] ^ 0xFF]))
                yield piece[until + 1 :]

    def _reset(self) -> None:
        """Without lingering, closing sends RST; ``detach`` because the handler's files would keep the socket open."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())


def _altered(start: int, stop: int, answer: Answer, fault: Fault | None) -> tuple[int, int, Answer]:
    if fault and fault.kind == "alter":
        names = {name.lower() for name in fault.headers}
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in names}
        return start, stop, replace(answer, headers={**kept, **fault.headers})
    if fault and fault.kind == "gzip":
        body = gzip.compress(b"".join(pieces_of(answer.content, start, stop)), 1)
        return 0, len(body), replace(answer, headers={**answer.headers, "Content-Encoding": "gzip"}, content=body)
    return start, stop, answer


def _cut(answer: Answer, wanted: str | None) -> tuple[int, int, Answer]:
    """The part of the content to send (RFC 9110, 14.2): one range, or a suffix; anything else is the whole."""
    size = size_of(answer.content)
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if not answer.ranged or answer.status != 200 or not match or match[0] == "bytes=-":
        return 0, size, answer
    if match[1]:
        start, stop = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)
    else:
        start, stop = max(size - int(match[2]), 0), size
    if start >= stop:
        return 0, 0, Answer(416, {**answer.headers, "Content-Range": f"bytes */{size}"})
    headers = {**answer.headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    return start, stop, replace(answer, status=206, headers=headers)
