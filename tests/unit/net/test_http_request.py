"""Requests say exactly what was asked for, and nothing that stands in an address or a header can say more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.net.http1.connection import Origin, UnsendableError, format_get, split_address
from tests.support.network.hypothesis import BRIEFLY

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
    assert "host" not in str(raised.value).replace("has no host", "").replace("valid host", "")


def test_a_request_names_its_host_and_accepts_no_encoding() -> None:
    assert format_get(HOST, "/x?y", {}) == b"GET /x?y HTTP/1.1\r\nHost: host\r\nAccept-Encoding: identity\r\n\r\n"


@pytest.mark.parametrize(("origin", "name"), [
    (("http", "host", 80), b"host"),
    (("http", "host", 443), b"host:443"),
    (("https", "host", 443), b"host"),
    (("https", "::1", 8461), b"[::1]:8461"),
])  # fmt: skip
def test_a_host_is_named_with_its_port_unless_that_is_the_schemes_own(origin: Origin, name: bytes) -> None:
    assert b"\r\nHost: " + name + b"\r\n" in format_get(origin, "/", {})


@pytest.mark.parametrize("name", ["Host", "host", "Accept-Encoding", "ACCEPT-ENCODING"])
def test_what_the_caller_says_itself_is_not_said_twice(name: str) -> None:
    sent = format_get(HOST, "/", {"X": "y", name: "gzip"}).decode().lower()
    assert sent.count(f"\r\n{name.lower()}: ") == 1
    assert f"{name.lower()}: gzip\r\n" in sent


def test_a_header_that_only_speaks_of_a_host_does_not_replace_it() -> None:
    sent = format_get(HOST, "/", {"X-Forwarded-Host": "host: other", "X": "accept-encoding: x"})
    assert sent.startswith(b"GET / HTTP/1.1\r\nHost: host\r\nAccept-Encoding: identity\r\n")


@pytest.mark.parametrize(("name", "value"), [
    ("X", "a\r\nY: b"), ("X", "a\n"), ("X", "a\r"), ("X", "\x00"), ("X", "\x7f"), ("X", "\u2026"), ("X: y\r\nZ", "a"),
    ("", "a"), ("X Y", "a"), ("X:", "a"), ("\xfc", "a"), ("X\n", "a"),
])  # fmt: skip
def test_a_header_that_would_break_out_of_its_line_is_refused_without_repeating_it(name: str, value: str) -> None:
    with pytest.raises(UnsendableError, match=r"^a header cannot be sent$"):
        format_get(HOST, "/", {"Good": "x", name: value})


def test_a_header_may_hold_every_byte_that_is_allowed() -> None:
    assert b"\r\nX: a\tb \xfc~\r\n" in format_get(HOST, "/", {"X": "a\tb \xfc~"})


@BRIEFLY
@given(headers=st.dictionaries(st.text(max_size=8), st.text(max_size=12), max_size=4))
def test_a_request_has_as_many_lines_as_headers_whatever_they_hold(headers: dict[str, str]) -> None:
    try:
        sent = format_get(HOST, "/", headers)
    except UnsendableError:
        return
    said = {name.lower() for name in headers}
    lines = sent.split(b"\r\n")
    assert len(lines) == 3 + len(headers) + ("host" not in said) + ("accept-encoding" not in said)
    assert lines[-2:] == [b"", b""]
