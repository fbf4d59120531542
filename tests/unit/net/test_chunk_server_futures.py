"""Clients that wait, for a chunk on its way or for their moment: parked at no cost, and resumed once."""

import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import digest_of
from bdn.core.errors import BdnError, CacheFullError, NotFoundError, StoreUnavailableError
from bdn.net.chunk_server.connection import ChunkConnection, Service, Timeouts
from bdn.net.chunk_server.sending import Wait
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.net.chunk_server.server import ChunkServer, Poller, Timers
from bdn.wire.http_fields import chunk_path
from bdn.wire.shapes import status_of
from tests.support.content.names import named
from tests.support.content.shelves import Shelf, connect, connected, read_answer, read_to_end, reset, serving
from tests.support.network.hypothesis import BRIEFLY
from tests.support.services.commands import wait_until

CONTENT = b"on its way"
PATH = chunk_path(digest_of(CONTENT))
REQUEST = f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
OWNED = REQUEST.replace(b"Host: x", f"Host: x\r\nBDN-Manifest: {named('manifest')}".encode())


@dataclass
class WaitingShelf(Shelf):
    """Answers with the next of ``futures`` while there is one, and then from the store."""

    futures: list[Future[object]] = field(default_factory=list)
    asked: list[ChunkRequest] = field(default_factory=list)

    def open_chunk(self, request: ChunkRequest) -> OpenChunk | Future[object]:  # type: ignore[override]
        self.asked.append(request)
        return self.futures.pop(0) if self.futures else super().open_chunk(request)

    def wait_until_asked(self, times: int) -> None:
        wait_until(lambda: len(self.asked) >= times)


@pytest.fixture
def future() -> Future[object]:
    """What the first request waits for."""
    return Future[object]()


@pytest.fixture
def shelf(future: Future[object]) -> WaitingShelf:
    shelf = WaitingShelf(futures=[future])
    shelf.add(CONTENT)
    return shelf


@pytest.fixture
def server(shelf: WaitingShelf) -> Iterator[ChunkServer]:
    with serving(shelf) as server:
        yield server


@pytest.fixture
def parked(shelf: WaitingShelf, server: ChunkServer) -> Iterator[socket.socket]:
    """A client that waits for the future."""
    with connect(server) as connection:
        connection.sendall(REQUEST)
        shelf.wait_until_asked(1)
        yield connection


def is_answered(connection: socket.socket, seconds: float = 0) -> bool:
    return bool(select.select([connection], [], [], seconds)[0])


def test_a_client_gets_its_chunk_when_it_has_come_even_in_two_steps(
    shelf: WaitingShelf, future: Future[object], parked: socket.socket
) -> None:
    shelf.futures = [second := Future[object]()]
    assert not is_answered(parked)
    future.set_result(None)
    shelf.wait_until_asked(2)
    assert not is_answered(parked)
    second.set_result(None)
    assert read_answer(parked)[::2] == (200, CONTENT)
    parked.sendall(REQUEST)
    assert read_answer(parked)[::2] == (200, CONTENT)  # the connection goes on
    assert len(shelf.bearers) == 2  # permission is asked for once per request


def test_hundreds_of_clients_wait_for_one_future_without_a_thread_each(
    shelf: WaitingShelf, future: Future[object], server: ChunkServer
) -> None:
    shelf.futures = [future] * 300
    connections = [connect(server) for _ in range(300)]
    for connection in connections:
        connection.sendall(REQUEST)
    shelf.wait_until_asked(300)
    assert threading.active_count() < 120
    future.set_result(None)
    for connection in connections:
        with connection:
            assert read_answer(connection)[2] == CONTENT


@pytest.mark.parametrize("error", [NotFoundError("chunk"), CacheFullError(5, 1, 2, 3), StoreUnavailableError("away")])
def test_what_became_of_a_chunk_instead_is_the_answer(
    future: Future[object], parked: socket.socket, error: BdnError
) -> None:
    parked.sendall(REQUEST)
    future.set_exception(error)
    assert read_answer(parked)[0] == status_of(error)
    assert read_answer(parked)[2] == CONTENT


def test_a_chunk_that_is_given_up_may_be_asked_for_again(future: Future[object], parked: socket.socket) -> None:
    future.cancel()
    status, _, body = read_answer(parked)
    assert status == 503
    assert b'"retryable": true' in body


def test_a_bug_behind_a_future_costs_one_connection(
    future: Future[object], server: ChunkServer, parked: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    future.set_exception(ConnectionResetError("not the client's connection"))
    assert read_to_end(parked) == b""
    with connected(server) as client:
        assert client.ask(PATH)[1] == CONTENT
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


@pytest.mark.parametrize("futures", [1, 2])
def test_a_chunk_that_never_comes_is_not_waited_for_for_ever_nor_longer_for_two_futures(
    shelf: WaitingShelf, future: Future[object], futures: int
) -> None:
    shelf.futures += [Future[object]()] * (futures - 1)
    with serving(shelf, timeouts=Timeouts(obtaining_seconds=1.0)) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        if futures == 2:
            shelf.wait_until_asked(1)
            future.set_result(None)
        status, _, body = read_answer(connection)
        assert status == 503
        assert b"was not obtained within 1 s" in body
        connection.sendall(REQUEST)
        assert read_answer(connection)[2] == CONTENT


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_client_that_does_not_wait_is_forgotten(
    shelf: WaitingShelf, future: Future[object], server: ChunkServer, parked: socket.socket, is_reset: bool
) -> None:
    if is_reset:
        reset(parked)
    else:
        parked.shutdown(socket.SHUT_WR)
        assert read_to_end(parked) == b""
    with connected(server) as client:
        assert client.ask(PATH)[1] == CONTENT
        future.set_result(None)
        assert client.ask(PATH)[1] == CONTENT
    assert len(shelf.asked) == 3  # not once more for the one that left


def test_a_peer_is_told_that_its_chunk_is_on_its_way(
    shelf: WaitingShelf, future: Future[object], server: ChunkServer
) -> None:
    """Then it can tell an owner that works on it from one that hangs, and does not ask the mirror as well."""
    with connect(server) as connection:
        connection.sendall(OWNED)
        assert [read_answer(connection)[0] for _ in range(2)] == [102, 102]
        future.set_result(None)
        assert read_answer(connection)[::2] == (200, CONTENT)
    assert shelf.asked[0].manifest == named("manifest")


@pytest.mark.parametrize("request_of_other", [REQUEST, OWNED.replace(b"HTTP/1.1", b"HTTP/1.0")])
def test_who_is_no_peer_or_speaks_http_1_0_gets_no_interim_answer(
    shelf: WaitingShelf, future: Future[object], server: ChunkServer, request_of_other: bytes
) -> None:
    with connect(server) as connection:
        connection.sendall(request_of_other)
        shelf.wait_until_asked(1)
        assert not is_answered(connection, 0.1)
        future.set_result(None)
        assert read_answer(connection)[0] == 200


def test_a_malformed_manifest_is_refused(shelf: WaitingShelf, server: ChunkServer) -> None:
    with connect(server) as connection:
        connection.sendall(REQUEST.replace(b"Host: x", b"Host: x\r\nBDN-Manifest: latest"))
        assert read_answer(connection)[0] == 400
        assert read_to_end(connection) == b""
    assert shelf.asked == []


def test_closing_does_not_wait_for_chunks_on_their_way(
    future: Future[object], server: ChunkServer, parked: socket.socket
) -> None:
    server.close()
    assert read_to_end(parked) == b""
    future.set_result(None)  # and nobody falls over it


def test_a_future_that_is_done_while_a_worker_looks_at_its_connection_is_not_missed() -> None:
    """Its callback finds nobody parked; so whoever parks the connection again looks at the future again."""
    ready: list[ChunkConnection] = []
    future = Future[object]()
    wait = Wait(0, time.monotonic() + 60, future)
    client, server = socket.socketpair()
    with client, socket.create_server(("127.0.0.1", 0)) as door:
        connection = ChunkConnection(server, Service(Shelf(), lambda _: None, Timeouts(), None))
        with closing(Poller(door, lambda: True, ready.append)) as poller, closing(connection):
            assert poller.add(connection, wait)
            poller._resume(connection.fileno())  # something else happens to it
            assert ready == [connection]
            future.set_result(None)
            assert ready == [connection]  # a worker has it
            assert poller.add(connection, wait)
            assert ready == [connection, connection]


# --- moments ---


KEYS = st.integers(0, 4)
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 30)),
    st.tuples(st.just("clear"), KEYS, st.just(0)),
    st.tuples(st.just("due"), st.just(0), st.integers(0, 10)),
)


@BRIEFLY
@given(st.lists(STEPS, max_size=60))
def test_a_key_is_due_once_when_its_last_moment_has_come(steps: list[tuple[str, int, int]]) -> None:
    timers, oracle, now = Timers(), dict[int, float](), 0.0
    for step, key, number in steps:
        match step:
            case "set":
                timers.set(key, now + number)
                oracle[key] = now + number
            case "clear":
                timers.clear(key)
                oracle.pop(key, None)
            case _:
                now += number
                due = {key for key, moment in oracle.items() if moment <= now}
                found = timers.due(now)
                assert sorted(found) == sorted(due)
                oracle = {key: moment for key, moment in oracle.items() if key not in due}
        if oracle:  # who sleeps until then misses nothing
            assert timers.next is not None
            assert timers.next <= min(oracle.values())


def test_a_moment_that_moves_later_again_and_again_costs_one_entry() -> None:
    timers = Timers()
    for number in range(1000):
        timers.set(7, 60.0 + number)
    assert len(timers._heap) == 1
    assert timers.due(1058) == []
    assert timers.due(1059) == [7]
