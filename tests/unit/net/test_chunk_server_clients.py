"""The data plane's server and its clients: patient, rude, gone; and its end."""

import io
import logging
import socket
import struct
from contextlib import closing
from threading import Event

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import InvalidRequestError
from bdn.core.pace.retry import StallPolicy
from bdn.net.chunk_server.connection import Timeouts
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.net.chunk_server.server import ChunkServer
from bdn.wire.http_fields import chunk_path
from tests.support.content.shelves import Shelf, connected, serving
from tests.support.network.chunk_talk import connect, read_to_end

CONTENT = bytes(range(256)) * 4
CHUNK = digest_of(CONTENT)
PATH = chunk_path(CHUNK)
HASTY = Timeouts(0.25, 0.25, 0.25, StallPolicy(64 * 1024, 0.25))
LARGE = b"".join(number.to_bytes(8, "big") * 512 for number in range(CHUNK_SIZE // 4096))
REQUEST = f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.fixture
def shelf() -> Shelf:
    shelf = Shelf()
    shelf.add(CONTENT)
    return shelf


def test_one_connection_carries_many_requests(shelf: Shelf) -> None:
    with serving(shelf) as server, connected(server) as client:
        local = set()
        for number in range(50):
            path = PATH if number % 3 else "/nothing"
            response, body = client.ask(
                path, method="GET" if number % 2 else "HEAD", Range="bytes=0-9" if number % 5 else ""
            )
            assert response.status in (200, 206, 404)
            assert body == b"" or response.status == 404 or CONTENT.startswith(body)
            local.add(client.connection.sock.getsockname())
        assert len(local) == 1


def test_requests_that_are_sent_at_once_are_answered_in_order(shelf: Shelf) -> None:
    last = REQUEST.replace(b"Host: x", b"Host: x\r\nRange: bytes=0-3\r\nConnection: close")
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(REQUEST + last)
        answers = read_to_end(connection)
    assert answers.count(b"HTTP/1.1 200") == answers.count(b"HTTP/1.1 206") == 1
    assert answers.endswith(b"\r\n\r\n" + CONTENT[:4])


def test_a_client_of_http_1_0_gets_its_answer_and_the_end_of_the_connection(shelf: Shelf) -> None:
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(REQUEST.replace(b"1.1", b"1.0"))
        assert read_to_end(connection).endswith(b"\r\n\r\n" + CONTENT)


def test_a_body_that_nobody_wants_is_not_taken_for_the_next_request(shelf: Shelf) -> None:
    """Behind a proxy that shares connections, the next answer would go to another client."""
    for length in (f"Content-Length: {len(REQUEST)}".encode(), b"Transfer-Encoding: chunked"):
        with serving(shelf) as server, connect(server) as connection:
            connection.sendall(REQUEST.replace(b"Host: x", b"Host: x\r\n" + length) + REQUEST)
            connection.shutdown(socket.SHUT_WR)
            assert read_to_end(connection).count(b"HTTP/1.1 200") == 1


def test_a_client_that_reads_slowly_does_not_hold_up_the_others(shelf: Shelf) -> None:
    path = chunk_path(shelf.add(LARGE))
    with serving(shelf) as server, connect(server) as slow, connected(server) as client:
        slow.sendall(REQUEST.replace(PATH.encode(), path.encode()))
        assert slow.recv(1) == b"H"  # the answer has begun, and most of it does not fit into the sockets
        assert client.ask(path)[1] == LARGE
        slow.sendall(REQUEST.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert read_to_end(slow).endswith(CONTENT)


@pytest.mark.parametrize("request_begun", [b"", b"GET /chu", REQUEST])
def test_a_client_that_does_nothing_for_too_long_is_hung_up_on(shelf: Shelf, request_begun: bytes) -> None:
    with serving(shelf, timeouts=HASTY) as server, connect(server) as connection:
        connection.sendall(request_begun)
        assert read_to_end(connection).count(b"HTTP/1.1 200") == (request_begun == REQUEST)


class WatchedFile(io.BytesIO):
    """Tells when it is closed."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.ended = Event()

    def close(self) -> None:
        super().close()
        self.ended.set()


class WatchedShelf(Shelf):
    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        file = WatchedFile(LARGE)
        self.opened.append(file)
        return OpenChunk(file, 0, len(LARGE))


def test_a_client_that_stops_reading_for_too_long_is_hung_up_on() -> None:
    shelf = WatchedShelf()
    with serving(shelf, timeouts=HASTY) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        assert connection.recv(1) == b"H"
        file = shelf.opened[0]
        assert isinstance(file, WatchedFile)
        assert file.ended.wait(20)
        with pytest.raises(ConnectionResetError):  # so that the kernel keeps nothing for it either
            read_to_end(connection)


@pytest.mark.parametrize("asked_for", [b"", b"GET /chu", REQUEST, b"\x16\x03\x01\x02\x00", b"\r\n\r\n"])
def test_a_client_that_vanishes_leaves_the_server_working(shelf: Shelf, asked_for: bytes) -> None:
    path = chunk_path(shelf.add(LARGE))
    with serving(shelf) as server:
        for _ in range(3):
            with connect(server) as connection:
                connection.sendall(asked_for.replace(PATH.encode(), path.encode()))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST
        with connected(server) as client:
            assert client.ask(PATH)[1] == CONTENT


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 70_000 + b"\r\n"]
)
def test_nonsense_is_refused_and_the_connection_closed(shelf: Shelf, nonsense: bytes) -> None:
    with serving(shelf, timeouts=HASTY) as server:
        with connect(server) as connection:
            connection.sendall(nonsense)
            assert CONTENT not in read_to_end(connection)
        with connected(server) as client:
            assert client.ask(PATH)[1] == CONTENT


class CutShelf(Shelf):
    """The file ends before the chunk does: something else has written to the disk."""

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        chunk = super().open_chunk(request)
        return OpenChunk(chunk.file, chunk.offset, chunk.size + 1)


def test_a_file_that_is_too_short_ends_the_connection_at_once(shelf: Shelf) -> None:
    """Otherwise client and server would wait for each other until one of them times out."""
    sent: list[int] = []
    with serving(CutShelf(shelf.store), on_sent=sent.append) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        assert read_to_end(connection).endswith(CONTENT)
    assert sent == [len(CONTENT)]


def test_a_bug_of_the_shelf_is_logged_as_one_and_costs_one_connection(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.refusal = LookupError("a bug")
    with serving(shelf) as server, connected(server) as client:
        with connect(server) as connection:
            connection.sendall(REQUEST)
            assert read_to_end(connection) == b""
        shelf.refusal = None
        assert client.ask(PATH)[1] == CONTENT
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.ERROR]


def test_a_client_that_vanishes_is_not_logged_as_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    shelf = WatchedShelf()
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        assert connection.recv(1) == b"H"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        file = shelf.opened[0]
        assert isinstance(file, WatchedFile)
        assert file.ended.wait(20)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_closing_ends_every_connection_and_frees_the_port(shelf: Shelf) -> None:
    with serving(shelf) as server:
        port = server.port
        idle, busy = connect(server), connect(server)
        path = chunk_path(shelf.add(LARGE))
        busy.sendall(REQUEST.replace(PATH.encode(), path.encode()))
        assert busy.recv(1) == b"H"
        with connected(server) as client:
            client.ask(PATH)
    with idle, busy:
        assert idle.recv(1) == b""
        assert len(read_to_end(busy)) < len(LARGE)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with closing(ChunkServer(shelf, "127.0.0.1", port)) as again:
        assert again.port == port


def test_closing_twice_or_before_the_start_is_fine(shelf: Shelf) -> None:
    with serving(shelf) as server:
        server.close()
    never_started = ChunkServer(shelf, "127.0.0.1", 0)
    never_started.close()
    never_started.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_an_address_may_be_ipv6(shelf: Shelf) -> None:
    try:
        server = ChunkServer(shelf, "::1", 0)
    except InvalidRequestError as error:
        pytest.skip(str(error))
    with closing(server):
        server.start()
        with socket.create_connection(("::1", server.port), timeout=20) as connection:
            connection.sendall(REQUEST.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            assert read_to_end(connection).endswith(CONTENT)
