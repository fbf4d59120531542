"""Raw conversations with a chunk server, and shelves that do not have everything yet."""

import socket
from concurrent.futures import Future
from dataclasses import dataclass, field

from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.net.chunk_server.server import ChunkServer
from tests.support.content.shelves import Shelf


def connect(server: ChunkServer) -> socket.socket:
    """A client that is patient for 20 s."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


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
    length = 0 if status in (102, 304) else int(headers["content-length"])
    while len(body) < length:
        body += connection.recv(length - len(body))
    return status, headers, body


@dataclass
class WaitingShelf(Shelf):
    """Answers with the next of ``futures`` while there is one, and then from the store."""

    futures: list[Future[object]] = field(default_factory=list)
    asked: list[ChunkRequest] = field(default_factory=list)

    def open_chunk(self, request: ChunkRequest) -> OpenChunk | Future[object]:  # type: ignore[override]
        self.asked.append(request)
        if self.futures:
            return self.futures.pop(0)
        return super().open_chunk(request)
