"""Connections: which address is dialled, which are kept after an answer, and when a stale one is replaced."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event

import pytest

from bdn.core.egress import PUBLIC_INTERNET, EgressPolicy
from bdn.core.errors import BdnError, UpstreamUnavailableError
from bdn.core.source.upstream import Location
from bdn.net.http1.connection import ProtocolError, UnsendableError
from bdn.net.http1.pool import ConnectionPool, dial, reason_of
from bdn.transfer.ranged import RangedReader
from tests.support.network.egress_streets import Doorbell, Names, note_attempts
from tests.support.network.raw_server import RawServer, answering, message, partial, read_head, waiting_after
from tests.support.network.upstream import CONTENT, ONCE, SIZE, read_range, upstream

GOOD = partial(CONTENT[:10], 0, SIZE)


@pytest.fixture
def pool() -> Iterator[ConnectionPool]:
    with closing(ConnectionPool(timeout_seconds=10)) as made:
        yield made


@pytest.fixture
def reader(pool: ConnectionPool) -> RangedReader:
    return RangedReader(pool, ONCE)


def read(reader: RangedReader, server: RawServer) -> bytes:
    return read_range(reader, Location(server.url), 0, 10)


def test_a_connection_is_used_again_after_a_good_answer(reader: RangedReader) -> None:
    with RawServer(answering(GOOD, GOOD, GOOD)) as server:
        assert [read(reader, server) for _ in range(3)] == [CONTENT[:10]] * 3
        assert server.connections == 1


BAD = {
    "a refusal": message("503 Busy", "Content-Length: 4", body=b"busy"),
    "other bytes": partial(CONTENT[1:11], 1, SIZE),
    "a wrong length": message(
        "206 Partial Content", "Content-Range: bytes 0-9/4096", "Content-Length: 12", body=bytes(12)
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_connection_is_not_used_again_after_a_bad_answer(reader: RangedReader, bad: bytes) -> None:
    with RawServer(answering(bad, GOOD), answering(GOOD)) as server:
        with pytest.raises(BdnError):
            read(reader, server)
        assert read(reader, server) == CONTENT[:10]
        assert server.connections == 2


def test_a_connection_is_not_used_again_after_a_whole_file_for_a_range(reader: RangedReader) -> None:
    whole = message("200 OK", f"Content-Length: {SIZE}", body=CONTENT)
    with RawServer(answering(whole, GOOD), answering(GOOD)) as server:
        assert read(reader, server) == CONTENT[:10]
        assert server.connections == 2


def test_a_connection_is_not_used_again_when_the_server_says_that_it_closes(reader: RangedReader) -> None:
    closing_answer = partial(CONTENT[:10], 0, SIZE, "Connection: close")
    with RawServer(waiting_after(closing_answer), answering(GOOD)) as server:
        assert read(reader, server) == CONTENT[:10]
        assert server.closed[0].wait(60), "the socket of the answer is closed"
        assert read(reader, server) == CONTENT[:10]


def test_the_socket_of_a_refusal_is_closed_even_while_its_error_is_kept(reader: RangedReader) -> None:
    refusal = message("503 Busy", "Connection: close", f"Content-Length: {1 << 20}", body=b"the rest never comes")
    with RawServer(waiting_after(refusal)) as server:
        with pytest.raises(UpstreamUnavailableError) as raised:
            read(reader, server)
        assert server.closed[0].wait(60), f"the server still waits while {raised.value} is kept"


def test_a_new_connection_that_breaks_is_not_replaced(reader: RangedReader) -> None:
    with RawServer(answering(b""), answering(GOOD)) as server:
        with pytest.raises(UpstreamUnavailableError):
            read(reader, server)
        assert server.connections == 1


def test_an_idle_connection_that_the_server_closed_is_replaced_once_without_a_word(reader: RangedReader) -> None:
    with RawServer(answering(GOOD), answering(GOOD), answering(b""), answering(GOOD)) as server:
        for closed in range(2):
            assert read(reader, server) == CONTENT[:10]
            server.closed[closed].wait(60)
        with pytest.raises(UpstreamUnavailableError):
            read(reader, server)
        assert server.connections == 3


def test_an_answer_that_breaks_off_on_a_used_connection_is_not_asked_for_again(reader: RangedReader) -> None:
    """Part of the answer had arrived: the caller decides whether to repeat."""
    with RawServer(answering(GOOD, GOOD[:-5]), answering(GOOD)) as server:
        read(reader, server)
        with pytest.raises(UpstreamUnavailableError, match="ended after 5 of 10"):
            read(reader, server)
        assert server.connections == 1


def test_a_connection_is_never_shared_by_two_answers_at_a_time(pool: ConnectionPool) -> None:
    with upstream() as source:
        url = source.origin.url
        with pool.get(f"{url}/first", {}) as first:
            with pool.get(f"{url}/second", {}) as second:
                assert first.read(10) + second.read(SIZE) == CONTENT[:10] + CONTENT
            assert first.read(SIZE) == CONTENT[10:]
        assert [request.target for request in source.heard] == ["/first", "/second"]


def test_closing_closes_the_idle_connections(reader: RangedReader, pool: ConnectionPool) -> None:
    with RawServer(waiting_after(GOOD)) as server:
        read(reader, server)
        assert not server.closed[0].is_set()
        pool.close()
        assert server.closed[0].wait(60)


def test_closing_breaks_a_read_that_is_under_way(reader: RangedReader, pool: ConnectionPool) -> None:
    """The end of a program does not wait until a silent upstream times out."""
    asked = Event()

    def stall(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(GOOD[:-5])
        asked.set()
        connection.recv(1)

    with RawServer(stall) as server, ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read, reader, server)
        assert asked.wait(60)
        pool.close()
        with pytest.raises(UpstreamUnavailableError):
            reading.result(60)


def test_after_closing_no_connection_is_opened_or_kept(pool: ConnectionPool) -> None:
    answer = message("200 OK", "Content-Length: 3", body=b"abc")
    with RawServer(waiting_after(answer)) as server, RawServer(answering(answer)) as other:
        with pool.get(server.url, {}) as response:
            assert response.read(3) == b"abc"
            pool.close()
            connection = server.closed[0]
        for url in (server.url, other.url):
            with pytest.raises(ConnectionAbortedError, match="shutting down"), pool.get(url, {}):
                pass
        assert connection.wait(60)
        assert (server.connections, other.connections) == (1, 0)


@pytest.mark.parametrize(("error", "reason"), [
    (TimeoutError("The read operation timed out"), "timed out"),
    (ConnectionResetError(104, "Connection reset by peer"), "[Errno 104] Connection reset by peer"),
    (OSError(), "OSError"),
    (UnsendableError("/x?Signature=secret"), "an address or a header cannot be sent"),
    (ValueError("Invalid header value b'secret'"), "an address or a header cannot be sent"),
    (ProtocolError("the answer is not HTTP/1.1"), "the answer is not HTTP/1.1"),
])  # fmt: skip
def test_a_reason_says_what_the_network_did(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_idle_connections_of_all_origins_together_have_a_limit() -> None:
    """The least recently used one is closed first."""
    answer = message("200 OK", "Content-Length: 0")
    with (
        closing(ConnectionPool(timeout_seconds=10, idle_limit=2)) as pool,
        RawServer(waiting_after(answer, answer)) as first,
        RawServer(waiting_after(answer)) as second,
        RawServer(waiting_after(answer)) as third,
    ):
        for server in (first, second, first, third):
            with pool.get(server.url, {}) as response:
                assert response.has_ended()
        assert second.closed[0].wait(60)
        assert not first.closed[0].is_set()
        assert not third.closed[0].is_set()
        assert first.connections == 1


# --- dialling, behind the egress guard ---


TWO = EgressPolicy.parse("127.0.0.1 127.0.0.3")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_attempts(monkeypatch)


def test_an_address_that_does_not_answer_is_followed_by_the_next_one(names: Names, attempts: list[str]) -> None:
    with Doorbell("127.0.0.1") as bell:
        names.say("hub.example", ["127.0.0.3", "127.0.0.1"])
        with closing(dial("hub.example", bell.port, 10, TWO)) as connection:
            assert connection.getpeername() == ("127.0.0.1", bell.port)
            assert connection.gettimeout() == 10
        assert bell.rang
    assert attempts == ["127.0.0.3", "127.0.0.1"]


@pytest.mark.parametrize(("name", "expected", "said"), [
    ("hub.example", ConnectionRefusedError, "refused"),  # the last one's failure
    ("nowhere.example", socket.gaierror, "not known"), ("empty.example", OSError, "no address"),
])  # fmt: skip
def test_a_name_where_no_address_answers_is_a_failure_of_the_network(
    names: Names, name: str, expected: type[OSError], said: str
) -> None:
    with Doorbell("127.0.0.1") as bell:
        port = bell.port
    names.say("hub.example", ["127.0.0.3", "127.0.0.1"])
    names.say("empty.example", [])
    with pytest.raises(expected, match=said):
        dial(name, port, 10, TWO)


def test_what_is_resolved_is_what_was_judged(names: Names) -> None:
    """The resolver would read the text again, and by rules of its own."""
    with pytest.raises(socket.gaierror):
        dial("B\u00fccher.Example.", 1, 10, PUBLIC_INTERNET)
    assert names.asked == ["xn--bcher-kva.example"]


def test_an_ipv6_address_is_called_by_its_own_family() -> None:
    with Doorbell("::1") as bell, closing(dial("[::1]", bell.port, 10, EgressPolicy.parse("::1"))) as connection:
        assert connection.family == socket.AF_INET6
        assert bell.rang
