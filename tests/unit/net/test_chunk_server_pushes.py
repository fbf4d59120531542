"""The data plane's server takes chunks: whole and right, or not at all, from clients that are slow, rude, gone or too many."""

import itertools
import json
import logging
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import (
    BdnError,
    ChecksumMismatchError,
    GrantExpiredError,
    GrantInvalidError,
    InUseError,
    NotFoundError,
    StoreUnavailableError,
    UnauthenticatedError,
)
from bdn.core.pace.retry import StallPolicy
from bdn.net.chunk_server.connection import Timeouts
from bdn.net.chunk_server.messages import HEAD_LIMIT
from bdn.net.chunk_server.receiving import ReceiveBuffers
from bdn.net.chunk_server.served_chunks import PushedChunk
from bdn.net.chunk_server.server import ChunkServer
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities, Certificate
from bdn.store.directory import DirectoryStore
from bdn.wire.http_fields import chunk_path, push_path
from bdn.wire.shapes import document_of, status_of
from tests.support.content.noise import noise
from tests.support.content.shelves import Inbox, Shelf, connect, read_answer, read_to_end, reset, serving
from tests.support.network.authority import new_authority
from tests.support.network.hypothesis import BRIEFLY
from tests.support.services.commands import wait_until

PUSH = f"mir_{'0a' * 12}"
SMALL, CONTENT, LARGE = b"x", os.urandom(100_001), noise(CHUNK_SIZE)
STRICT = Timeouts(slowest_sender=StallPolicy(64 * 1024, 0.3))


def head(path: str, *headers: str, first: str = "PUT {} HTTP/1.1") -> bytes:
    return "\r\n".join((first.format(path), "Host: x", *headers, "", "")).encode()


def put_head(content: bytes, *headers: str) -> bytes:
    return head(push_path(PUSH, digest_of(content)), f"Content-Length: {len(content)}", *headers)


def put(content: bytes, *headers: str) -> bytes:
    return put_head(content, *headers) + content


def get(content: bytes) -> bytes:
    return head(chunk_path(digest_of(content)), first="GET {} HTTP/1.1")


def status_of_next(connection: socket.socket) -> int:
    return read_answer(connection)[0]


def code_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


def says_nothing(connection: socket.socket) -> bool:
    return not select.select([connection], [], [], 0.05)[0]


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def server(inbox: Inbox) -> Iterator[ChunkServer]:
    with serving(Shelf(inbox.store), received=inbox) as server:
        yield server


@pytest.fixture
def client(server: ChunkServer) -> Iterator[socket.socket]:
    with connect(server) as connection:
        yield connection


# --- what is taken ---


def test_a_chunk_is_put_and_can_be_read_on_the_same_connection(tmp_path: Path) -> None:
    inbox = Inbox(DirectoryStore(tmp_path))
    came: list[int] = []
    with (
        serving(Shelf(inbox.store), received=inbox, on_received=came.append) as server,
        connect(server) as connection,
    ):
        for content in (CONTENT, LARGE, SMALL, LARGE, bytes(4096)):
            connection.sendall(put(content, "Authorization: Bearer sesame"))
            status, headers, body = read_answer(connection)
            assert (status, body) == (204, b"")
            assert not {"content-length", "connection"} & headers.keys()  # RFC 9110, section 8.6
            connection.sendall(get(content))
            assert read_answer(connection)[2] == content
    assert inbox.requests[0] == PushedChunk(PUSH, digest_of(CONTENT), len(CONTENT), "sesame")
    assert "sesame" not in repr(inbox.requests[0])
    assert came == [len(CONTENT), CHUNK_SIZE, 1, CHUNK_SIZE, 4096]


def test_a_body_of_another_name_is_refused_and_the_connection_goes_on(client: socket.socket, inbox: Inbox) -> None:
    wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    client.sendall(put_head(CONTENT) + wrong)
    status, _, body = read_answer(client)
    expected = ChecksumMismatchError("the chunk", str(digest_of(CONTENT)), str(digest_of(wrong)))
    assert (status, json.loads(body)) == (422, document_of(expected))
    assert inbox.taken == []
    client.sendall(put(CONTENT))
    assert status_of_next(client) == 204


def test_a_store_that_fails_is_said_so_and_the_connection_goes_on(client: socket.socket, inbox: Inbox) -> None:
    inbox.failure = StoreUnavailableError("the disk is away")
    client.sendall(put(CONTENT))
    assert read_answer(client)[::2] == (503, json.dumps(document_of(inbox.failure)).encode())
    inbox.failure = None
    client.sendall(put(CONTENT))
    assert status_of_next(client) == 204


# --- what is refused before the body ---


@pytest.mark.parametrize(("lines", "status"), [
    ([], 411), (["Content-Length: 0"], 400), ([f"Content-Length: {CHUNK_SIZE + 1}"], 413), ([f"Content-Length: {10**17}"], 413),
    (["Content-Length: -1"], 400), (["Content-Length: 1x"], 400), (["Content-Length: 1 "], 0), (["Content-Length: 5, 5"], 400),
    (["Content-Length: 1", "Content-Length: 1"], 400), ([f"Content-Length: {10**30}"], 400), (["Content-Length:"], 400),
    (["Transfer-Encoding: chunked"], 501), (["Transfer-Encoding: chunked", "Content-Length: 1"], 501),
    (["Transfer-Encoding: identity", "Content-Length: 1"], 501), ([f"X: {'y' * HEAD_LIMIT}", "Content-Length: 1"], 431),
])  # fmt: skip
def test_a_body_whose_end_nobody_can_tell_or_that_is_no_chunk_is_refused(
    client: socket.socket, inbox: Inbox, lines: list[str], status: int
) -> None:
    client.sendall(head(push_path(PUSH, digest_of(SMALL)), *lines))
    if not status:  # white space behind a value is none of it
        client.sendall(SMALL)
        assert status_of_next(client) == 204
        return
    answered, headers, body = read_answer(client)
    assert (answered, code_of(body), headers["connection"]) == (status, "INVALID_REQUEST", "close")
    assert inbox.requests == []  # nobody was even asked
    assert client.recv(1) == b""


@pytest.mark.parametrize("error", [
    UnauthenticatedError(), GrantInvalidError("altered"), GrantExpiredError("2026-11-20T00:00:00+00:00"),
    NotFoundError("push"), InUseError("the push", ("a commit",)), StoreUnavailableError("the database is away"),
])  # fmt: skip
@pytest.mark.parametrize("headers", [[], ["Expect: 100-continue"]])
def test_who_may_not_send_hears_it_before_the_body_and_nothing_follows_on_the_connection(
    client: socket.socket, inbox: Inbox, error: BdnError, headers: list[str]
) -> None:
    inbox.refusal = error
    client.sendall(put_head(CONTENT, *headers))
    status, answered, body = read_answer(client)
    assert (status, json.loads(body)) == (status_of(error), document_of(error))
    assert answered["connection"] == "close"
    client.sendall(put(CONTENT))  # the body, or another request, as others may see it
    assert client.recv(1) == b""
    assert len(inbox.requests) == 1


def test_without_a_place_for_chunks_there_is_no_such_path() -> None:
    with serving(Shelf()) as server:
        for lines in (["Content-Length: 1"], [], ["Transfer-Encoding: chunked"]):
            with connect(server) as connection:
                connection.sendall(head(push_path(PUSH, digest_of(SMALL)), *lines))
                status, _, body = read_answer(connection)
                assert (status, code_of(body)) == (404, "NOT_FOUND")


@pytest.mark.parametrize(("first", "status"), [
    ("PUT /chunks/{}", 501), ("PUT /pushes/mir_1/chunks/{}", 501), ("POST /pushes/mir_0a0a0a0a0a0a0a0a0a0a0a0a/chunks/{}", 501),
    ("GET /pushes/mir_0a0a0a0a0a0a0a0a0a0a0a0a/chunks/{}", 404), ("PUT /pushes/../chunks/{}", 501),
])  # fmt: skip
def test_nothing_else_takes_a_body(client: socket.socket, inbox: Inbox, first: str, status: int) -> None:
    client.sendall(head(first.format(digest_of(SMALL)), "Content-Length: 1", first="{} HTTP/1.1") + SMALL)
    assert status_of_next(client) == status
    assert inbox.requests == []
    assert client.recv(1) == b""


def test_what_a_browser_sends_for_a_foreign_page_is_refused(inbox: Inbox) -> None:
    with serving(Shelf(), received=inbox, is_local=True) as server:
        for headers, status in (
            (("Host: evil.example",), 403),
            (("Host: localhost", "Origin: https://evil.example"), 403),
            (("Host: localhost",), 204),
        ):
            with connect(server) as connection:
                target = push_path(PUSH, digest_of(SMALL))
                lines = (f"PUT {target} HTTP/1.1", *headers, "Content-Length: 1", "", "")
                connection.sendall("\r\n".join(lines).encode() + SMALL)
                assert status_of_next(connection) == status
    assert inbox.taken == [SMALL]


# --- clients that ask before they send ---


def test_who_waits_for_leave_to_send_gets_it(client: socket.socket, inbox: Inbox) -> None:
    client.sendall(put_head(CONTENT, "Expect: 100-Continue"))
    assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert len(inbox.requests) == 1
    client.sendall(CONTENT)
    assert status_of_next(client) == 204


def test_who_does_not_wait_for_leave_is_not_told(client: socket.socket) -> None:
    client.sendall(put(CONTENT, "Expect: 100-continue"))
    assert status_of_next(client) == 204


def test_a_client_of_http_1_0_gets_no_answer_before_the_answer(client: socket.socket) -> None:
    path = push_path(PUSH, digest_of(CONTENT))
    expecting = head(path, f"Content-Length: {len(CONTENT)}", "Expect: 100-continue", first="PUT {} HTTP/1.0")
    client.sendall(expecting)
    assert says_nothing(client)
    client.sendall(CONTENT)
    assert read_to_end(client).startswith(b"HTTP/1.1 204 ")


# --- what follows a body ---


def test_requests_behind_a_body_are_answered_in_their_order(client: socket.socket) -> None:
    client.sendall(
        put(CONTENT) + get(CONTENT) + put_head(SMALL) + b"?" + get(CONTENT) + put(SMALL) + b"\r\n" + get(SMALL)
    )
    answers = [read_answer(client) for _ in range(6)]
    assert [status for status, _, _ in answers] == [204, 200, 422, 200, 204, 200]
    assert [answers[at][2] for at in (1, 3, 5)] == [CONTENT, CONTENT, SMALL]


def test_a_client_that_ends_its_side_after_the_body_gets_its_answer(client: socket.socket) -> None:
    client.sendall(put(CONTENT))
    client.shutdown(socket.SHUT_WR)
    assert read_to_end(client).startswith(b"HTTP/1.1 204 ")


@pytest.fixture(scope="module")
def long_lived() -> Iterator[tuple[ChunkServer, Inbox]]:
    inbox = Inbox()
    with serving(Shelf(inbox.store), received=inbox, buffers=2) as server:
        yield server, inbox


SIZES = st.integers(1, 300) | st.integers(1, 400_000)
CALLS = st.lists(st.tuples(st.sampled_from(("put", "wrong", "get")), SIZES), min_size=1, max_size=6)
CUTS = st.lists(st.integers(0, 500_000), max_size=8)


def body_of(size: int) -> bytes:
    """Another one for each size, none of them zeros."""
    return size.to_bytes(4, "little") * (size // 4) + b"x" * (size % 4)


def stream_of(calls: list[tuple[str, int]], before: set[bytes]) -> tuple[bytes, list[int]]:
    """The bytes of all requests, and what they are answered with."""
    stream, expected, held = b"", [], set(before)
    for call, size in calls:
        content = body_of(size)
        if call == "get":
            stream += get(content)
            expected.append(200 if content in held else 404)
        elif call == "put":
            stream += put(content)
            held.add(content)
            expected.append(204)
        else:
            stream += put_head(content) + bytes(len(content))
            expected.append(422)
    return stream, expected


@settings(BRIEFLY, max_examples=60)
@given(CALLS, CUTS)
def test_it_does_not_matter_where_a_stream_of_requests_is_cut(
    long_lived: tuple[ChunkServer, Inbox], calls: list[tuple[str, int]], cuts: list[int]
) -> None:
    server, inbox = long_lived
    stream, expected = stream_of(calls, set(inbox.taken))
    places = sorted({0, *(cut for cut in cuts if cut < len(stream)), len(stream)})
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send() -> None:
            for start, stop in itertools.pairwise(places):
                connection.sendall(stream[start:stop])

        sending = threading.Thread(target=send)
        sending.start()
        assert [status_of_next(connection) for _ in expected] == expected
        sending.join()


@settings(BRIEFLY, max_examples=60)
@given(SIZES, st.integers(0, 600_000), st.booleans())
def test_a_stream_that_ends_anywhere_leaves_whole_chunks_alone(
    long_lived: tuple[ChunkServer, Inbox], size: int, cut: int, is_reset: bool
) -> None:
    server, inbox = long_lived
    before = len(inbox.taken)
    stream = put(body_of(size))
    stream = stream[: cut % len(stream)]
    connection = connect(server)
    connection.sendall(stream)
    if is_reset:
        reset(connection)
    else:
        with connection:
            connection.shutdown(socket.SHUT_WR)
            assert read_to_end(connection) == b""
    with connect(server) as other:
        other.sendall(put(SMALL))
        assert status_of_next(other) == 204
    assert inbox.taken[before:] == [SMALL]


# --- slow clients, those that go, and very many ---


def begin(server: ChunkServer, content: bytes = CONTENT) -> socket.socket:
    """A client in the middle of a body, for which the server has a buffer."""
    connection, before = connect(server), server.buffers.lent
    connection.sendall(put_head(content, "Expect: 100-continue"))
    assert status_of_next(connection) == 100
    connection.sendall(content[: len(content) // 2])
    wait_until(lambda: server.buffers.lent > before)
    return connection


def finish(connection: socket.socket, content: bytes = CONTENT) -> int:
    connection.sendall(content[len(content) // 2 :])
    return status_of_next(connection)


def test_a_client_in_the_middle_of_a_body_delays_nobody(server: ChunkServer) -> None:
    with begin(server) as slow, connect(server) as other:
        for content in (LARGE, SMALL):
            other.sendall(put(content) + get(content))
            assert status_of_next(other) == 204
            assert read_answer(other)[2] == content
        assert finish(slow) == 204


def test_a_client_that_trickles_is_cut_off_and_its_buffer_goes_to_the_next(inbox: Inbox) -> None:
    with (
        ThreadPoolExecutor(1) as threads,
        serving(Shelf(), received=inbox, timeouts=STRICT, buffers=1) as server,
        begin(server, LARGE) as slow,
        connect(server) as next_one,
    ):
        ended = threads.submit(trickle, slow)
        next_one.sendall(put(CONTENT))
        assert status_of_next(next_one) == 204
        assert ended.result(20)
    assert inbox.taken == [CONTENT]


def trickle(connection: socket.socket) -> bool:
    """Ten bytes now and then, until the server hangs up, or the test does."""
    with suppress(OSError, ValueError):
        while not select.select([connection], [], [], 0.02)[0]:
            connection.send(bytes(10))
    return True


@pytest.mark.parametrize("go", [reset, socket.socket.close])
def test_a_client_that_goes_in_the_middle_of_a_body_leaves_nothing(
    inbox: Inbox, go: Callable[[socket.socket], None], caplog: pytest.LogCaptureFixture
) -> None:
    came: list[int] = []
    with serving(Shelf(), received=inbox, buffers=1, on_received=came.append) as server:
        for _ in range(3):
            go(begin(server))
            wait_until(lambda: not server.buffers.lent)
        with connect(server) as other:
            other.sendall(put(CONTENT))
            assert status_of_next(other) == 204
    assert inbox.taken == [CONTENT]
    assert came[-1] == len(CONTENT)
    assert all(0 < size < len(CONTENT) for size in came[:-1])
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_waiting_for_a_buffer_holds_no_thread(inbox: Inbox) -> None:
    """More of them than the server has threads; each ends well."""
    with serving(Shelf(inbox.store), received=inbox, buffers=1) as server, ExitStack() as stack:
        first = stack.enter_context(begin(server))
        crowd = [stack.enter_context(connect(server)) for _ in range(60)]
        for connection in crowd:
            connection.sendall(put(SMALL))
        wait_until(lambda: len(inbox.requests) == 61)
        assert all(map(says_nothing, crowd[:3]))
        with connect(server) as reader:
            reader.sendall(get(SMALL))
            assert status_of_next(reader) == 404
        assert finish(first) == 204
        while crowd:  # in whatever order the server has heard of them
            for connection in select.select(crowd, [], [], 20)[0]:
                assert status_of_next(connection) == 204
                crowd.remove(connection)
    assert len(inbox.taken) == 61


def test_who_goes_while_it_waits_for_a_buffer_does_not_keep_it_from_others(inbox: Inbox) -> None:
    with serving(Shelf(), received=inbox, buffers=1) as server, begin(server) as first:
        for go in (reset, socket.socket.close):
            gone = connect(server)
            gone.sendall(put_head(CONTENT))
            wait_until(lambda: len(inbox.requests) > 1)
            go(gone)
        with connect(server) as patient:
            patient.sendall(put(SMALL))
            wait_until(lambda: len(inbox.requests) == 4)
            assert finish(first) == 204
            assert status_of_next(patient) == 204


def test_who_waits_too_long_for_a_buffer_is_told_to_come_again(inbox: Inbox) -> None:
    timeouts = Timeouts(obtaining_seconds=0.2)
    with serving(Shelf(), received=inbox, buffers=1, timeouts=timeouts) as server, begin(server) as first:
        with connect(server) as waiting:
            waiting.sendall(put(SMALL))
            status, headers, body = read_answer(waiting)
            assert (status, code_of(body), headers["connection"]) == (503, "STORE_UNAVAILABLE", "close")
        assert finish(first) == 204
        with connect(server) as again:
            again.sendall(put(SMALL))
            assert status_of_next(again) == 204


def test_closing_ends_those_that_send_and_those_that_wait(inbox: Inbox) -> None:
    with serving(Shelf(), received=inbox, buffers=1) as server, begin(server) as busy, connect(server) as waiting:
        waiting.sendall(put_head(SMALL))
        wait_until(lambda: len(inbox.requests) == 2)
        server.close()
        assert read_to_end(busy) == read_to_end(waiting) == b""
    assert inbox.taken == []


# --- the buffers themselves ---


def test_buffers_are_pages_and_no_more_of_them_than_said() -> None:
    buffers = ReceiveBuffers(1)
    first, second = buffers.request("a"), buffers.request("b")
    only = buffers.buffer_of(first)
    assert len(only) == CHUNK_SIZE
    assert buffers.buffer_of(first) is only
    assert not second.granted.done()
    buffers.release(first)
    assert second.granted.done()
    assert buffers.buffer_of(second) is only


# --- our own client, and TLS ---


def ask(pool: ConnectionPool, url: str, content: bytes) -> tuple[int, bytes]:
    headers = {"Authorization": "Bearer abc"}
    with pool.request(
        "PUT", f"{url}{push_path(PUSH, digest_of(content))}", headers, memoryview(bytearray(content))
    ) as answer:
        return answer.status, answer.read(10_000)


@dataclass(frozen=True)
class Speech:
    """How a server is talked to: in the clear or over TLS."""

    certificate: Certificate | None
    authorities: Authorities | None

    def url(self, server: ChunkServer) -> str:
        return f"{'https' if self.certificate else 'http'}://localhost:{server.port}"

    def connect(self, server: ChunkServer) -> socket.socket:
        connection = connect(server)
        if self.authorities is None:
            return connection
        return self.authorities.context().wrap_socket(connection, server_hostname="localhost")


@pytest.fixture(scope="module", params=["plain", "tls"])
def speech(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Speech:
    if request.param == "plain":
        return Speech(None, None)
    folder = tmp_path_factory.mktemp("authority")
    authority = new_authority(folder, "unused")
    shown = authority.issue(tmp_path_factory.mktemp("shown"), "localhost")
    return Speech(Certificate("BDN_TLS", *shown), Authorities(authority.certificates))


@pytest.fixture
def pool(speech: Speech) -> Iterator[ConnectionPool]:
    with closing(ConnectionPool(timeout_seconds=60, authorities=speech.authorities)) as made:
        yield made


def test_our_client_puts_many_chunks_on_one_connection(speech: Speech, pool: ConnectionPool, inbox: Inbox) -> None:
    with serving(Shelf(), received=inbox, certificate=speech.certificate, connections=1) as server:
        for content in (LARGE, SMALL, CONTENT) * 2:
            assert ask(pool, speech.url(server), content) == (204, b"")
    assert inbox.taken == [LARGE, SMALL, CONTENT] * 2


@pytest.mark.parametrize("content", [LARGE, CONTENT, SMALL], ids=len)
def test_our_client_hears_a_refusal_whatever_it_still_sends(
    speech: Speech, pool: ConnectionPool, inbox: Inbox, content: bytes
) -> None:
    inbox.refusal = GrantExpiredError("2026-11-20T00:00:00+00:00")
    with serving(Shelf(), received=inbox, certificate=speech.certificate) as server:
        for _ in range(3):
            status, body = ask(pool, speech.url(server), content)
            assert (status, json.loads(body)) == (status_of(inbox.refusal), document_of(inbox.refusal))
        inbox.refusal = None
        assert ask(pool, speech.url(server), content) == (204, b"")


def test_our_client_sends_once_more_on_a_connection_that_was_closed_meanwhile(
    speech: Speech, pool: ConnectionPool, inbox: Inbox
) -> None:
    port = 0
    for content in (SMALL, LARGE, CONTENT):
        with serving(Shelf(), received=inbox, certificate=speech.certificate, port=port) as server:
            assert ask(pool, speech.url(server), content) == (204, b"")
            port = server.port
    assert inbox.taken == [SMALL, LARGE, CONTENT]


def test_requests_in_the_records_of_a_body_are_answered(speech: Speech, inbox: Inbox) -> None:
    """Over TLS what is decrypted along with the end of a body lies where ``epoll`` does not see it."""
    with (
        serving(Shelf(inbox.store), received=inbox, certificate=speech.certificate) as server,
        speech.connect(server) as connection,
    ):
        for content in (SMALL, CONTENT, LARGE):
            connection.sendall(put_head(content, "Expect: 100-continue"))
            assert status_of_next(connection) == 100
            connection.sendall(content + get(content) + put(SMALL) + get(SMALL))
            assert [status_of_next(connection) for _ in range(4)] == [204, 200, 204, 200]


def test_a_client_that_goes_in_the_middle_of_an_encrypted_body_leaves_nothing(speech: Speech, inbox: Inbox) -> None:
    with serving(Shelf(), received=inbox, certificate=speech.certificate, buffers=1) as server:
        for content in (LARGE, CONTENT):
            with speech.connect(server) as connection:
                connection.sendall(put_head(content) + content[:-1])
                if isinstance(connection, ssl.SSLSocket):
                    reset(connection)
        with speech.connect(server) as connection:
            connection.sendall(put(CONTENT))
            assert status_of_next(connection) == 204
    assert inbox.taken == [CONTENT]
