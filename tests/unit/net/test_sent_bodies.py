"""Requests that bring bytes, or ask for none: how their bodies go out, and what becomes of a connection that breaks meanwhile."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from bdn.net.http1.connection import NoAnswerError
from bdn.net.http1.pool import ConnectionPool
from tests.support.content.noise import MIB, noise
from tests.support.network.raw_server import DONE, RawServer, answering, message, taking, waiting_after

BODY = noise(8 * MIB)


@pytest.fixture
def pool() -> Iterator[ConnectionPool]:
    with closing(ConnectionPool(timeout_seconds=20)) as made:
        yield made


def asked(pool: ConnectionPool, method: str, url: str, body: bytes | memoryview | None = None) -> tuple[int, bytes]:
    with pool.request(method, url, {"X": "y"}, body) as answer:
        return answer.status, answer.read(100)


def test_a_body_goes_out_whole_and_the_connection_is_used_again(pool: ConnectionPool) -> None:
    bodies = (BODY, b"", b"small")
    with RawServer(taking(*bodies)) as server:
        for body in bodies:
            assert asked(pool, "PUT", server.url, memoryview(body)) == (200, b"ok")


def test_an_answer_to_head_has_no_body_whatever_it_announces(pool: ConnectionPool) -> None:
    there = message("200 OK", "Content-Length: 8388608", "X-Size: 1")
    gone = message("404 Not Found", "Transfer-Encoding: chunked")
    with RawServer(waiting_after(there, gone, there)) as server:
        assert [asked(pool, "HEAD", server.url) for _ in range(3)] == [(200, b""), (404, b""), (200, b"")]
        assert server.connections == 1


def test_who_refuses_a_body_before_it_has_come_is_heard(pool: ConnectionPool) -> None:
    """And hangs up then: the rest of the body cannot be sent."""
    refusal = message("403 Forbidden", "Content-Length: 2", body=b"no")
    with RawServer(answering(refusal), taking(b"next")) as server:
        assert asked(pool, "PUT", server.url, BODY) == (403, b"no")
        assert asked(pool, "PUT", server.url, b"next") == (200, b"ok")


def test_on_an_idle_connection_that_was_closed_a_body_is_sent_once_more(pool: ConnectionPool) -> None:
    with RawServer(taking(b"1"), taking(BODY)) as server:
        assert asked(pool, "PUT", server.url, b"1") == (200, b"ok")
        assert server.closed[0].wait(20)
        assert asked(pool, "PUT", server.url, BODY) == (200, b"ok")


def test_a_delete_that_was_not_answered_is_not_sent_again(pool: ConnectionPool) -> None:
    """It may have been carried out, and somebody may have put anew what a second one would take."""
    with RawServer(answering(DONE), answering(DONE)) as server:
        assert asked(pool, "GET", server.url) == (200, b"ok")
        assert server.closed[0].wait(20)
        with pytest.raises(NoAnswerError):
            asked(pool, "DELETE", server.url)
        assert server.connections == 1
