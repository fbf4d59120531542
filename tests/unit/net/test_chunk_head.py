"""Heads of requests: what is understood, and what is refused because two readers could understand it differently."""

import pytest

from bdn.net.chunk_server.messages import HEAD_LIMIT, HEADERS_LIMIT, RequestRefusedError, find_head, parse_head

LINE = b"GET /x HTTP/1.1\r\n"


def head(*lines: bytes, first: bytes = LINE) -> bytes:
    return first + b"".join(line + b"\r\n" for line in (b"Host: x", *lines)) + b"\r\n"


def test_a_head_is_its_method_target_and_headers() -> None:
    found = parse_head(head(b"Range:bytes=0-1", b"accept:  */* \t", b"X-Empty:"))
    assert (found.method, found.target) == ("GET", "/x")
    assert found.headers == {"host": "x", "range": "bytes=0-1", "accept": "*/*", "x-empty": ""}


def test_headers_of_one_name_are_joined() -> None:
    """So a second one makes a Range or a token malformed, and neither the first nor the second wins."""
    found = parse_head(
        head(b"Range: bytes=0-1", b"range: bytes=2-3", b"Authorization: Bearer a", b"Authorization: Bearer b")
    )
    assert found.headers["range"] == "bytes=0-1, bytes=2-3"
    assert found.bearer == "a, Bearer b"


@pytest.mark.parametrize(("first", "lines", "keeps"), [
    (LINE, [], True),
    (LINE, [b"Connection: close"], False),
    (LINE, [b"Connection: x, CLOSE"], False),
    (LINE, [b"Content-Length: 0"], True),
    (LINE, [b"Content-Length: 1"], False),
    (LINE, [b"Content-Length: 0", b"Content-Length: 5"], False),
    (LINE, [b"Content-Length: nonsense"], False),
    (LINE, [b"Transfer-Encoding: identity"], False),
    (b"GET /x HTTP/1.0\r\n", [], False),
    (b"GET /x HTTP/1.0\r\n", [b"Connection: keep-alive"], True),
    (b"GET /x HTTP/1.0\r\n", [b"Connection: keep-alive, close"], False),
])  # fmt: skip
def test_a_connection_is_kept_unless_somebody_ends_it_or_a_body_follows(
    first: bytes, lines: list[bytes], keeps: bool
) -> None:
    assert parse_head(head(*lines, first=first)).keeps_alive is keeps


@pytest.mark.parametrize("content", [
    head(b"A : b"), head(b" folded"), head(b"\tfolded"), head(b": b"), head(b"no colon"), head(b"A: \x00"), head(b"A: b\rC: d"),
    head(b"A: b\nC: d"), head(b"A(b): c"), head(b"Host: y"), LINE + b"\r\n", LINE[:-2] + b"\nHost: x\n\r\n",
    head(first=b"GET  /x HTTP/1.1\r\n"), head(first=b"GET /x  HTTP/1.1\r\n"), head(first=b"GET /x HTTP/1.1 \r\n"),
    head(first=b"GET /\xe4 HTTP/1.1\r\n"), head(first=b"GET /a b HTTP/1.1\r\n"), head(first=b"GET /x\r\n"),
    head(first=b"GE(T /x HTTP/1.1\r\n"), head(first=b"GET /x http/1.1\r\n"), head(first=b"GET /x HTTP/11\r\n"), b"\r\n\r\n",
])  # fmt: skip
def test_what_is_ambiguous_or_malformed_is_refused(content: bytes) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        parse_head(content)
    assert caught.value.status == 400


@pytest.mark.parametrize("version", [b"2.0", b"0.9", b"1.2", b"9.9"])
def test_other_versions_are_named_as_the_reason(version: bytes) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        parse_head(head(first=b"GET /x HTTP/" + version + b"\r\n"))
    assert caught.value.status == 505


def test_the_number_of_headers_is_limited() -> None:
    assert len(parse_head(head(*[b"A%d: b" % n for n in range(HEADERS_LIMIT - 1)])).headers) == HEADERS_LIMIT
    with pytest.raises(RequestRefusedError) as caught:
        parse_head(head(*[b"A: b"] * HEADERS_LIMIT))
    assert caught.value.status == 431


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_head_is_found_in_whatever_pieces_it_comes(step: int) -> None:
    whole, received, searched = head(b"A: b"), bytearray(), 0
    for start in range(0, len(whole), step):
        received += whole[start : start + step]
        found = find_head(received, searched)
        searched = len(received)
        assert found == (len(whole) if searched == len(whole) else -1)


def test_the_size_of_a_head_is_limited() -> None:
    assert find_head(bytearray(b"A" * HEAD_LIMIT), 0) == -1
    for content in (b"A" * (HEAD_LIMIT + 1), b"A" * (HEAD_LIMIT + 1) + b"\r\n\r\n"):
        with pytest.raises(RequestRefusedError) as caught:
            find_head(bytearray(content), 0)
        assert caught.value.status == 431
