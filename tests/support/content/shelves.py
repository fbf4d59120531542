"""A chunk server over any store, and clients of it, for tests."""

import io
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import BinaryIO

from bdn.core.chunk import Digest, digest_of
from bdn.core.store import ChunkStore
from bdn.net.chunk_server.connection import Timeouts
from bdn.net.chunk_server.receiving import BUFFERS
from bdn.net.chunk_server.sending import Pace
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk, PushedChunk, ReceivedChunks
from bdn.net.chunk_server.server import ChunkServer
from bdn.net.tls import Certificate
from bdn.store.directory import DirectoryStore
from tests.support.content.memory_store import MemoryStore


@dataclass
class Shelf:
    """A ``ServedChunks`` over ``store``. Each bearer is its own organisation. ``refusal`` is raised by ``authorize``; ``bearers`` is what it was given."""

    store: ChunkStore = field(default_factory=MemoryStore)
    refusal: Exception | None = None
    bearers: list[str | None] = field(default_factory=list)
    opened: list[BinaryIO] = field(default_factory=list)

    def authorize(self, request: ChunkRequest) -> str:
        self.bearers.append(request.bearer)
        if self.refusal is not None:
            raise self.refusal
        return request.bearer or ""

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        file = self.store.open(request.digest)
        self.opened.append(file)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        return OpenChunk(file, 0, size)

    def add(self, content: bytes) -> Digest:
        """The chunk's name, now held."""
        digest = digest_of(content)
        self.store.put(digest, memoryview(content))
        return digest


@dataclass
class Inbox:
    """A ``ReceivedChunks`` over ``store``. Each bearer is its own organisation. ``refusal`` is raised by ``authorize``, ``failure`` by ``take``; they gather what they are given."""

    store: MemoryStore | DirectoryStore = field(default_factory=MemoryStore)
    refusal: Exception | None = None
    failure: Exception | None = None
    requests: list[PushedChunk] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)

    def authorize(self, request: PushedChunk) -> str:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        return request.bearer or ""

    def take(self, request: PushedChunk, content: memoryview) -> None:
        if self.failure is not None:
            raise self.failure
        self.store.put(request.digest, content)
        self.taken.append(bytes(content))


@contextmanager
def serving(
    shelf: Shelf,
    *,
    on_sent: Callable[[int], None] | None = None,
    timeouts: Timeouts | None = None,
    pace: Pace | None = None,
    is_local: bool = False,
    certificate: Certificate | None = None,
    received: ReceivedChunks | None = None,
    on_received: Callable[[int], None] | None = None,
    buffers: int = BUFFERS,
    connections: int = 4096,
    port: int = 0,
) -> Iterator[ChunkServer]:
    made = ChunkServer(
        shelf,
        "127.0.0.1",
        port,
        on_sent=on_sent,
        timeouts=timeouts,
        pace=pace,
        is_local=is_local,
        certificate=certificate,
        received=received,
        on_received=on_received,
        buffers=buffers,
        connections=connections,
    )
    with closing(made) as server:
        server.start()
        yield server


@dataclass
class Client:
    """One keep-alive connection to a chunk server, as plain as possible."""

    connection: HTTPConnection

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
        """The answer's head and its body; the connection stays open."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, headers=named)
        response = self.connection.getresponse()
        return response, response.read()


@contextmanager
def connected(server: ChunkServer) -> Iterator[Client]:
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        yield Client(connection)


# --- raw conversations ---


def connect(server: ChunkServer) -> socket.socket:
    """A client that is patient for 20 s."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def reset(connection: socket.socket) -> None:
    """Close it with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_to_end(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    content = b""
    while piece := connection.recv(65536):
        content += piece
    return content


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in lower case, and body of the next answer."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError(head)
        head += byte
    first, *lines = head.decode().split("\r\n")[:-2]
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    status, body = int(first.split(" ")[1]), b""
    length = 0 if status in (100, 102, 204, 304) else int(headers["content-length"])
    while len(body) < length:
        body += connection.recv(length - len(body))
    return status, headers, body
