"""Chunks over HTTP: what the other side may answer, and what becomes of our grant."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from bdn.core.chunk import digest_of
from bdn.core.errors import BdnError, GrantExpiredError, InternalError, NotFoundError, StoreUnavailableError
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import PartialChunk, WrongLengthError
from bdn.transfer.http_chunks import HttpChunkReader
from tests.doubles import faults
from tests.doubles.http_origin import Answer
from tests.support.content.readers import read_chunk
from tests.support.content.shelves import Shelf, serving
from tests.support.network.raw_server import RawServer, answering, message, partial
from tests.support.network.upstream import CONTENT, SIZE, Upstream, upstream

CHUNK = digest_of(CONTENT)
PATH = f"/chunks/{CHUNK}"


@pytest.fixture
def pool() -> Iterator[ConnectionPool]:
    with closing(ConnectionPool(timeout_seconds=10)) as made:
        yield made


@pytest.fixture
def mirror() -> Iterator[Upstream]:
    """``origin`` is the mirror, ``other`` its store."""
    with upstream() as made:
        yield made


def reader_of(pool: ConnectionPool, mirror: Upstream, bearer: str | None = "grant") -> HttpChunkReader:
    return HttpChunkReader(pool, mirror.origin.url, bearer)


def read_raw(pool: ConnectionPool, answer: bytes) -> bytes:
    with RawServer(answering(answer)) as server:
        return read_chunk(HttpChunkReader(pool, server.url), CONTENT)


@pytest.mark.parametrize("grant", ["grant", None])
def test_a_chunk_is_asked_for_by_its_name_with_the_grant_there_is(
    pool: ConnectionPool, mirror: Upstream, grant: str | None
) -> None:
    assert read_chunk(reader_of(pool, mirror, grant), CONTENT) == CONTENT
    assert mirror.heard[-1].target == PATH
    assert mirror.heard[-1].headers.get("authorization") == (grant and f"Bearer {grant}")


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_not_followed(pool: ConnectionPool, mirror: Upstream, status: int) -> None:
    mirror.respond[PATH] = lambda _: Answer(status, {"Location": f"{mirror.other.url}/?X-Amz-Signature=5igned"})
    with pytest.raises(BdnError) as raised:
        read_chunk(reader_of(pool, mirror), CONTENT)
    assert "5igned" not in repr(raised.value)
    assert len(mirror.heard) == 1


def test_a_refusal_keeps_its_code_and_its_message(pool: ConnectionPool) -> None:
    refusal = GrantExpiredError("2026-11-20T00:00:00+00:00")
    with serving(Shelf(refusal=refusal)) as server, pytest.raises(BdnError) as raised:
        read_chunk(HttpChunkReader(pool, f"http://127.0.0.1:{server.port}", "old"), CONTENT)
    assert (raised.value.code, str(raised.value), raised.value.transient) == ("GRANT_EXPIRED", str(refusal), False)


@pytest.mark.parametrize(("status", "expected", "said"), [
    ("404 Not Found", NotFoundError, str(CHUNK)),
    # a gateway that does not reach the mirror
    ("502 Bad Gateway", StoreUnavailableError, "is not available"),
    ("503 Service Unavailable", StoreUnavailableError, "is not available"),
    ("504 Gateway Timeout", StoreUnavailableError, "is not available"),
    # a fault of our own
    ("206 Partial Content", InternalError, "unexpected answer 206"),
    ("301 Moved", InternalError, "unexpected answer 301"),
    ("400 Bad Request", InternalError, "unexpected answer 400"),
    ("500 Oops", InternalError, "unexpected answer 500"),
])  # fmt: skip
def test_an_answer_without_a_word_of_ours_is_judged_by_its_status(
    pool: ConnectionPool, status: str, expected: type[BdnError], said: str
) -> None:
    with pytest.raises(expected, match=said):
        read_raw(pool, message(status, "Content-Length: 6", body=b"<html>"))


@pytest.mark.parametrize(("headers", "body", "expected", "said"), [
    *(([f"Content-Length: {length}"], CONTENT, WrongLengthError, f"{length} bytes instead of {SIZE}")
      for length in (SIZE - 1, SIZE + 1, 0)),
    ([], CONTENT, WrongLengthError, f"None bytes instead of {SIZE}"),
    ([f"Content-Length: {SIZE}"], CONTENT[:100], StoreUnavailableError, f"ended after 100 of {SIZE} bytes"),
])  # fmt: skip
def test_a_body_that_is_not_as_long_as_the_chunk_is_an_error(
    pool: ConnectionPool, headers: list[str], body: bytes, expected: type[BdnError], said: str
) -> None:
    with pytest.raises(expected, match=said) as raised:
        read_raw(pool, message("200 OK", *headers, body=body))
    assert type(raised.value) is expected


def test_a_mirror_that_stalls_times_out_as_an_error_that_may_pass(mirror: Upstream) -> None:
    mirror.script.add(faults.stall(100))
    hasty = ConnectionPool(timeout_seconds=0.05)
    with closing(hasty), pytest.raises(StoreUnavailableError, match="timed out"):
        read_chunk(reader_of(hasty, mirror), CONTENT)


def test_chunks_share_a_connection(pool: ConnectionPool) -> None:
    answer = message("200 OK", f"Content-Length: {SIZE}", body=CONTENT)
    absent = message("404 Not Found", "Content-Length: 2", body=b"{}")
    with RawServer(answering(answer, answer, absent)) as server:
        reader = HttpChunkReader(pool, server.url)
        assert [read_chunk(reader, CONTENT) for _ in range(2)] == [CONTENT] * 2
        with pytest.raises(NotFoundError):
            read_chunk(reader, CONTENT)
        assert server.connections == 1


def test_a_readers_text_form_does_not_show_the_grant(pool: ConnectionPool) -> None:
    assert "eyJhbGciOi" not in repr(HttpChunkReader(pool, "http://mirror:8461", "eyJhbGciOi"))


def rest_of(pool: ConnectionPool, answer: bytes, start: int) -> bytes:
    chunk = PartialChunk(CHUNK, memoryview(bytearray(CONTENT[:start] + bytes(SIZE - start))))
    chunk.received(chunk.buffer[:start])
    with RawServer(answering(answer)) as server:
        HttpChunkReader(pool, server.url).read_into(chunk)
    return bytes(chunk.buffer)


def test_the_rest_of_a_chunk_is_a_range(pool: ConnectionPool) -> None:
    assert rest_of(pool, partial(CONTENT[7:], 7, SIZE), 7) == CONTENT


@pytest.mark.parametrize(("answer", "expected", "said"), [
    (partial(CONTENT[6:], 6, SIZE), StoreUnavailableError, "another range"),  # it begins earlier
    (partial(CONTENT[7:], 7, SIZE + 1), StoreUnavailableError, "another range"),  # of another size
    (partial(CONTENT[7:-1], 7, SIZE), StoreUnavailableError, "another range"),  # it ends earlier
    (message("200 OK", f"Content-Length: {SIZE}", body=CONTENT), InternalError, "unexpected answer 200"),
])  # fmt: skip
def test_anything_else_than_the_range_that_was_asked_for_is_not_read(
    pool: ConnectionPool, answer: bytes, expected: type[BdnError], said: str
) -> None:
    with pytest.raises(expected, match=said):
        rest_of(pool, answer, 7)
