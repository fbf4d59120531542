"""The data plane's server and its clients: patient, rude, gone, and very many; and its end."""

import logging
import os
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import InvalidRequestError
from bdn.core.pace.retry import StallPolicy
from bdn.net.chunk_server.connection import Timeouts
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.net.chunk_server.server import ChunkServer
from bdn.store.directory import DirectoryStore
from bdn.wire.http_fields import chunk_path
from tests.support.content.memory_store import MemoryFile
from tests.support.content.noise import noise
from tests.support.content.shelves import Shelf, connect, connected, read_answer, read_to_end, reset, serving
from tests.support.network.hypothesis import BRIEFLY
from tests.support.services.commands import wait_until

CONTENT = os.urandom(100_000)
PATH = chunk_path(digest_of(CONTENT))
LARGE = noise(CHUNK_SIZE)
LARGE_PATH = chunk_path(digest_of(LARGE))
HASTY = Timeouts(0.25, 0.25, 0.25, StallPolicy(64 * 1024, 0.25))


def request(path: str = PATH, *headers: str, first: str = "GET {} HTTP/1.1") -> bytes:
    return "\r\n".join((first.format(path), "Host: x", *headers, "", "")).encode()


REQUEST, LAST = request(), request(PATH, "Connection: close")
BEGUN = (b"", b"GET /chu", REQUEST, request(LARGE_PATH), REQUEST * 20, b"\x16\x03\x01\x02\x00", b"\r\n\r\n")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(DirectoryStore(tmp_path))
    shelf.add(CONTENT)
    shelf.add(LARGE)
    return shelf


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- requests on one connection ---


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


def test_a_client_of_http_1_0_gets_its_answer_and_the_end_of_the_connection(shelf: Shelf) -> None:
    with serving(shelf) as server, connect(server) as connection:
        connection.sendall(request(first="GET {} HTTP/1.0"))
        assert read_to_end(connection).endswith(b"\r\n\r\n" + CONTENT)


def test_a_body_that_nobody_wants_is_not_taken_for_the_next_request(shelf: Shelf) -> None:
    """Behind a proxy that shares connections, the next answer would go to another client."""
    for length in (f"Content-Length: {len(REQUEST)}", "Transfer-Encoding: chunked"):
        with serving(shelf) as server, connect(server) as connection:
            connection.sendall(request(PATH, length) + REQUEST)
            connection.shutdown(socket.SHUT_WR)
            assert read_to_end(connection).count(b"HTTP/1.1 200") == 1


def test_an_error_reaches_a_client_that_is_still_sending(shelf: Shelf) -> None:
    """A socket closed with unread bytes in it would reset the connection, and take the answer back."""
    with serving(shelf) as server, connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request(PATH, "Content-Length: 300000", first="PUT {} HTTP/1.1"))
        connection.sendall(bytes(300_000))
        assert read_answer(connection)[0] == 501
        assert connection.recv(1) == b""
        for _ in range(3):  # what comes still later does no harm, for a while
            connection.sendall(bytes(10))
            assert not select.select([], [], [connection], 0.02)[2]


# --- slow clients, and those that go ---


def test_a_client_that_reads_slowly_does_not_hold_up_the_others(shelf: Shelf) -> None:
    with serving(shelf) as server, connect(server) as slow, connected(server) as client:
        slow.sendall(request(LARGE_PATH))
        assert slow.recv(1) == b"H"  # the answer has begun, and most of it does not fit into the sockets
        assert client.ask(LARGE_PATH)[1] == LARGE
        slow.sendall(LAST)
        assert read_to_end(slow).endswith(CONTENT)


@pytest.mark.parametrize("begun", [b"", b"GET /chu", REQUEST])
def test_a_client_that_does_nothing_for_too_long_is_hung_up_on(shelf: Shelf, begun: bytes) -> None:
    timeouts = replace(HASTY, idle_seconds=1.0)  # a busy machine reads the request by then
    with serving(shelf, timeouts=timeouts) as server, connect(server) as connection:
        connection.sendall(begun)
        assert read_to_end(connection).count(b"HTTP/1.1 200") == (begun == REQUEST)


def test_a_head_that_dribbles_is_cut_off_however_lively_it_is(shelf: Shelf) -> None:
    with serving(shelf, timeouts=Timeouts(head_seconds=0.2)) as server, connect(server) as connection:
        for byte in (REQUEST[:-4] + b"\r\nX: " + b"y" * 100_000)[:5000]:
            try:
                connection.send(bytes([byte]))
            except OSError:
                return
            if select.select([connection], [], [], 0.01)[0]:
                return
    raise AssertionError("it may go on for as long as it likes")


def test_an_idle_client_has_longer_than_a_head(shelf: Shelf) -> None:
    with serving(shelf, timeouts=Timeouts(head_seconds=0.05)) as server, connect(server) as connection:
        assert not select.select([connection], [], [], 0.3)[0]
        connection.sendall(REQUEST)
        assert read_answer(connection)[2] == CONTENT


class WatchedFile(MemoryFile):
    """Tells when it is closed."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.ended = threading.Event()

    def close(self) -> None:
        super().close()
        self.ended.set()


class WatchedShelf(Shelf):
    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        self.file = WatchedFile(LARGE)
        return OpenChunk(self.file, 0, len(LARGE))


def test_a_client_that_stops_reading_for_too_long_is_hung_up_on() -> None:
    shelf = WatchedShelf()
    with serving(shelf, timeouts=HASTY) as server, connect(server) as connection:
        connection.sendall(REQUEST)
        assert connection.recv(1) == b"H"
        assert shelf.file.ended.wait(20)
        with pytest.raises(ConnectionResetError):  # so that the kernel keeps nothing for it either
            read_to_end(connection)


def test_clients_that_vanish_at_any_moment_leave_the_server_working_and_neither_descriptor_nor_complaint(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(shelf) as server, connected(server) as client:
        client.ask(PATH)
        before = descriptors()
        for begun in BEGUN:
            for end in (reset, socket.socket.close, reset, socket.socket.close):
                connection = connect(server)
                connection.sendall(begun)
                end(connection)
        assert client.ask(PATH)[1] == CONTENT
        wait_until(lambda: descriptors() <= before)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


# --- crowds ---


def test_a_thousand_idle_connections_take_no_threads_and_delay_nobody(shelf: Shelf) -> None:
    with serving(shelf) as server, ExitStack() as stack:
        before = threading.active_count()
        crowd = [stack.enter_context(connect(server)) for _ in range(1000)]
        for connection in crowd[:10]:
            connection.sendall(REQUEST)
            assert read_answer(connection)[2] == CONTENT
        assert threading.active_count() <= before + 10
        for connection in crowd[::50]:  # and each of them is still served
            connection.sendall(REQUEST)
            assert read_answer(connection)[2] == CONTENT


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkServer]:
    shelf = Shelf(DirectoryStore(tmp_path_factory.mktemp("chunks")))
    shelf.add(CONTENT)
    with serving(shelf) as server:
        yield server


RANGES = st.tuples(st.integers(0, len(CONTENT) - 1), st.integers(1, len(CONTENT)))


@settings(BRIEFLY, max_examples=25)
@given(st.lists(st.lists(RANGES, min_size=1, max_size=6), min_size=1, max_size=8), st.booleans())
def test_ranges_asked_for_by_many_threads_are_each_client_s_own(
    served: ChunkServer, clients: list[list[tuple[int, int]]], pipelined: bool
) -> None:
    def talk(ranges: list[tuple[int, int]]) -> bool:
        requests = [request(PATH, f"Range: bytes={start}-{start + size - 1}") for start, size in ranges]
        with connect(served) as connection:
            if pipelined:
                connection.sendall(b"".join(requests))
            for (start, size), one in zip(ranges, requests, strict=True):
                if not pipelined:
                    connection.sendall(one)
                if read_answer(connection)[2] != CONTENT[start : start + size]:
                    return False
        return True

    with ThreadPoolExecutor(len(clients)) as threads:
        assert all(threads.map(talk, clients))


# --- the end ---


def test_closing_ends_every_connection_and_frees_the_port(shelf: Shelf) -> None:
    with serving(shelf) as server:
        port = server.port
        idle, busy = connect(server), connect(server)
        busy.sendall(request(LARGE_PATH))
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


def test_no_descriptor_and_no_thread_is_left_when_the_server_is_closed(shelf: Shelf) -> None:
    with serving(shelf):
        pass  # whatever the first server makes for good
    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        with serving(shelf) as server, ExitStack() as stack:
            for number in range(21):
                connection = stack.enter_context(connect(server))
                connection.sendall(BEGUN[number % len(BEGUN)])
    assert (descriptors(), threading.active_count()) == (before, threads)


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
            connection.sendall(LAST)
            assert read_to_end(connection).endswith(CONTENT)
