"""Files of one chunk are asked for as a whole where that is how an upstream tells their checksum."""

import gzip
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from bdn.core.chunk import ByteRange
from bdn.core.errors import BdnError, SourceChangedError, UpstreamUnavailableError
from bdn.core.pace.retry import ResumePolicy
from bdn.core.source.upstream import Checksum, ChecksumKind, Headers, Location
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.ranged import RangedReader, RangeRequest
from tests.doubles import faults
from tests.doubles.http_origin import Answer, Request
from tests.support.network.raw_server import RawServer, answering, message, partial
from tests.support.network.upstream import CONTENT, ETAG, ONCE, SIZE, SOURCE, Upstream, upstream

SUM = "ab" * 8


def stated(headers: Headers) -> Checksum | None:
    """As an S3 source reads it."""
    value = headers.get("X-Amz-Checksum-Crc64nvme")
    return Checksum(ChecksumKind.CRC64NVME, value) if value else None


def with_sum(request: Request) -> Answer:
    """As S3 does, tells the whole file's checksum when it is asked for the whole file."""
    headers = {"ETag": ETAG, **({} if "range" in request.headers else {"x-amz-checksum-crc64nvme": SUM})}
    return Answer(200, headers, CONTENT, ranged=True)


@pytest.fixture
def source() -> Iterator[Upstream]:
    with upstream(resume=ResumePolicy()) as made:
        made.respond["/file"] = with_sum
        yield made


def read(reader: RangedReader, location: Location, start: int = 0, stop: int = SIZE) -> tuple[bytes, Checksum | None]:
    buffer = bytearray(b"\xee" * (stop - start))
    found = reader.read_into(location, RangeRequest(SOURCE, "file", ByteRange(start, stop), SIZE), memoryview(buffer))
    return bytes(buffer), found


def location_of(source: Upstream) -> Location:
    return Location(f"{source.origin.url}/file", etag=ETAG, stated=stated)


def test_the_whole_file_is_asked_for_without_a_range_and_its_checksum_is_returned(source: Upstream) -> None:
    assert read(source.reader, location_of(source)) == (CONTENT, Checksum(ChecksumKind.CRC64NVME, SUM))
    assert "range" not in source.heard[-1].headers


def test_a_part_of_the_file_is_asked_for_with_a_range_and_states_nothing(source: Upstream) -> None:
    assert read(source.reader, location_of(source), 0, SIZE - 1) == (CONTENT[:-1], None)
    assert source.heard[-1].headers["range"] == f"bytes=0-{SIZE - 2}"


def test_where_nothing_can_be_stated_the_whole_file_is_asked_for_with_a_range(source: Upstream) -> None:
    assert read(source.reader, replace(location_of(source), stated=None)) == (CONTENT, None)
    assert source.heard[-1].headers["range"] == f"bytes=0-{SIZE - 1}"


def test_an_upstream_that_states_nothing_is_read_all_the_same(source: Upstream) -> None:
    del source.respond["/file"]
    assert read(source.reader, location_of(source)) == (CONTENT, None)


def test_the_rest_of_a_file_that_broke_off_is_asked_for_with_a_range(source: Upstream) -> None:
    """And what the first answer stated is kept: the second one is about a part."""
    source.script.add(faults.truncate(1000))
    assert read(source.reader, location_of(source)) == (CONTENT, Checksum(ChecksumKind.CRC64NVME, SUM))
    assert [request.headers.get("range") for request in source.heard] == [None, f"bytes=1000-{SIZE - 1}"]


def test_a_file_that_did_not_begin_is_asked_for_as_a_whole_again(source: Upstream) -> None:
    source.script.add(faults.drop())
    with pytest.raises(UpstreamUnavailableError):
        read(source.reader, location_of(source))
    assert read(source.reader, location_of(source))[1] is not None


def read_raw(answer: bytes, location: Location | None = None) -> tuple[bytes, Checksum | None]:
    with closing(ConnectionPool(timeout_seconds=10)) as pool, RawServer(answering(answer)) as server:
        return read(RangedReader(pool, ONCE), replace(location or Location("", stated=stated), url=server.url))


def test_an_upstream_may_answer_with_the_range_that_is_the_whole() -> None:
    assert read_raw(partial(CONTENT, 0, SIZE)) == (CONTENT, None)


@pytest.mark.parametrize(("answer", "expected"), [
    (message("200 OK", f"Content-Length: {SIZE - 1}", body=CONTENT[:-1]), SourceChangedError),
    (message("200 OK", f"Content-Length: {SIZE + 1}", body=CONTENT + b"x"), SourceChangedError),
    (message("200 OK", body=CONTENT), SourceChangedError),
    (message("200 OK", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), SourceChangedError),
    (message("200 OK", f"Content-Length: {SIZE}", body=CONTENT[:-1]), UpstreamUnavailableError),
    (message("203 Changed on the way", f"Content-Length: {SIZE}", body=CONTENT), UpstreamUnavailableError),
    (partial(CONTENT[1:], 1, SIZE), UpstreamUnavailableError),
    (partial(CONTENT[:-1], 0, SIZE), UpstreamUnavailableError),
    (partial(CONTENT, 0, SIZE + 1), SourceChangedError),
])  # fmt: skip
def test_an_answer_that_is_not_exactly_the_file_is_no_data(answer: bytes, expected: type[BdnError]) -> None:
    with pytest.raises(expected) as raised:
        read_raw(answer)
    assert type(raised.value) is expected


@pytest.mark.parametrize("etag", ['ETag: "v2"', "X: no etag"])
def test_the_whole_of_another_version_is_no_data(etag: str) -> None:
    answer = message("200 OK", f"Content-Length: {SIZE}", etag, body=CONTENT)
    with pytest.raises(SourceChangedError, match="ETag"):
        read_raw(answer, Location("", etag=ETAG, stated=stated))


# --- encodings ---

ENCODED = Location("", may_be_encoded=True, stated=stated)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_encoding_that_the_file_was_stored_with_does_not_change_its_bytes(is_whole: bool) -> None:
    whole = message("200 OK", f"Content-Length: {SIZE}", "Content-Encoding: gzip", body=CONTENT)
    answer = whole if is_whole else partial(CONTENT, 0, SIZE, "Content-Encoding: gzip")
    assert read_raw(answer, replace(ENCODED, stated=stated if is_whole else None))[0] == CONTENT


@pytest.mark.parametrize("may_be_encoded", [True, False])
def test_an_encoding_that_the_server_applied_is_no_data(may_be_encoded: bool) -> None:
    body = gzip.compress(CONTENT)
    location = replace(ENCODED, may_be_encoded=may_be_encoded)
    for length in (f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"):
        with pytest.raises(UpstreamUnavailableError, match="encoded or has the wrong length"):
            read_raw(message("200 OK", length, "Content-Encoding: gzip", body=body), location)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_encoding_that_nobody_announced_is_no_data_even_when_the_length_fits(is_whole: bool) -> None:
    whole = message("200 OK", f"Content-Length: {SIZE}", "Content-Encoding: br", body=CONTENT)
    answer = whole if is_whole else partial(CONTENT, 0, SIZE, "Content-Encoding: br")
    with pytest.raises(UpstreamUnavailableError, match="encoded or has the wrong length"):
        read_raw(answer, Location("", stated=stated if is_whole else None))


def test_a_source_that_stores_encoded_files_may_ask_for_them_as_they_are(source: Upstream) -> None:
    location = replace(location_of(source), headers=(("accept-encoding", "gzip"),))
    read(source.reader, location)
    assert source.heard[-1].headers["accept-encoding"] == "gzip"
