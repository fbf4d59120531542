"""Many clients at once: idle ones cost next to nothing, and a limit keeps the process's descriptors from running out."""

import os
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bdn.core.chunk import digest_of
from bdn.net.chunk_server.connection import Timeouts
from bdn.net.chunk_server.server import ChunkServer
from bdn.store.directory import DirectoryStore
from bdn.wire.http_fields import chunk_path
from tests.support.content.shelves import Shelf, connected, serving
from tests.support.network.chunk_talk import connect, read_answer, read_to_end
from tests.support.network.hypothesis import BRIEFLY

CONTENT = os.urandom(100_000)
PATH = chunk_path(digest_of(CONTENT))
REQUEST = f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(DirectoryStore(tmp_path))
    shelf.add(CONTENT)
    return shelf


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_thousand_idle_connections_take_no_threads_and_delay_nobody(shelf: Shelf) -> None:
    with serving(shelf) as server, ExitStack() as stack:
        before = threading.active_count()
        crowd = [stack.enter_context(connect(server)) for _ in range(1000)]
        for connection in crowd[:10]:
            connection.sendall(REQUEST)
            assert read_answer(connection)[2] == CONTENT
        with connected(server) as client:
            assert client.ask(PATH)[1] == CONTENT
        assert threading.active_count() <= before + 10
        for connection in crowd[::50]:  # and each of them is still served
            connection.sendall(REQUEST)
            assert read_answer(connection)[2] == CONTENT


def test_a_client_above_the_limit_is_hung_up_on_until_another_leaves(shelf: Shelf) -> None:
    with closing(ChunkServer(shelf, "127.0.0.1", 0, connections=2)) as server:
        server.start()
        with connect(server) as one, connect(server) as two:
            for connection in (one, two):
                connection.sendall(REQUEST)
                assert read_answer(connection)[0] == 200
            with connect(server) as three:
                assert read_to_end(three) == b""
            one.sendall(REQUEST.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            assert read_to_end(one).endswith(CONTENT)
            two.sendall(REQUEST)
            assert read_answer(two)[0] == 200
        assert wait_until_served(server)


def wait_until_served(server: ChunkServer) -> bool:
    """The server finds out soon that its clients have left."""
    for _ in range(200):
        with connect(server) as connection:
            try:
                connection.sendall(REQUEST)
                return read_answer(connection)[0] == 200
            except ConnectionError:
                threading.Event().wait(0.01)
    return False


def test_no_descriptor_is_left_when_the_server_is_closed(shelf: Shelf) -> None:
    with serving(shelf):
        pass  # whatever the first server makes for good
    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        with serving(shelf) as server, ExitStack() as stack:
            for number in range(20):
                connection = stack.enter_context(connect(server))
                connection.sendall((b"", b"GET /chu", REQUEST, REQUEST * 3)[number % 4])
    assert (descriptors(), threading.active_count()) == (before, threads)


def test_clients_that_leave_at_any_moment_leave_no_descriptor(shelf: Shelf) -> None:
    with serving(shelf) as server:
        with connected(server) as client:
            client.ask(PATH)
        for request in (b"", b"GET /chu", REQUEST, REQUEST * 20, b"\x00"):
            for _ in range(5):
                with connect(server) as connection:
                    connection.sendall(request)
        with connected(server) as client:
            client.ask(PATH)
        for _ in range(1000):
            if len(server._open) == 0:
                break
            threading.Event().wait(0.005)
        assert len(server._open) == 0


RANGES = st.tuples(st.integers(0, len(CONTENT) - 1), st.integers(1, len(CONTENT)))


@settings(BRIEFLY, max_examples=25)
@given(st.lists(st.lists(RANGES, min_size=1, max_size=6), min_size=1, max_size=8), st.booleans())
def test_ranges_asked_for_by_many_threads_are_each_client_s_own(
    served: ChunkServer, clients: list[list[tuple[int, int]]], pipelined: bool
) -> None:
    def talk(ranges: list[tuple[int, int]]) -> bool:
        requests = [
            REQUEST.replace(b"Host: x", b"Host: x\r\nRange: bytes=%d-%d" % (start, start + size - 1))
            for start, size in ranges
        ]
        with connect(served) as connection:
            if pipelined:
                connection.sendall(b"".join(requests))
            for (start, size), request in zip(ranges, requests, strict=True):
                if not pipelined:
                    connection.sendall(request)
                if read_answer(connection)[2] != CONTENT[start : start + size]:
                    return False
        return True

    with ThreadPoolExecutor(len(clients)) as threads:
        assert all(threads.map(talk, clients))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkServer]:
    shelf = Shelf(DirectoryStore(tmp_path_factory.mktemp("chunks")))
    shelf.add(CONTENT)
    with serving(shelf) as server:
        yield server


def test_a_head_that_dribbles_is_cut_off_however_lively_it_is(shelf: Shelf) -> None:
    with serving(shelf, timeouts=Timeouts(head_seconds=0.2)) as server, connect(server) as connection:
        ended = False
        for byte in (REQUEST[:-4] + b"\r\nX: " + b"y" * 100_000)[:5000]:
            try:
                connection.send(bytes([byte]))
            except OSError:
                ended = True
                break
            if select.select([connection], [], [], 0.01)[0]:
                ended = True
                break
        assert ended


def test_an_idle_client_has_longer_than_a_head(shelf: Shelf) -> None:
    with serving(shelf, timeouts=Timeouts(head_seconds=0.05)) as server, connect(server) as connection:
        assert not select.select([connection], [], [], 0.3)[0]
        connection.sendall(REQUEST)
        assert read_answer(connection)[2] == CONTENT


def test_an_error_reaches_a_client_that_is_still_sending(shelf: Shelf) -> None:
    """A socket closed with unread bytes in it would reset the connection, and take the answer back."""
    with serving(shelf) as server, connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(REQUEST.replace(b"GET", b"PUT").replace(b"Host: x", b"Host: x\r\nContent-Length: 300000"))
        connection.sendall(bytes(300_000))
        assert read_answer(connection)[0] == 501
        assert connection.recv(1) == b""
        for _ in range(3):  # what comes still later does no harm, for a while
            connection.sendall(bytes(10))
            assert not select.select([], [], [connection], 0.02)[2]
