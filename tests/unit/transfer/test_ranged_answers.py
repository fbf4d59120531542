"""A range of an upstream file: every way an answer can be wrong is an error, never data."""

import gzip
import traceback
from collections.abc import Iterator
from contextlib import closing
from socket import socket

import pytest

from bdn.core.errors import BdnError, SourceChangedError, UpstreamRateLimitedError, UpstreamUnavailableError
from bdn.core.pace.retry import StallPolicy
from bdn.core.source.upstream import Location
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.ranged import LocationRefusedError, RangedReader
from tests.doubles import faults
from tests.doubles.faults import Fault
from tests.support.network.raw_server import (
    Play,
    RawServer,
    answering,
    message,
    partial,
    resetting_after,
    waiting_after,
)
from tests.support.network.upstream import CONTENT, ETAG, ONCE, SIZE, SOURCE, Upstream, read_range, upstream


@pytest.fixture
def source() -> Iterator[Upstream]:
    with upstream() as made:
        yield made


@pytest.fixture
def reader() -> Iterator[RangedReader]:
    with closing(ConnectionPool(timeout_seconds=10)) as pool:
        yield RangedReader(pool, ONCE)


def read_raw(reader: RangedReader, play: Play, start: int = 0, stop: int = 10) -> bytes:
    """The bytes [start, stop) from a server that plays ``play`` once."""
    with RawServer(play) as server:
        return read_range(reader, Location(f"{server.url}/file"), start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, SIZE), (1, SIZE), (100, 200), (SIZE - 1, SIZE)])
def test_a_range_arrives_exactly(source: Upstream, start: int, stop: int) -> None:
    assert source.read(start, stop) == CONTENT[start:stop]
    assert source.heard[-1].headers["range"] == f"bytes={start}-{stop - 1}"


def test_a_request_carries_the_locations_headers_and_accepts_no_encoding(source: Upstream) -> None:
    source.read(0, 10, headers={"Authorization": "Bearer secret", "If-Match": ETAG})
    sent = source.heard[-1].headers
    assert (sent["authorization"], sent["if-match"]) == ("Bearer secret", ETAG)
    assert sent["accept-encoding"] == "identity"


@pytest.mark.parametrize("stated", ['"v1"', "v1", 'W/"v1"'])
def test_an_etag_is_compared_without_its_quotes(source: Upstream, stated: str) -> None:
    assert source.read(0, 10, etag=stated) == CONTENT[:10]


def test_another_etag_means_that_the_source_changed(source: Upstream) -> None:
    with pytest.raises(SourceChangedError, match="its ETag is another one") as raised:
        source.read(0, 10, etag='"v2"')
    assert (raised.value.source, raised.value.path) == (SOURCE, "file")


def test_an_answer_without_an_etag_where_one_is_expected_means_that_the_source_changed(reader: RangedReader) -> None:
    with RawServer(answering(partial(CONTENT[:10], 0, SIZE))) as server, pytest.raises(SourceChangedError):
        read_range(reader, Location(server.url, etag=ETAG), 0, 10)


def test_the_whole_file_is_no_data_even_when_the_whole_file_was_asked_for(source: Upstream) -> None:
    source.script.add(faults.ignore_range())
    with pytest.raises(UpstreamUnavailableError, match="the whole file came"):
        source.read(0, SIZE)


@pytest.mark.parametrize(("stated", "expected"), [
    ("", UpstreamUnavailableError),
    ("Content-Range: bytes 1-10/4096", UpstreamUnavailableError),
    ("Content-Range: bytes 0-8/4096", UpstreamUnavailableError),
    ("Content-Range: bytes 0-10/4096", UpstreamUnavailableError),
    ("Content-Range: bytes 0-9/*", UpstreamUnavailableError),
    ("Content-Range: bytes 9-0/4096", UpstreamUnavailableError),
    ("Content-Range: items 0-9/4096", UpstreamUnavailableError),
    (f"Content-Range: bytes 0-9/{'9' * 5000}", UpstreamUnavailableError),
    ("Content-Range: bytes 0-9/4097", SourceChangedError),
    ("Content-Range: bytes 0-9/10", SourceChangedError),
    ("Content-Range: bytes 0-7/8", SourceChangedError),  # the file shrank, and the range was cut to what is left
])  # fmt: skip
def test_an_answer_about_other_bytes_is_no_data(reader: RangedReader, stated: str, expected: type[BdnError]) -> None:
    headers = [stated] if stated else []
    play = answering(message("206 Partial Content", *headers, "Content-Length: 10", body=CONTENT[:10]))
    with pytest.raises(expected) as raised:
        read_raw(reader, play)
    assert type(raised.value) is expected


def test_a_compressed_answer_is_no_data(reader: RangedReader) -> None:
    body = gzip.compress(CONTENT[:10])
    stated = "Content-Range: bytes 0-9/4096"
    for length in (f"Content-Length: {len(body)}", "Content-Length: 10"):
        play = answering(message("206 Partial Content", stated, "Content-Encoding: gzip", length, body=body))
        with pytest.raises(UpstreamUnavailableError, match="encoded or has the wrong length"):
            read_raw(reader, play)


@pytest.mark.parametrize("length", ["9", "11"])
def test_a_length_that_does_not_fit_the_range_is_no_data(reader: RangedReader, length: str) -> None:
    stated = "Content-Range: bytes 0-9/4096"
    play = answering(message("206 Partial Content", stated, f"Content-Length: {length}", body=CONTENT[:11]))
    with pytest.raises(UpstreamUnavailableError, match="encoded or has the wrong length"):
        read_raw(reader, play)


def chunked(body: bytes, *, end: bytes = b"0\r\n\r\n") -> bytes:
    """A 206 of unknown length, in pieces of four bytes."""
    pieces = b"".join(b"4\r\n%s\r\n" % body[at : at + 4] for at in range(0, len(body), 4))
    headers = ("Content-Range: bytes 0-7/4096", "Transfer-Encoding: chunked")
    return message("206 Partial Content", *headers, body=pieces + end)


def test_an_answer_in_pieces_of_unknown_length_is_read(reader: RangedReader) -> None:
    assert read_raw(reader, answering(chunked(CONTENT[:8])), 0, 8) == CONTENT[:8]


@pytest.mark.parametrize("answer", [
    pytest.param(chunked(CONTENT[:4]), id="ends early"),
    pytest.param(chunked(CONTENT[:4], end=b""), id="breaks off between pieces"),
    pytest.param(chunked(CONTENT[:4], end=b"4\r\nab"), id="breaks off inside a piece"),
    pytest.param(chunked(CONTENT[:4], end=b"what\r\n"), id="holds nonsense"),
    pytest.param(chunked(CONTENT[:12]), id="goes on past the range"),
])  # fmt: skip
def test_an_answer_in_pieces_that_is_not_as_long_as_the_range_is_no_data(reader: RangedReader, answer: bytes) -> None:
    with pytest.raises(UpstreamUnavailableError):
        read_raw(reader, answering(answer), 0, 8)


def test_an_answer_that_goes_on_for_ever_is_given_up(reader: RangedReader) -> None:
    def play_without_end(connection: socket) -> None:
        connection.sendall(chunked(CONTENT[:8], end=b""))
        while True:
            connection.sendall(b"4\r\nmore\r\n")

    with pytest.raises(UpstreamUnavailableError, match="longer"):
        read_raw(reader, play_without_end, 0, 8)


@pytest.mark.parametrize("at", [0, 1, 9])
def test_a_body_that_ends_early_is_no_data(source: Upstream, at: int) -> None:
    source.script.add(faults.truncate(at))
    with pytest.raises(UpstreamUnavailableError, match=f"ended after {at} of 10 bytes") as raised:
        source.read(0, 10)
    assert raised.value.transient


def test_a_connection_that_is_reset_inside_the_body_is_an_error_that_may_pass(reader: RangedReader) -> None:
    head = partial(CONTENT[:10], 0, SIZE)
    with pytest.raises(UpstreamUnavailableError, match="reset by peer"):
        read_raw(reader, resetting_after(head[:-5]))


def test_a_connection_that_ends_before_the_answer_is_an_error_that_may_pass(source: Upstream) -> None:
    source.script.add(faults.drop(), times=None)
    with pytest.raises(UpstreamUnavailableError, match="closed connection without response"):
        source.read(0, 10)


def test_an_upstream_that_does_not_listen_is_an_error_that_may_pass(reader: RangedReader) -> None:
    with RawServer() as server:
        gone = server.url
    with pytest.raises(UpstreamUnavailableError, match="refused"):
        read_range(reader, Location(gone), 0, 10)


@pytest.mark.parametrize("at", [0, 5])
def test_an_upstream_that_stalls_inside_the_body_is_an_error_that_may_pass(at: int) -> None:
    with upstream(stall=StallPolicy(window_seconds=0.05)) as source:
        source.script.add(faults.stall(at))
        with pytest.raises(UpstreamUnavailableError, match=f"stalled: {at} bytes"):
            source.read(0, 10)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 206 Partial Content\r\nContent-"])
def test_an_upstream_that_does_not_answer_times_out_as_an_error_that_may_pass(begun: bytes) -> None:
    with closing(ConnectionPool(timeout_seconds=0.05)) as pool, RawServer(waiting_after(begun)) as server:
        with pytest.raises(UpstreamUnavailableError, match="timed out"):
            read_range(RangedReader(pool), Location(server.url), 0, 10)
        assert server.connections == 1


REFUSALS = [
    (400, LocationRefusedError), (401, LocationRefusedError), (403, LocationRefusedError),
    (404, SourceChangedError), (410, SourceChangedError), (412, SourceChangedError), (416, SourceChangedError),
    (429, UpstreamRateLimitedError),
    (204, UpstreamUnavailableError), (304, UpstreamUnavailableError), (405, UpstreamUnavailableError),
    (500, UpstreamUnavailableError), (502, UpstreamUnavailableError), (503, UpstreamUnavailableError),
    (504, UpstreamUnavailableError),
]  # fmt: skip


@pytest.mark.parametrize(("status", "expected"), REFUSALS)
def test_a_status_says_who_is_to_blame(reader: RangedReader, status: int, expected: type[BdnError]) -> None:
    with pytest.raises(expected) as raised:
        read_raw(reader, answering(message(f"{status} Because", "Content-Length: 0")))
    assert type(raised.value) is expected
    assert raised.value.transient == (expected in (UpstreamUnavailableError, UpstreamRateLimitedError))
    assert raised.value.details()["source"] == SOURCE


@pytest.mark.parametrize(("headers", "seconds"), [
    ({}, None),
    ({"Retry-After": "7"}, 7.0),
    ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ({"ratelimit": '"api";r=0;t=55'}, 55.0),
])  # fmt: skip
def test_a_limited_request_knows_how_long_to_wait(
    source: Upstream, headers: dict[str, str], seconds: float | None
) -> None:
    source.script.add(faults.answer(429, headers))
    with pytest.raises(UpstreamRateLimitedError) as raised:
        source.read(0, 10)
    assert raised.value.retry_after_seconds == seconds


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_an_outage_may_say_how_long_it_lasts(source: Upstream, status: int) -> None:
    source.script.add(faults.answer(status, {"Retry-After": "7"}))
    with pytest.raises(UpstreamUnavailableError, match=f"status {status}") as raised:
        source.read(0, 10)
    assert raised.value.retry_after_seconds == 7.0


@pytest.mark.parametrize(
    "fault", [faults.answer(403), faults.answer(500), faults.ignore_range(), faults.truncate(3), faults.drop()]
)
def test_no_error_holds_a_signed_address_or_a_credential(source: Upstream, fault: Fault) -> None:
    source.script.add(fault)
    with pytest.raises(BdnError) as raised:
        source.read(0, 10, path="/file?X-Amz-Signature=5igned", headers={"Authorization": "Bearer hf_t0ken"})
    check_discreet(raised.value)


@pytest.mark.parametrize(("path", "header"), [
    ("/file?X-Amz-Signature=5igned", "Bearer hf_t0ken\n"),  # a secret's file that ends with a new line
    ("/file?X-Amz-Signature=5igned", "Bearer hf_t0ken\u2026"),
    ("/file name?X-Amz-Signature=5igned", "Bearer hf_t0ken"),
    ("/\xfc?X-Amz-Signature=5igned", "Bearer hf_t0ken"),
])  # fmt: skip
def test_a_request_that_cannot_be_sent_is_an_error_that_holds_no_secret(
    source: Upstream, path: str, header: str
) -> None:
    with pytest.raises(UpstreamUnavailableError, match="cannot be sent") as raised:
        source.read(0, 10, path=path, headers={"Authorization": header})
    check_discreet(raised.value)


def check_discreet(error: BdnError) -> None:
    """Neither the error nor its traceback holds what we sent."""
    shown = f"{error!r} {error.details()} {''.join(traceback.format_exception(error))}"
    frames = [line for line in shown.splitlines() if not line.startswith("    ")]  # source lines of this test
    assert not [line for line in frames if "5igned" in line or "hf_t0ken" in line]
