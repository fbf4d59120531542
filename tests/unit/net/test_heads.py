"""Heads of requests and answers: what is sent says what was asked for and no more; of what comes, what is ambiguous is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.net.chunk_server.messages import HEAD_LIMIT, find_head
from bdn.net.chunk_server.messages import HEADERS_LIMIT as REQUEST_HEADERS_LIMIT
from bdn.net.chunk_server.messages import parse_head as parse_request
from bdn.net.http1.answer import HEADERS_LIMIT, AnswerHead, parse_head
from bdn.net.http1.connection import Origin, ProtocolError, UnsendableError, format_request, split_address
from bdn.wire.http_fields import HeadRefusedError, keeps_alive, parse_headers
from tests.support.network.hypothesis import BRIEFLY

LINE = b"GET /x HTTP/1.1\r\n"


def headers_of(*lines: str) -> dict[str, str]:
    return parse_headers("\r\n".join((*lines, "", "")).encode("latin-1"), 0, 4, "it")


def request(*lines: bytes, first: bytes = LINE) -> bytes:
    return first + b"".join(line + b"\r\n" for line in (b"Host: x", *lines)) + b"\r\n"


def answer(*lines: str, status: str = "HTTP/1.1 200 OK") -> AnswerHead:
    return parse_head("\r\n".join((status, *lines, "", "")).encode("latin-1"))


# --- what both have ---


def test_headers_are_found_in_lower_case_without_their_white_space() -> None:
    assert headers_of() == {}
    assert headers_of('ETag: \t"v" \t', "x-empty:", "X-Latin:\xfc") == {"etag": '"v"', "x-empty": "", "x-latin": "\xfc"}


def test_headers_of_one_name_are_joined() -> None:
    """So a second one makes a Range or a token malformed, and neither the first nor the second wins."""
    assert headers_of("Range: bytes=0-1", "A: x", "range: bytes=2-3") == {"range": "bytes=0-1, bytes=2-3", "a": "x"}


@pytest.mark.parametrize("line", [
    "no colon", ": no name", "a name: x", "name : x", " folded: x", "\tfolded", "x: a\rb", "x: a\nb", "x: a\x00b",
    "x: a\x7fb", "\xfc: x", "x\r\n y: z", "(x): y",
])  # fmt: skip
def test_a_malformed_line_spoils_the_head(line: str) -> None:
    with pytest.raises(HeadRefusedError, match="it has a malformed header") as caught:
        headers_of("ETag: x", line, "Content-Length: 1")
    assert caught.value.status == 400


def test_no_more_headers_are_read_than_the_limit() -> None:
    assert headers_of(*["x: y"] * 4) == {"x": "y, y, y, y"}
    with pytest.raises(HeadRefusedError, match="it has more than 4 headers") as caught:
        headers_of(*["x: y"] * 5)
    assert caught.value.status == 431


@pytest.mark.parametrize(("options", "is_http_1_0", "keeps"), [
    (None, False, True), ("keep-alive", False, True), ("close", False, False), ("Upgrade, CLOSE", False, False),
    (None, True, False), ("Keep-Alive", True, True), ("keep-alive, close", True, False),
])  # fmt: skip
def test_a_connection_is_kept_unless_somebody_ends_it(options: str | None, is_http_1_0: bool, keeps: bool) -> None:
    headers = {} if options is None else {"connection": options}
    assert keeps_alive(headers, is_http_1_0=is_http_1_0) is keeps


# --- requests ---


def test_a_request_is_its_method_target_and_headers() -> None:
    found = parse_request(request(b"Range:bytes=0-1", b"Authorization: Bearer a", b"Authorization: Bearer b"))
    assert (found.method, found.target, found.is_http_1_0) == ("GET", "/x", False)
    assert found.headers == {"host": "x", "range": "bytes=0-1", "authorization": "Bearer a, Bearer b"}
    assert found.bearer == "a, Bearer b"


@pytest.mark.parametrize(("version", "line", "keeps"), [
    (b"1.1", b"X: y", True), (b"1.1", b"Connection: close", False), (b"1.0", b"X: y", False),
    (b"1.1", b"Content-Length: 0", True), (b"1.1", b"Content-Length: 1", False),
    (b"1.1", b"Content-Length: 0\r\nContent-Length: 5", False), (b"1.1", b"Content-Length: nonsense", False),
    (b"1.1", b"Transfer-Encoding: identity", False),
])  # fmt: skip
def test_no_request_is_read_behind_a_body(version: bytes, line: bytes, keeps: bool) -> None:
    assert parse_request(request(line, first=b"GET /x HTTP/%s\r\n" % version)).keeps_alive is keeps


@pytest.mark.parametrize(("content", "status"), [
    *((content, 400) for content in (
        request(b"A : b"), request(b"Host: y"), LINE + b"\r\n", LINE[:-2] + b"\nHost: x\n\r\n", b"\r\n\r\n",
    )),
    *((request(first=line + b"\r\n"), 400) for line in (
        b"GET  /x HTTP/1.1", b"GET /x  HTTP/1.1", b"GET /x HTTP/1.1 ", b"GET /\xe4 HTTP/1.1", b"GET /a b HTTP/1.1",
        b"GET /x", b"GE(T /x HTTP/1.1", b"GET /x http/1.1", b"GET /x HTTP/11",
    )),
    *((request(first=b"GET /x HTTP/%s\r\n" % version), 505) for version in (b"2.0", b"0.9", b"1.2", b"9.9")),
    (request(*[b"A: b"] * REQUEST_HEADERS_LIMIT), 431),
])  # fmt: skip
def test_a_request_that_is_ambiguous_malformed_or_of_another_version_is_refused(content: bytes, status: int) -> None:
    with pytest.raises(HeadRefusedError) as caught:
        parse_request(content)
    assert caught.value.status == status


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_request_is_found_in_whatever_pieces_it_comes(step: int) -> None:
    whole, received, searched = request(b"A: b"), bytearray(), 0
    for start in range(0, len(whole), step):
        received += whole[start : start + step]
        found = find_head(received, searched)
        searched = len(received)
        assert found == (len(whole) if searched == len(whole) else -1)


def test_the_size_of_a_request_is_limited() -> None:
    assert find_head(bytearray(b"A" * HEAD_LIMIT), 0) == -1
    for content in (b"A" * (HEAD_LIMIT + 1), b"A" * (HEAD_LIMIT + 1) + b"\r\n\r\n"):
        with pytest.raises(HeadRefusedError) as caught:
            find_head(bytearray(content), 0)
        assert caught.value.status == 431


# --- answers ---


@pytest.mark.parametrize(
    "status", ["HTTP/1.1 206 Partial Content", "HTTP/1.1 206 ", "HTTP/1.1 206", "HTTP/1.0 206 \xfc"]
)
def test_a_status_is_read_whatever_its_phrase(status: str) -> None:
    found = answer("ETag: x", status=status)
    assert (found.status, found.headers.get("etag"), found.headers.get("absent")) == (206, "x", None)


@pytest.mark.parametrize("status", [
    "HTTP/2 200 OK", "HTTP/1.2 200 OK", "http/1.1 200 OK", "HTTP/1.1  200 OK", "HTTP/1.1 20 OK", "HTTP/1.1 2000 OK",
    "HTTP/1.1 600 OK", "HTTP/1.1 099 OK", "HTTP/1.1 2x0 OK", "HTTP/1.1 200\tOK", "HTTP/1.1 200 O\x00K", " HTTP/1.1 200 OK",
    "ICY 200 OK", "", "HTTP/1.1 200 OK\rX", "HTTP/1.1 200 OK\nX: y", "HTTP/1.1 \u0662\u0660\u0660".encode().decode("latin-1"),
])  # fmt: skip
def test_what_does_not_begin_like_an_answer_is_none(status: str) -> None:
    with pytest.raises(ProtocolError, match=r"not HTTP/1\.1"):
        answer(status=status)


@pytest.mark.parametrize("lines", [["x : y"], ["x: y"] * (HEADERS_LIMIT + 1)])
def test_an_answer_whose_headers_are_refused_is_none(lines: list[str]) -> None:
    with pytest.raises(ProtocolError, match=r"has (a malformed header|more than 200 headers)"):
        answer(*lines)


@pytest.mark.parametrize(("lines", "status", "length", "is_chunked"), [
    (["Content-Length: 10"], 200, 10, False), (["Content-Length: 0"], 206, 0, False),
    (["Content-Length: 010"], 200, 10, False), (["Transfer-Encoding: chunked"], 200, None, True),
    (["Transfer-Encoding: Chunked"], 206, None, True), ([], 200, None, False),
    (["Content-Length: 10"], 304, 0, False), ([], 204, 0, False), ([], 100, 0, False),
])  # fmt: skip
def test_a_body_has_one_end(lines: list[str], status: int, length: int | None, is_chunked: bool) -> None:
    found = answer(*lines, status=f"HTTP/1.1 {status} x")
    assert (found.length, found.is_chunked) == (length, is_chunked)
    assert found.keeps_alive is (length is not None or is_chunked), "it ends with its connection"


def test_a_connection_that_its_server_ends_is_not_kept() -> None:
    assert not answer("Content-Length: 1", "Connection: close").keeps_alive
    assert not answer("Content-Length: 1", status="HTTP/1.0 200 OK").keeps_alive


@pytest.mark.parametrize("lines", [
    ["Content-Length: 10", "Content-Length: 11"], ["Content-Length: 10", "Content-Length: 10"],
    ["Content-Length: 10, 10"], ["Content-Length: -1"], ["Content-Length: +1"], ["Content-Length: 1 0"],
    ["Content-Length: 0x10"], ["Content-Length: \xb2"], ["Content-Length:"],
    ["Transfer-Encoding: chunked", "Content-Length: 10"], ["Transfer-Encoding: gzip, chunked"],
    ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"], ["Transfer-Encoding: identity"],
    ["Transfer-Encoding: xchunked"], ["Transfer-Encoding:"],
])  # fmt: skip
def test_a_body_with_two_ends_or_an_unknown_one_is_refused(lines: list[str]) -> None:
    with pytest.raises(ProtocolError, match="no single, known"):
        answer(*lines)


def test_an_old_server_does_not_send_pieces() -> None:
    with pytest.raises(ProtocolError, match="framing"):
        answer("Transfer-Encoding: chunked", status="HTTP/1.0 200 OK")


# --- requests of ours ---


HOST: Origin = ("https", "host", 443)


@pytest.mark.parametrize(("address", "origin", "target"), [
    ("http://host", ("http", "host", 80), "/"),
    ("https://host/", ("https", "host", 443), "/"),
    ("HTTPS://HOST/A%2Fb?c=/d?e", ("https", "host", 443), "/A%2Fb?c=/d?e"),
    ("http://host:8461?x", ("http", "host", 8461), "/?x"),
    ("http://me:word@host/x", ("http", "host", 80), "/x"),
    ("http://[::1]:80/x#part", ("http", "::1", 80), "/x"),
    ("http://host/{a}|b\\c", ("http", "host", 80), "/{a}|b\\c"),
])  # fmt: skip
def test_an_address_is_where_to_connect_and_what_to_ask_for(address: str, origin: Origin, target: str) -> None:
    assert split_address(address) == (origin, target)


@pytest.mark.parametrize("address", [
    "", "host", "//host", "ftp://host/", "file:///etc/passwd", "http:/host", "javascript:x", " http://host/",
    "http://", "http:///x", "http://:80/", "http://host:port/", "http://host:99999/", "http://host:-1/", "http://[::1",
    "http://ho st/", "http://h\xf6st/", "http://host\r\n/", "http://host/a b", "http://host/\xfc", "http://host/a\r\nX: y",
    "http://host/\x00", "http://host/\x7f", "http://host?a b",
])  # fmt: skip
def test_what_is_no_address_is_refused_without_repeating_it(address: str) -> None:
    with pytest.raises(UnsendableError) as raised:
        split_address(address)
    assert "host" not in str(raised.value).replace("valid host", "")


def test_a_request_names_its_host_and_accepts_no_encoding() -> None:
    assert (
        format_request("GET", HOST, "/x?y", {})
        == b"GET /x?y HTTP/1.1\r\nHost: host\r\nAccept-Encoding: identity\r\n\r\n"
    )


@pytest.mark.parametrize(("origin", "name"), [
    (("http", "host", 80), b"host"),
    (("http", "host", 443), b"host:443"),
    (("https", "host", 443), b"host"),
    (("https", "::1", 8461), b"[::1]:8461"),
])  # fmt: skip
def test_a_host_is_named_with_its_port_unless_that_is_the_schemes_own(origin: Origin, name: bytes) -> None:
    assert b"\r\nHost: " + name + b"\r\n" in format_request("GET", origin, "/", {})


@pytest.mark.parametrize("name", ["Host", "host", "Accept-Encoding", "ACCEPT-ENCODING"])
def test_what_the_caller_says_itself_is_not_said_twice(name: str) -> None:
    sent = format_request("GET", HOST, "/", {"X": "y", name: "gzip"}).decode().lower()
    assert sent.count(f"\r\n{name.lower()}: ") == 1
    assert f"{name.lower()}: gzip\r\n" in sent


def test_a_header_that_only_speaks_of_a_host_does_not_replace_it() -> None:
    sent = format_request("GET", HOST, "/", {"X-Forwarded-Host": "host: other", "X": "accept-encoding: x"})
    assert sent.startswith(b"GET / HTTP/1.1\r\nHost: host\r\nAccept-Encoding: identity\r\n")


@pytest.mark.parametrize(("name", "value"), [
    ("X", "a\r\nY: b"), ("X", "a\n"), ("X", "a\r"), ("X", "\x00"), ("X", "\x7f"), ("X", "\u2026"), ("X: y\r\nZ", "a"),
    ("", "a"), ("X Y", "a"), ("X:", "a"), ("\xfc", "a"), ("X\n", "a"),
])  # fmt: skip
def test_a_header_that_would_break_out_of_its_line_is_refused_without_repeating_it(name: str, value: str) -> None:
    with pytest.raises(UnsendableError, match=r"^a header cannot be sent$"):
        format_request("GET", HOST, "/", {"Good": "x", name: value})


def test_a_header_may_hold_every_byte_that_is_allowed() -> None:
    assert b"\r\nX: a\tb \xfc~\r\n" in format_request("GET", HOST, "/", {"X": "a\tb \xfc~"})


@BRIEFLY
@given(headers=st.dictionaries(st.text(max_size=8), st.text(max_size=12), max_size=4))
def test_a_request_has_as_many_lines_as_headers_whatever_they_hold(headers: dict[str, str]) -> None:
    try:
        sent = format_request("GET", HOST, "/", headers)
    except UnsendableError:
        return
    said = {name.lower() for name in headers}
    lines = sent.split(b"\r\n")
    assert len(lines) == 3 + len(headers) + ("host" not in said) + ("accept-encoding" not in said)
    assert lines[-2:] == [b"", b""]
