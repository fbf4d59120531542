"""A range of an upstream file: every way an answer or a redirect can be wrong is an error, never data."""

import gzip
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from socket import socket

import pytest

from bdn.core.chunk import ByteRange
from bdn.core.errors import BdnError, SourceChangedError, UpstreamRateLimitedError, UpstreamUnavailableError
from bdn.core.pace.retry import ResumePolicy
from bdn.core.source.upstream import Checksum, ChecksumKind, Headers, Location
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest
from tests.doubles import faults
from tests.doubles.faults import Fault
from tests.doubles.http_origin import Answer, Request
from tests.support.network.raw_server import Play, RawServer, answering, message, partial, waiting_after
from tests.support.network.upstream import CONTENT, ETAG, ONCE, SIZE, SOURCE, Upstream, read_range, upstream

COMPRESSED = gzip.compress(CONTENT[:10], mtime=0)  # the same in every process that collects tests


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
    with pytest.raises(SourceChangedError, match="its ETag changed") as raised:
        source.read(0, 10, etag='"v2"')
    assert (raised.value.source, raised.value.path) == (SOURCE, "file")


def test_an_answer_without_an_etag_where_one_is_expected_means_that_the_source_changed(reader: RangedReader) -> None:
    with RawServer(answering(partial(CONTENT[:10], 0, SIZE))) as server, pytest.raises(SourceChangedError):
        read_range(reader, Location(server.url, etag=ETAG), 0, 10)


def test_ranged_reader__whole_file_for_a_range_of_all_of_it__is_accepted(source: Upstream) -> None:
    source.script.add(faults.ignore_range())
    assert source.read(0, SIZE) == CONTENT


def test_a_server_that_ignores_the_range_of_a_larger_file_is_refused_without_an_end_of_retries(
    source: Upstream,
) -> None:
    source.script.add(faults.ignore_range(), times=None)
    with pytest.raises(UpstreamUnavailableError, match="ignores Range") as raised:
        source.read(0, 10)
    assert not raised.value.transient
    assert source.log.count() == 3


def test_one_answer_that_ignores_a_range_is_survived(source: Upstream) -> None:
    source.script.add(faults.ignore_range())
    assert source.read(0, 10) == CONTENT[:10]


def test_the_encoding_of_an_upload_is_not_of_the_stored_bytes(reader: RangedReader) -> None:
    headers = ("Content-Range: bytes 0-9/4096", "Content-Encoding: aws-chunked")
    assert read_raw(reader, answering(message("206 Partial Content", *headers, body=CONTENT[:10]))) == CONTENT[:10]


@pytest.mark.parametrize(("stated", "expected"), [
    ("", UpstreamUnavailableError),
    ("Content-Range: bytes 1-10/4096", UpstreamUnavailableError),
    ("Content-Range: bytes 0-8/4096", UpstreamUnavailableError),
    ("Content-Range: bytes 0-10/4096", UpstreamUnavailableError),
    ("Content-Range: bytes 0-9/*", UpstreamUnavailableError),
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


@pytest.mark.parametrize(("headers", "body"), [
    (["Content-Encoding: gzip", f"Content-Length: {len(COMPRESSED)}"], COMPRESSED),
    (["Content-Encoding: gzip", "Content-Length: 10"], COMPRESSED),
    (["Content-Length: 9"], CONTENT[:11]),
    (["Content-Length: 11"], CONTENT[:11]),
])  # fmt: skip
def test_an_answer_that_is_compressed_or_has_another_length_than_the_range_is_no_data(
    reader: RangedReader, headers: list[str], body: bytes
) -> None:
    play = answering(message("206 Partial Content", "Content-Range: bytes 0-9/4096", *headers, body=body))
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


def test_an_upstream_that_does_not_listen_is_an_error_that_may_pass(reader: RangedReader) -> None:
    with RawServer() as server:
        gone = server.url
    with pytest.raises(UpstreamUnavailableError, match="refused"):
        read_range(reader, Location(gone), 0, 10)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 206 Partial Content\r\nContent-"])
def test_an_upstream_that_does_not_answer_times_out_as_an_error_that_may_pass(begun: bytes) -> None:
    with (
        closing(ConnectionPool(timeout_seconds=0.05)) as pool,
        RawServer(waiting_after(begun)) as server,
        pytest.raises(UpstreamUnavailableError, match="timed out"),
    ):
        read_range(RangedReader(pool), Location(server.url), 0, 10)


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


@pytest.mark.parametrize(("status", "headers", "seconds"), [
    (429, {}, None),
    (429, {"Retry-After": "7"}, 7.0),
    (429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    (429, {"ratelimit": '"api";r=0;t=55'}, 55.0),
    *((status, {"Retry-After": "7"}, 7.0) for status in (500, 502, 503, 504)),
])  # fmt: skip
def test_an_upstream_may_say_how_long_to_wait(
    source: Upstream, status: int, headers: dict[str, str], seconds: float | None
) -> None:
    source.script.add(faults.answer(status, headers))
    with pytest.raises((UpstreamRateLimitedError, UpstreamUnavailableError)) as raised:
        source.read(0, 10)
    assert isinstance(raised.value, UpstreamRateLimitedError if status == 429 else UpstreamUnavailableError)
    assert raised.value.retry_after_seconds == seconds


@pytest.mark.parametrize(
    "fault", [faults.answer(403), faults.answer(500), faults.ignore_range(), faults.truncate(3), faults.drop()]
)
def test_no_error_holds_a_signed_address_or_a_credential(source: Upstream, fault: Fault) -> None:
    source.script.add(fault, times=3)
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


# --- redirects: followed, but never with our credentials to another origin, and never for ever ---

CREDENTIALS = {
    "aUTHORIZATION": "Bearer secret",  # its spelling does not save it
    "Cookie": "token=secret",
    "Proxy-Authorization": "Basic secret",
    "X-Amz-Security-Token": "secret",
}
HARMLESS = {"If-Match": '"v1"', "x-amz-checksum-mode": "ENABLED"}
UNKNOWN = {"X-Api-Key": "secret", "x-goog-user-project": "secret"}


def moved(target: str, status: int = 302) -> Callable[[Request], Answer]:
    return lambda _: Answer(status, {"Location": target}, b"it is over there")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_every_kind_of_redirect_is_followed_with_the_range(source: Upstream, status: int) -> None:
    source.respond["/file"] = moved(f"{source.other.url}/moved", status)
    assert source.read(100, 110) == CONTENT[100:110]
    assert [(request.method, request.headers["range"]) for request in source.heard] == [("GET", "bytes=100-109")] * 2


@pytest.mark.parametrize(
    ("target", "expected"), [("/moved?a=b", "/moved?a=b"), ("moved", "/folder/moved"), ("../x", "/x")]
)
def test_a_relative_redirect_is_relative_to_where_it_came_from(source: Upstream, target: str, expected: str) -> None:
    source.respond["/folder/file"] = moved(target)
    source.read(0, 10, path="/folder/file")
    assert source.heard[-1].target == expected


def test_credentials_go_with_a_redirect_within_the_origin(source: Upstream) -> None:
    source.respond["/file"] = moved(f"{source.origin.url}/moved")
    sent = {**CREDENTIALS, **HARMLESS, **UNKNOWN}
    source.read(0, 10, headers=sent)
    assert {name: source.heard[-1].headers.get(name.lower()) for name in sent} == sent


def test_only_what_is_plainly_harmless_goes_to_another_origin(source: Upstream) -> None:
    """Another port of the same host is another origin."""
    source.respond["/file"] = moved(f"{source.other.url}/moved")
    source.read(0, 10, headers={**CREDENTIALS, **HARMLESS, **UNKNOWN})
    sent = source.heard[-1].headers
    assert "secret" not in " ".join(sent.values())
    assert {name: sent[name.lower()] for name in HARMLESS} == HARMLESS
    assert set(sent) == {"host", "accept-encoding", "range", *(name.lower() for name in HARMLESS)}


def test_credentials_that_were_dropped_do_not_come_back_when_the_way_leads_back(source: Upstream) -> None:
    source.respond["/file"] = moved(f"{source.other.url}/there")
    source.respond["/there"] = moved(f"{source.origin.url}/back")
    source.read(0, 10, headers=CREDENTIALS)
    assert [request.target for request in source.heard] == ["/file", "/there", "/back"]
    assert "authorization" not in source.heard[-1].headers


def test_five_redirects_are_followed_and_neither_a_sixth_nor_one_to_nowhere(source: Upstream) -> None:
    for number in range(6):
        source.respond[f"/{number}"] = moved(f"/{number + 1}")
    assert source.read(0, 10, path="/1") == CONTENT[:10]
    with pytest.raises(UpstreamUnavailableError, match="more than 5 redirects"):
        source.read(0, 10, path="/0")
    source.respond["/nowhere"] = lambda _: Answer(302)
    with pytest.raises(UpstreamUnavailableError):
        source.read(0, 10, path="/nowhere")


@pytest.mark.parametrize("target", [
    "file:///etc/passwd", "ftp://host/file", "http://[::1", "http://host:port/", "http://host:99999/", "/a b\x0bc",
    "/\xfc",
])  # fmt: skip
def test_a_redirect_that_cannot_be_followed_is_an_error_of_the_upstream(reader: RangedReader, target: str) -> None:
    with pytest.raises(UpstreamUnavailableError):
        read_raw(reader, answering(message("302 Found", f"Location: {target}", "Content-Length: 0")))


def test_what_is_wrong_after_a_redirect_is_judged_like_any_answer(source: Upstream) -> None:
    source.respond["/file"] = moved(f"{source.other.url}/moved")
    source.script.add(faults.answer(403), origin="other")
    with pytest.raises(LocationRefusedError):
        source.read(0, 10)
    with pytest.raises(SourceChangedError):
        source.read(0, 10, etag='"v2"')


def test_the_connection_of_a_redirect_is_used_again(source: Upstream) -> None:
    with closing(ConnectionPool(timeout_seconds=10)) as pool:
        redirect = message("302 Found", f"Location: {source.other.url}/moved", "Content-Length: 4", body=b"gone")
        with RawServer(answering(redirect, redirect)) as server:
            for _ in range(2):
                assert read_range(RangedReader(pool), Location(server.url), 0, 10) == CONTENT[:10]
            assert server.connections == 1


# --- files of one chunk are asked for as a whole where that is how an upstream tells their checksum ---

SUM = "ab" * 8


def stated(headers: Headers) -> Checksum | None:
    """As an S3 source reads it."""
    value = headers.get("x-amz-checksum-crc64nvme")
    return Checksum(ChecksumKind.CRC64NVME, value) if value else None


def with_sum(request: Request) -> Answer:
    """As S3 does, tells the whole file's checksum when it is asked for the whole file."""
    headers = {"ETag": ETAG, **({} if "range" in request.headers else {"x-amz-checksum-crc64nvme": SUM})}
    return Answer(200, headers, CONTENT, ranged=True)


@pytest.fixture
def summing() -> Iterator[Upstream]:
    with upstream(resume=ResumePolicy()) as made:
        made.respond["/file"] = with_sum
        yield made


def read(reader: RangedReader, location: Location, start: int = 0, stop: int = SIZE) -> tuple[bytes, Checksum | None]:
    buffer = bytearray(b"\xee" * (stop - start))
    found = reader.read_into(location, RangeRequest(SOURCE, "file", ByteRange(start, stop), SIZE), memoryview(buffer))
    return bytes(buffer), found


def location_of(summing: Upstream) -> Location:
    return Location(f"{summing.origin.url}/file", etag=ETAG, stated=stated)


@pytest.mark.parametrize(("stop", "is_stated", "asked", "found"), [
    (SIZE, True, None, Checksum(ChecksumKind.CRC64NVME, SUM)),
    (SIZE - 1, True, f"bytes=0-{SIZE - 2}", None),  # a part of the file
    (SIZE, False, f"bytes=0-{SIZE - 1}", None),  # where nothing can be stated
])  # fmt: skip
def test_the_whole_file_is_asked_for_without_a_range_where_its_checksum_may_be_stated(
    summing: Upstream, stop: int, is_stated: bool, asked: str | None, found: Checksum | None
) -> None:
    location = replace(location_of(summing), stated=stated if is_stated else None)
    assert read(summing.reader, location, 0, stop) == (CONTENT[:stop], found)
    assert summing.heard[-1].headers.get("range") == asked


def test_an_upstream_that_states_nothing_is_read_all_the_same(summing: Upstream) -> None:
    del summing.respond["/file"]
    assert read(summing.reader, location_of(summing)) == (CONTENT, None)


def test_the_rest_of_a_file_that_broke_off_is_asked_for_with_a_range(summing: Upstream) -> None:
    """And what the first answer stated is kept: the second one is about a part."""
    summing.script.add(faults.truncate(1000))
    assert read(summing.reader, location_of(summing)) == (CONTENT, Checksum(ChecksumKind.CRC64NVME, SUM))
    assert [request.headers.get("range") for request in summing.heard] == [None, f"bytes=1000-{SIZE - 1}"]


def test_a_file_that_broke_off_is_read_again_from_its_start_where_ranges_are_ignored(summing: Upstream) -> None:
    summing.script.add(faults.truncate(SIZE - 1))
    summing.script.add(faults.ignore_range())
    assert read(summing.reader, location_of(summing))[0] == CONTENT


def test_a_file_that_did_not_begin_is_asked_for_as_a_whole_again(summing: Upstream) -> None:
    summing.script.add(faults.drop())
    with pytest.raises(UpstreamUnavailableError):
        read(summing.reader, location_of(summing))
    assert read(summing.reader, location_of(summing))[1] is not None


def read_whole(answer: bytes, location: Location | None = None) -> tuple[bytes, Checksum | None]:
    with closing(ConnectionPool(timeout_seconds=10)) as pool, RawServer(answering(answer)) as server:
        return read(RangedReader(pool, ONCE), replace(location or Location("", stated=stated), url=server.url))


def test_an_upstream_may_answer_with_the_range_that_is_the_whole() -> None:
    assert read_whole(partial(CONTENT, 0, SIZE)) == (CONTENT, None)


@pytest.mark.parametrize(("answer", "expected"), [
    (message("200 OK", f"Content-Length: {SIZE - 1}", body=CONTENT[:-1]), SourceChangedError),
    (message("200 OK", f"Content-Length: {SIZE + 1}", body=CONTENT + b"x"), SourceChangedError),
    (message("200 OK", body=CONTENT[:-1]), UpstreamUnavailableError),
    (message("200 OK", body=CONTENT + b"x"), UpstreamUnavailableError),
    (message("200 OK", "Transfer-Encoding: chunked", body=b"%x\r\n%s\r\n0\r\n\r\n" % (SIZE + 1, CONTENT + b"x")), SourceChangedError),
    (message("200 OK", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), SourceChangedError),
    (message("200 OK", f"Content-Length: {SIZE}", body=CONTENT[:-1]), UpstreamUnavailableError),
    (message("203 Changed on the way", f"Content-Length: {SIZE}", body=CONTENT), UpstreamUnavailableError),
    (partial(CONTENT[1:], 1, SIZE), UpstreamUnavailableError),
    (partial(CONTENT[:-1], 0, SIZE), UpstreamUnavailableError),
    (partial(CONTENT, 0, SIZE + 1), SourceChangedError),
])  # fmt: skip
def test_an_answer_that_is_not_exactly_the_file_is_no_data(answer: bytes, expected: type[BdnError]) -> None:
    with pytest.raises(expected) as raised:
        read_whole(answer)
    assert type(raised.value) is expected


@pytest.mark.parametrize(
    "answer",
    [
        message("200 OK", body=CONTENT),
        message("200 OK", "Transfer-Encoding: chunked", body=b"%x\r\n%s\r\n0\r\n\r\n" % (SIZE, CONTENT)),
    ],
)
def test_an_absent_length_is_not_another_length(answer: bytes) -> None:
    assert read_whole(answer)[0] == CONTENT


@pytest.mark.parametrize("etag", ['ETag: "v2"', "X: no etag"])
def test_the_whole_of_another_version_is_no_data(etag: str) -> None:
    answer = message("200 OK", f"Content-Length: {SIZE}", etag, body=CONTENT)
    with pytest.raises(SourceChangedError, match="ETag"):
        read_whole(answer, Location("", etag=ETAG, stated=stated))


# --- encodings ---


def answer_of(encoding: str, *, is_whole: bool) -> bytes:
    header = f"Content-Encoding: {encoding}"
    if is_whole:
        return message("200 OK", f"Content-Length: {SIZE}", header, body=CONTENT)
    return partial(CONTENT, 0, SIZE, header)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_encoding_that_the_file_was_stored_with_does_not_change_its_bytes_and_no_other_may_be_there(
    is_whole: bool,
) -> None:
    location = Location("", stated=stated if is_whole else None)
    encoded = replace(location, may_be_encoded=True)
    assert read_whole(answer_of("gzip", is_whole=is_whole), encoded)[0] == CONTENT
    with pytest.raises(UpstreamUnavailableError, match="encoded or has the wrong length"):
        read_whole(answer_of("br", is_whole=is_whole), location)


@pytest.mark.parametrize("may_be_encoded", [True, False])
def test_an_encoding_that_the_server_applied_is_no_data(may_be_encoded: bool) -> None:
    body = gzip.compress(CONTENT)
    location = Location("", may_be_encoded=may_be_encoded, stated=stated)
    for length in (f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"):
        with pytest.raises(UpstreamUnavailableError, match="encoded or has the wrong length"):
            read_whole(message("200 OK", length, "Content-Encoding: gzip", body=body), location)


def test_a_source_that_stores_encoded_files_may_ask_for_them_as_they_are(summing: Upstream) -> None:
    location = replace(location_of(summing), headers=(("accept-encoding", "gzip"),))
    read(summing.reader, location)
    assert summing.heard[-1].headers["accept-encoding"] == "gzip"
