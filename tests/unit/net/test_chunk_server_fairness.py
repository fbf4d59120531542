"""The data plane's server among many: no connection, address or organisation keeps others waiting for more than a round."""

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.net.chunk_server.connection import ChunkConnection, Service, Timeouts
from bdn.net.chunk_server.sending import NEXT_TURN
from bdn.net.chunk_server.server import ChunkServer
from bdn.wire.http_fields import chunk_path, push_path
from tests.support.content.noise import noise
from tests.support.content.shelves import Inbox, Shelf, connect, read_answer, read_to_end, serving

PUSH = f"mir_{'0a' * 12}"
SMALL, CONTENT, LARGE = b"twelve bytes", os.urandom(200_000), noise(CHUNK_SIZE)


def head(first: str, organisation: str, *headers: str) -> bytes:
    return "\r\n".join(
        (f"{first} HTTP/1.1", "Host: x", f"Authorization: Bearer {organisation}", *headers, "", "")
    ).encode()


def put_head(organisation: str, content: bytes, *headers: str) -> bytes:
    length = f"Content-Length: {len(content)}"
    return head(f"PUT {push_path(PUSH, digest_of(content))}", organisation, length, *headers)


def put(organisation: str, content: bytes = SMALL) -> bytes:
    return put_head(organisation, content) + content


def get(organisation: str, content: bytes = CONTENT) -> bytes:
    return head(f"GET {chunk_path(digest_of(content))}", organisation)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def shelf(inbox: Inbox) -> Shelf:
    shelf = Shelf(inbox.store)
    shelf.add(CONTENT)
    shelf.add(LARGE)
    return shelf


def is_served(server: ChunkServer, request: bytes, status: int) -> bool:
    with connect(server) as connection:
        return is_answered(connection, request, status)


def is_answered(connection: socket.socket, request: bytes, status: int = 200) -> bool:
    try:
        connection.sendall(request)
        return read_answer(connection)[0] == status
    except ConnectionError:
        return False


# --- turns of workers ---


def test_connection__answers_one_of_many_received_requests_in_a_turn(shelf: Shelf) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        connection = ChunkConnection(ours, Service(shelf, lambda _: None, Timeouts(), None))
        connection.organisation = "a"
        theirs.sendall(get("a", b"absent") * 20)
        for turns in range(1, 21):
            connection.advance()
            assert len(shelf.bearers) == turns


def test_connection__ends_its_turn_when_its_organisation_is_known(shelf: Shelf) -> None:
    """What may block after that is in the organisation's turn and not in its address's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        connection = ChunkConnection(ours, Service(shelf, lambda _: None, Timeouts(), None), "192.0.2.1")
        theirs.sendall(get("a"))
        assert connection.owner == "at 192.0.2.1"
        assert connection.advance() is NEXT_TURN
        assert (connection.owner, shelf.opened) == ("a", [])
        connection.advance()
        assert len(shelf.opened) == 1
        connection.close()


@contextmanager
def flooded(server: ChunkServer, requests: bytes, clients: int) -> Iterator[None]:
    """By connections that never pause, and read their answers."""
    over = threading.Event()

    def flood(connections: list[socket.socket]) -> None:
        while not over.is_set():
            readable, writable, _ = select.select(connections, connections, [], 1)
            with suppress(OSError):
                for connection in writable:
                    connection.send(requests)
                for connection in readable:
                    connection.recv(1 << 20)

    with ExitStack() as stack:
        crowd = [stack.enter_context(connect(server)) for _ in range(clients)]
        for connection in crowd:
            connection.setblocking(False)
        thread = threading.Thread(target=flood, args=(crowd,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def test_server__answers_others_while_connections_pipeline_without_pause(shelf: Shelf, inbox: Inbox) -> None:
    """They are more than the server has workers."""
    request = b"GET /nothing HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    with serving(shelf, received=inbox) as server, flooded(server, request * 50, 52):
        for _ in range(2):
            assert is_served(server, put("b"), 204)


def test_server__refuses_a_connection_that_sends_nothing_but_empty_lines(shelf: Shelf) -> None:
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(b"\r\n" * 100)
        assert read_answer(connection)[0] == 400


# --- buffers ---


def test_sender_without_body__holds_no_buffer(shelf: Shelf, inbox: Inbox) -> None:
    with serving(shelf, received=inbox, buffers=1) as server, ExitStack() as stack:
        for expecting in ([], ["Expect: 100-continue"]) * 3:
            silent = stack.enter_context(connect(server))
            silent.sendall(put_head("a", LARGE, *expecting))
        for _ in range(6):
            assert is_served(server, put("a"), 204)


def test_slow_senders_of_one_organisation__leave_buffers_for_others(shelf: Shelf, inbox: Inbox) -> None:
    with serving(shelf, received=inbox, buffers=4) as server, ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(24)]
        for connection in slow:
            connection.sendall(put_head("a", LARGE) + LARGE[:1])
        for organisation in "bcd":
            assert is_served(server, put(organisation), 204)


def test_organisation_at_its_share__gets_the_next_buffer_it_releases(shelf: Shelf, inbox: Inbox) -> None:
    with serving(shelf, received=inbox, buffers=2) as server, connect(server) as first, connect(server) as second:
        first.sendall(put_head("a", LARGE) + LARGE[:1])
        second.sendall(put("a"))
        first.sendall(LARGE[1:])
        assert read_answer(first)[0] == read_answer(second)[0] == 204


# --- connections ---


def connect_from(server: ChunkServer, address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20, source_address=(address, 0))


def test_server_at_its_limit__closes_the_oldest_idle_stranger(shelf: Shelf) -> None:
    with serving(shelf, connections=16) as server, ExitStack() as stack:
        crowd = [stack.enter_context(connect(server)) for _ in range(16)]
        assert is_served(server, get("b"), 200)
        assert crowd[0].recv(1) == b""
        assert is_answered(crowd[-1], get("b"))


def test_strangers_of_one_address__make_room_for_their_own_alone(shelf: Shelf) -> None:
    with serving(shelf, connections=40) as server, ExitStack() as stack:
        others = [stack.enter_context(connect_from(server, "127.0.0.3")) for _ in range(10)]
        crowd = [stack.enter_context(connect_from(server, "127.0.0.2")) for _ in range(60)]
        assert [connection.recv(1) for connection in crowd[:44]] == [b""] * 44
        for connection in (*others, *crowd[44:]):
            assert is_answered(connection, get("b"))


def test_organisation_with_too_many_connections_at_work__is_refused_and_others_are_served(shelf: Shelf) -> None:
    with serving(shelf, connections=8) as server, ExitStack() as stack:
        for _ in range(6):
            busy = stack.enter_context(connect(server))
            busy.sendall(get("a", LARGE))
            assert busy.recv(1) == b"H"
        assert is_served(server, get("a"), 503)
        assert is_served(server, get("b"), 200)


def test_connection_at_work__is_not_closed_for_a_newcomer(shelf: Shelf) -> None:
    with serving(shelf, connections=1) as server, connect(server) as busy:
        busy.sendall(get("a", LARGE))
        assert busy.recv(1) == b"H"
        with connect(server) as other:
            assert read_to_end(other) == b""
        assert read_to_end_of(busy).endswith(LARGE)


def read_to_end_of(connection: socket.socket) -> bytes:
    """The rest of the answer with ``LARGE``."""
    connection.shutdown(socket.SHUT_WR)
    return read_to_end(connection)
