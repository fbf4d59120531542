"""A chunk that is on its way: its client is parked, and nobody else notices."""

import select
import socket
import struct
import threading
from concurrent.futures import Future

import pytest

from bdn.core.chunk import digest_of
from bdn.core.errors import BdnError, CacheFullError, NotFoundError, StoreUnavailableError
from bdn.net.chunk_server.connection import Timeouts
from bdn.wire.http_fields import chunk_path
from bdn.wire.shapes import status_of
from tests.support.content.names import named
from tests.support.content.shelves import connected, serving
from tests.support.network.chunk_talk import WaitingShelf, connect, read_answer, read_to_end

CONTENT = b"on its way"
PATH = chunk_path(digest_of(CONTENT))
REQUEST = f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
OWNED = REQUEST.replace(b"Host: x", f"Host: x\r\nBDN-Manifest: {named('manifest')}".encode())


@pytest.fixture
def shelf() -> WaitingShelf:
    shelf = WaitingShelf()
    shelf.add(CONTENT)
    return shelf


@pytest.fixture
def future(shelf: WaitingShelf) -> Future[object]:
    """What the next request waits for."""
    shelf.futures = [made := Future[object]()]
    return made


def asked(shelf: WaitingShelf, times: int) -> None:
    """Until the shelf was asked so often."""
    until = threading.Event()
    for _ in range(12_000):
        if len(shelf.asked) >= times:
            return
        until.wait(0.005)
    raise AssertionError(len(shelf.asked))


def test_a_client_gets_its_chunk_when_it_has_come_even_in_two_steps(shelf: WaitingShelf) -> None:
    one, two = shelf.futures = [Future[object](), Future[object]()]
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        asked(shelf, 1)
        assert not select.select([connection], [], [], 0)[0]
        one.set_result(None)
        asked(shelf, 2)
        assert not select.select([connection], [], [], 0)[0]
        two.set_result(None)
        assert read_answer(connection)[::2] == (200, CONTENT)
        connection.sendall(REQUEST)
        assert read_answer(connection)[::2] == (200, CONTENT)  # the connection goes on
    assert len(shelf.bearers) == 2  # permission is asked for once per request


def test_hundreds_of_clients_wait_for_one_future_without_a_thread_each(shelf: WaitingShelf) -> None:
    future = Future[object]()
    shelf.futures = [future] * 300
    with serving(shelf) as server:
        connections = [connect(server) for _ in range(300)]
        for connection in connections:
            connection.sendall(REQUEST)
        asked(shelf, 300)
        assert threading.active_count() < 60
        future.set_result(None)
        for connection in connections:
            with connection:
                assert read_answer(connection)[2] == CONTENT


@pytest.mark.parametrize("error", [NotFoundError("chunk"), CacheFullError(5, 1, 2, 3), StoreUnavailableError("away")])
def test_what_became_of_a_chunk_instead_is_the_answer(
    shelf: WaitingShelf, future: Future[object], error: BdnError
) -> None:
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(REQUEST + REQUEST)
        asked(shelf, 1)
        future.set_exception(error)
        assert read_answer(connection)[0] == status_of(error)
        assert read_answer(connection)[2] == CONTENT


def test_a_chunk_that_is_given_up_may_be_asked_for_again(shelf: WaitingShelf, future: Future[object]) -> None:
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        asked(shelf, 1)
        future.cancel()
        status, _, body = read_answer(connection)
    assert status == 503
    assert b'"retryable": true' in body


def test_a_bug_behind_a_future_costs_one_connection(
    shelf: WaitingShelf, future: Future[object], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        asked(shelf, 1)
        future.set_exception(ConnectionResetError("not the client's connection"))
        assert read_to_end(connection) == b""
        with connected(server) as client:
            assert client.ask(PATH)[1] == CONTENT
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


def test_a_chunk_that_never_comes_is_not_waited_for_for_ever(shelf: WaitingShelf) -> None:
    shelf.futures = [Future[object]()]
    with serving(shelf, timeouts=Timeouts(obtaining_seconds=0.2)) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        status, _, body = read_answer(connection)
        assert status == 503
        assert b"did not come within 0.2 s" in body
        connection.sendall(REQUEST)
        assert read_answer(connection)[2] == CONTENT


def test_two_futures_do_not_make_the_wait_longer(shelf: WaitingShelf) -> None:
    first = Future[object]()
    shelf.futures = [first, Future[object]()]
    with serving(shelf, timeouts=Timeouts(obtaining_seconds=0.2)) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        asked(shelf, 1)
        first.set_result(None)
        assert read_answer(connection)[0] == 503


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_client_that_does_not_wait_is_forgotten(shelf: WaitingShelf, future: Future[object], is_reset: bool) -> None:
    with serving(shelf) as server:
        connection = connect(server)
        connection.sendall(REQUEST)
        asked(shelf, 1)
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        else:
            connection.shutdown(socket.SHUT_WR)
            assert read_to_end(connection) == b""
            connection.close()
        with connected(server) as client:
            assert client.ask(PATH)[1] == CONTENT
        future.set_result(None)
        with connected(server) as client:
            assert client.ask(PATH)[1] == CONTENT
    assert len(shelf.asked) == 3  # not once more for the one that left


def test_a_peer_is_told_that_its_chunk_is_on_its_way(shelf: WaitingShelf, future: Future[object]) -> None:
    """Then it can tell an owner that works on it from one that hangs, and does not ask the mirror as well."""
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(OWNED)
        assert [read_answer(connection)[0] for _ in range(2)] == [102, 102]
        future.set_result(None)
        assert read_answer(connection)[::2] == (200, CONTENT)
    assert shelf.asked[0].manifest == named("manifest")


@pytest.mark.parametrize("request_of_other", [REQUEST, OWNED.replace(b"HTTP/1.1", b"HTTP/1.0")])
def test_who_is_no_peer_or_speaks_http_1_0_gets_no_interim_answer(
    shelf: WaitingShelf, future: Future[object], request_of_other: bytes
) -> None:
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(request_of_other)
        asked(shelf, 1)
        assert not select.select([connection], [], [], 0.1)[0]
        future.set_result(None)
        assert read_answer(connection)[0] == 200


def test_a_malformed_manifest_is_refused(shelf: WaitingShelf) -> None:
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(REQUEST.replace(b"Host: x", b"Host: x\r\nBDN-Manifest: latest"))
        assert read_answer(connection)[0] == 400
        assert read_to_end(connection) == b""
    assert shelf.asked == []


def test_closing_does_not_wait_for_chunks_on_their_way(shelf: WaitingShelf, future: Future[object]) -> None:
    with serving(shelf) as server:
        connection = connect(server)
        connection.sendall(REQUEST)
        asked(shelf, 1)
    with connection:
        assert read_to_end(connection) == b""
    future.set_result(None)  # and nobody falls over it
