"""The data plane's server: chunks by name, straight from files to sockets with ``sendfile``, one thread per connection.

It does not go through uvicorn: on the machine of ARCHITECTURE's table that costs a factor of four to eight.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO, Protocol

from bdn.core.chunk import ByteRange
from bdn.core.digest import Digest
from bdn.core.errors import BdnError, InvalidRequestError, NotFoundError
from bdn.wire.errors import document_of, status_of
from bdn.wire.http_server import binding_error
from bdn.wire.paths import MEDIA_CHUNK, MEDIA_JSON, parse_chunk_path
from bdn.wire.ranges import UnsatisfiableRangeError, format_content_range, parse_range

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """A chunk inside an open file, which the server closes."""

    file: BinaryIO
    offset: int
    size: int


class ChunkShelf(Protocol):
    """Where a server finds chunks, and who may have them."""

    def authorize(self, bearer: str | None, digest: Digest) -> None:
        """Raise ``UnauthenticatedError``, ``GrantInvalidError`` or ``NotFoundError`` (not yours and not there look alike)."""
        ...

    def open_chunk(self, digest: Digest) -> OpenChunk:
        """The chunk; ``NotFoundError`` when it is not held."""
        ...


class ChunkServer:
    """Listens from construction on and serves from ``start`` until ``close``."""

    def __init__(
        self,
        shelf: ChunkShelf,
        host: str,
        port: int,
        *,
        on_sent: Callable[[int], None] | None = None,
        timeout_seconds: float = 60,
    ) -> None:
        handler = type(
            "_BoundHandler",
            (_ChunkHandler,),
            {"shelf": shelf, "timeout": timeout_seconds, "on_sent": staticmethod(on_sent or _ignore)},
        )
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise binding_error(host, port, error) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="chunk-server", daemon=True
        )

    def start(self) -> None:
        """Serve in the background."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close every connection."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.close_connections()


def _ignore(_: int) -> None:
    """Nobody counts."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - socketserver's signature
        # Called while the exception is being handled. A client that went away is its own business; anything else is ours.
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        logger.log(level, "connection of a chunk client failed", exc_info=True, extra={"client": str(client_address)})

    def close_connections(self) -> None:
        """End the threads of clients that keep their connections open."""
        with self._lock:
            connections = tuple(self._open)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the client was faster


class _ChunkHandler(BaseHTTPRequestHandler):
    shelf: ChunkShelf
    on_sent: Callable[[int], None]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version = "bdn"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """What ``http.server`` refuses by itself, such as another method: as an error document too, and the last one."""
        self.close_connection = True
        error = InvalidRequestError(message or HTTPStatus(code).phrase)
        self._refuse(error, status=code, body=self.command != "HEAD")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        logger.debug(format, *args)

    def _answer(self, *, body: bool) -> None:
        if "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0":
            self.close_connection = True  # nobody reads that body, and it must not be taken for the next request
        try:
            digest = parse_chunk_path(self.path)
            if digest is None:
                raise NotFoundError(f"path {self.path[:100]!a}")
            scheme, _, bearer = (self.headers.get("Authorization") or "").partition(" ")
            self.shelf.authorize(bearer.strip() if scheme.lower() == "bearer" else None, digest)
            chunk = self.shelf.open_chunk(digest)
        except BdnError as error:
            self._refuse(error, body=body)
            return
        with chunk.file:
            self._send_chunk(digest, chunk, body=body)

    def _send_chunk(self, digest: Digest, chunk: OpenChunk, *, body: bool) -> None:
        try:
            part = parse_range(self.headers.get("Range"), chunk.size)
        except UnsatisfiableRangeError:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{chunk.size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200 if part is None else 206)
        part_or_whole = part or (ByteRange(0, chunk.size) if chunk.size else None)
        size = part_or_whole.size if part_or_whole else 0
        self.send_header("Content-Type", MEDIA_CHUNK)
        self.send_header("Content-Length", str(size))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{digest}"')
        if part is not None:
            self.send_header("Content-Range", format_content_range(part, chunk.size))
        self.end_headers()
        if body and part_or_whole is not None:
            sent = self.connection.sendfile(chunk.file, chunk.offset + part_or_whole.start, size)
            self.on_sent(sent)
            if sent != size:  # the file is too short; the client must not wait for the rest
                self.close_connection = True

    def _refuse(self, error: BdnError, *, body: bool, status: int | None = None) -> None:
        content = json.dumps(document_of(error)).encode()
        self.send_response(status or status_of(error))
        self.send_header("Content-Type", MEDIA_JSON)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if body:
            self.wfile.write(content)
