"""Heads of answers: right ones are read, ambiguous ones are refused, and nothing else can happen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.net.http1.answer import HEADERS_LIMIT, AnswerHead, parse_head
from bdn.net.http1.connection import ProtocolError
from tests.support.network.hypothesis import BRIEFLY


def head(*lines: str, status: str = "HTTP/1.1 200 OK") -> AnswerHead:
    return parse_head("\r\n".join((status, *lines, "", "")).encode("latin-1"))


@pytest.mark.parametrize(
    "status", ["HTTP/1.1 206 Partial Content", "HTTP/1.1 206 ", "HTTP/1.1 206", "HTTP/1.0 206 \xfc"]
)
def test_a_status_is_read_whatever_its_phrase(status: str) -> None:
    assert head(status=status).status == 206


@pytest.mark.parametrize("status", [
    "HTTP/2 200 OK", "HTTP/1.2 200 OK", "http/1.1 200 OK", "HTTP/1.1  200 OK", "HTTP/1.1 20 OK", "HTTP/1.1 2000 OK",
    "HTTP/1.1 600 OK", "HTTP/1.1 099 OK", "HTTP/1.1 2x0 OK", "HTTP/1.1 200\tOK", "HTTP/1.1 200 O\x00K", " HTTP/1.1 200 OK",
    "ICY 200 OK", "", "HTTP/1.1 200 OK\rX", "HTTP/1.1 \u0662\u0660\u0660".encode().decode("latin-1"),
])  # fmt: skip
def test_what_does_not_begin_like_an_answer_is_none(status: str) -> None:
    with pytest.raises(ProtocolError, match=r"not HTTP/1\.1"):
        head(status=status)


def test_headers_are_found_in_any_case_without_their_white_space() -> None:
    headers = head('ETag: \t"v1" \t', "x-empty:", "X-Latin: \xfc").headers
    assert (headers.get("etag"), headers.get("ETAG")) == ('"v1"', '"v1"')
    assert (headers.get("X-Empty"), headers.get("x-latin"), headers.get("absent")) == ("", "\xfc", None)


def test_fields_of_one_name_are_one_list() -> None:
    assert head("Vary: a", "ETag: x", "vary: b").headers.get("Vary") == "a, b"


@pytest.mark.parametrize("line", [
    "no colon", ": no name", "a name: x", "name : x", " folded: x", "\tfolded", "x: a\rb", "x: a\nb", "x: a\x00b",
    "x: a\x7fb", "\xfc: x", "x\r\n y: z", "(x): y",
])  # fmt: skip
def test_a_malformed_line_spoils_the_head(line: str) -> None:
    with pytest.raises(ProtocolError, match="malformed header"):
        head("ETag: x", line, "Content-Length: 1")


def test_lines_that_end_with_a_bare_line_feed_are_malformed() -> None:
    with pytest.raises(ProtocolError):
        parse_head(b"HTTP/1.1 200 OK\nContent-Length: 1\r\n\r\n")
    with pytest.raises(ProtocolError):
        parse_head(b"HTTP/1.1 200 OK\r\nX: y\nContent-Length: 1\r\n\r\n")


def test_no_more_headers_are_read_than_the_limit() -> None:
    assert head(*["x: y"] * HEADERS_LIMIT).status == 200
    with pytest.raises(ProtocolError, match="more than 200 headers"):
        head(*["x: y"] * (HEADERS_LIMIT + 1))


@pytest.mark.parametrize(("lines", "status", "length", "is_chunked"), [
    (["Content-Length: 10"], 200, 10, False), (["Content-Length: 0"], 206, 0, False),
    (["Content-Length: 010"], 200, 10, False), (["Transfer-Encoding: chunked"], 200, None, True),
    (["Transfer-Encoding: Chunked"], 206, None, True), ([], 200, None, False),
    (["Content-Length: 10"], 304, 0, False), ([], 204, 0, False), ([], 100, 0, False),
])  # fmt: skip
def test_a_body_has_one_end(lines: list[str], status: int, length: int | None, is_chunked: bool) -> None:
    found = head(*lines, status=f"HTTP/1.1 {status} x")
    assert (found.length, found.is_chunked) == (length, is_chunked)


@pytest.mark.parametrize("lines", [
    ["Content-Length: 10", "Content-Length: 11"],
    ["Content-Length: 10", "Content-Length: 10"],
    ["Content-Length: 10, 10"],
    ["Content-Length: -1"],
    ["Content-Length: +1"],
    ["Content-Length: 1 0"],
    ["Content-Length: 0x10"],
    ["Content-Length: \xb2"],
    ["Content-Length:"],
    ["Transfer-Encoding: chunked", "Content-Length: 10"],
    ["Transfer-Encoding: gzip, chunked"],
    ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
    ["Transfer-Encoding: identity"],
    ["Transfer-Encoding: xchunked"],
    ["Transfer-Encoding:"],
])  # fmt: skip
def test_a_body_with_two_ends_or_an_unknown_one_is_refused(lines: list[str]) -> None:
    with pytest.raises(ProtocolError, match="no single, known"):
        head(*lines)


def test_an_old_server_does_not_send_pieces() -> None:
    with pytest.raises(ProtocolError, match="framing"):
        head("Transfer-Encoding: chunked", status="HTTP/1.0 200 OK")


@pytest.mark.parametrize(("lines", "version", "keeps"), [
    ([], "1.1", True), (["Connection: keep-alive"], "1.1", True), (["Connection: close"], "1.1", False),
    (["Connection: Upgrade, CLOSE"], "1.1", False), ([], "1.0", False), (["Connection: Keep-Alive"], "1.0", True),
    (["Connection: keep-alive, close"], "1.0", False),
])  # fmt: skip
def test_a_connection_is_kept_when_its_server_keeps_it(lines: list[str], version: str, keeps: bool) -> None:
    assert head("Content-Length: 1", *lines, status=f"HTTP/{version} 200 OK").keeps_alive == keeps


def test_a_body_that_ends_with_its_connection_does_not_keep_it() -> None:
    assert not head().keeps_alive
    assert head("Transfer-Encoding: chunked").keeps_alive


@BRIEFLY
@given(noise=st.binary(max_size=60), at=st.integers(0, 80), cut=st.integers(0, 20))
def test_a_spoiled_head_is_read_or_refused_and_never_anything_else(noise: bytes, at: int, cut: int) -> None:
    good = b'HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nETag: "x"\r\nContent-Range: bytes 0-9/10\r\n\r\n'
    try:
        found = parse_head(good[:at] + noise + good[at + cut :])
    except ProtocolError:
        return
    assert 100 <= found.status < 600
    assert found.length is None or found.length >= 0
    assert not (found.is_chunked and found.length is not None)
