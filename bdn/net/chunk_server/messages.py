"""Requests to the data plane and its answers, without any I/O.

Heads are parsed strictly, because who misjudges where a request ends answers the wrong client: line ends are CRLF, lines are not
folded, names are tokens (RFC 9112, sections 2.2, 3 and 5). ``http.server`` would spend 200 us on a request. Conditions are
evaluated in the order of RFC 9110, section 13.2.2; a chunk's name is its strong validator.
"""

import json
import re
import time
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError
from bdn.wire.http_fields import MEDIA_CHUNK, MEDIA_JSON, UnsatisfiableRangeError, format_content_range, parse_range
from bdn.wire.shapes import document_of, status_of

_ENTITY_TAGS: Final = re.compile(r'(W/)?("[^"]*+")')


HEAD_LIMIT: Final = 64 * 1024  # bytes, request line included; a grant that names hundreds of manifests fits
HEADERS_LIMIT: Final = 100

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_REQUEST_LINE: Final = re.compile(rb"(%s) ([!-~]++) HTTP/([0-9])\.([0-9])\r\n" % _TOKEN)
_HEADER_LINES: Final = re.compile(rb"(?:%s:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+" % _TOKEN)


class RequestRefusedError(Exception):
    """What came cannot be answered, nor can anything after it on this connection. ``status`` is HTTP's."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """``headers`` are by name in lower case; those of one name are joined by commas (RFC 9110, section 5.3).

    So a second ``Range``, ``Authorization`` or ``BDN-Manifest`` makes the header malformed, and never wins or loses silently.
    """

    method: str
    target: str
    headers: dict[str, str]
    is_http_1_0: bool
    keeps_alive: bool

    @property
    def bearer(self) -> str | None:
        """The token of an ``Authorization: Bearer`` header."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else None


def find_head(received: bytearray, searched: int) -> int:
    """Where the first head in ``received`` ends; -1 when it is not complete. ``searched`` bytes were looked at before.

    Raises:
        RequestRefusedError: it is longer than a head may be.
    """
    end = received.find(b"\r\n\r\n", max(0, searched - 3))
    if end > HEAD_LIMIT or (end < 0 and len(received) > HEAD_LIMIT):
        raise RequestRefusedError(431, f"the head of a request is limited to {HEAD_LIMIT} bytes")
    return end + 4 if end >= 0 else -1


def parse_head(content: bytes) -> RequestHead:
    """The head in ``content``, which ends with its empty line.

    Raises:
        RequestRefusedError: it is malformed, or of another version of HTTP than 1.0 and 1.1.
    """
    line = _REQUEST_LINE.match(content)
    if line is None:
        raise RequestRefusedError(400, "the request line is malformed")
    if line[3] != b"1" or line[4] not in b"01":
        raise RequestRefusedError(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    headers = _headers(content, line.end())
    is_http_1_0 = line[4] == b"0"
    if not is_http_1_0 and "host" not in headers:
        raise RequestRefusedError(400, "the request has no Host header")
    return RequestHead(line[1].decode(), line[2].decode(), headers, is_http_1_0, _keeps_alive(headers, is_http_1_0))


def _headers(content: bytes, start: int) -> dict[str, str]:
    stop = len(content) - 2
    if _HEADER_LINES.fullmatch(content, start, stop) is None:
        raise RequestRefusedError(400, "a header of the request is malformed")
    lines = content[start:stop].decode("latin-1").split("\r\n")
    if len(lines) > HEADERS_LIMIT + 1:
        raise RequestRefusedError(431, f"a request is limited to {HEADERS_LIMIT} headers")
    headers: dict[str, str] = {}
    for line in lines[:-1]:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if name in headers:
            if name == "host":  # RFC 9112, section 3.2: two hosts are two requests
                raise RequestRefusedError(400, "the request has two Host headers")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


def _keeps_alive(headers: dict[str, str], is_http_1_0: bool) -> bool:
    """Whether another request may follow. After one with a body none may: nobody reads the body."""
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        return False
    options = [option.strip() for option in headers.get("connection", "").lower().split(",")]
    return "close" not in options and (not is_http_1_0 or "keep-alive" in options)


@dataclass(frozen=True, slots=True)
class Response:
    """``opening`` goes out first; then ``size`` bytes of the chunk from ``start`` on; then the connection ends if ``is_last``."""

    opening: bytes
    is_last: bool
    start: int = 0
    size: int = 0


def answer_chunk(head: RequestHead, digest: Digest, size: int) -> Response:
    """The answer to a GET or HEAD of a chunk of ``size`` bytes."""
    tag = f'"{digest}"'
    wanted = head.headers
    if "if-match" in wanted and not _names(wanted["if-match"], tag, weakly=False):
        return _answer(head, 412, {"ETag": tag, "Content-Length": "0"})
    if "if-none-match" in wanted and _names(wanted["if-none-match"], tag, weakly=True):
        return _answer(head, 304, {"ETag": tag})
    try:
        part = parse_range(_range_of(head, tag), size)
    except UnsatisfiableRangeError:
        return _answer(head, 416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
    start, length = (part.start, part.size) if part else (0, size)
    headers = {"Content-Type": MEDIA_CHUNK, "Content-Length": str(length), "Accept-Ranges": "bytes", "ETag": tag}
    if part is not None:
        headers["Content-Range"] = format_content_range(part, size)
    answer = _answer(head, 200 if part is None else 206, headers)
    return answer if head.method == "HEAD" else Response(answer.opening, answer.is_last, start, length)


def answer_document(head: RequestHead, size: int) -> Response:
    """The answer to a GET or HEAD of a manifest or a layout of ``size`` bytes: always the whole."""
    answer = _answer(head, 200, {"Content-Type": MEDIA_JSON, "Content-Length": str(size)})
    return Response(answer.opening, answer.is_last, 0, 0 if head.method == "HEAD" else size)


def answer_error(head: RequestHead, error: BdnError) -> Response:
    """The error document, after which the connection can go on."""
    return _answer(head, status_of(error), {"Content-Type": MEDIA_JSON}, json.dumps(document_of(error)).encode())


def answer_refusal(status: int, error: BdnError) -> Response:
    """The error document for a request that was not understood: the last answer on its connection."""
    head = RequestHead("", "", {}, is_http_1_0=False, keeps_alive=False)
    return _answer(head, status, {"Content-Type": MEDIA_JSON}, json.dumps(document_of(error)).encode())


def _range_of(head: RequestHead, tag: str) -> str | None:
    """The ``Range`` that counts: none when the client has a part of something else.

    A HEAD's counts, too, as docs/contract.md says of chunks and nginx does, though RFC 9110, section 14.2, defines it for GET alone.
    """
    if head.headers.get("if-range", tag) != tag:
        return None
    return head.headers.get("range")


def _names(header: str, tag: str, *, weakly: bool) -> bool:
    """Whether a list of entity tags names this one. A weak tag is no reason to believe that bytes are the same."""
    if header.strip() == "*":
        return True
    return any(found == tag and (weakly or not weak) for weak, found in _ENTITY_TAGS.findall(header))


def _answer(head: RequestHead, status: int, headers: dict[str, str], content: bytes = b"") -> Response:
    if content:
        headers["Content-Length"] = str(len(content))
    if not head.keeps_alive:
        headers["Connection"] = "close"
    elif head.is_http_1_0:
        headers["Connection"] = "keep-alive"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    opening = f"{_status_line(status)}Server: bdn\r\nDate: {_date(int(time.time()))}\r\n{lines}\r\n".encode()
    return Response(opening + content if head.method != "HEAD" else opening, is_last=not head.keeps_alive)


@lru_cache(maxsize=64)
def _status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"


@lru_cache(maxsize=1)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)
