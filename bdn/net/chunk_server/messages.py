"""Requests and responses of the data plane, without I/O.

Heads are parsed strictly, because a server that misjudges the end of a request answers the wrong client: line ends are
CRLF, lines are not folded, names are tokens (RFC 9112, sections 2.2, 3 and 5). ``http.server`` would spend 200 us on a
request. Conditions are ignored: the bytes of a chunk's path never change.
"""

import json
import re
import time
from dataclasses import dataclass, replace
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError
from bdn.wire.http_fields import (
    MEDIA_CHUNK,
    MEDIA_JSON,
    TOKEN,
    HeadRefusedError,
    UnsatisfiableRangeError,
    bearer_of,
    format_content_range,
    keeps_alive,
    parse_headers,
    parse_range,
)
from bdn.wire.shapes import document_of, status_of

HEAD_LIMIT: Final = 64 * 1024  # bytes, request line included; fits a grant for hundreds of manifests
HEADERS_LIMIT: Final = 100
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_REQUEST_LINE: Final = re.compile(rb"(%s) ([!-~]++) HTTP/([0-9])\.([0-9])\r\n" % TOKEN)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """``headers`` are by lower-case name; repeated headers are joined by commas."""

    method: str
    target: str
    headers: dict[str, str]
    is_http_1_0: bool
    keeps_alive: bool

    @property
    def bearer(self) -> str | None:
        return bearer_of(self.headers.get("authorization"))


def find_head(received: bytearray, searched: int) -> int:
    """The end of the first head in ``received``; -1 when incomplete. ``searched`` bytes were searched before.

    Raises ``HeadRefusedError`` for a head over the limit.
    """
    end = received.find(b"\r\n\r\n", max(0, searched - 3))
    if end > HEAD_LIMIT or (end < 0 and len(received) > HEAD_LIMIT):
        raise HeadRefusedError(431, f"the head of a request is limited to {HEAD_LIMIT} bytes")
    return end + 4 if end >= 0 else -1


def parse_head(content: bytes) -> RequestHead:
    """Parse a head that ends with its empty line. Raises ``HeadRefusedError``."""
    line = _REQUEST_LINE.match(content)
    if line is None:
        raise HeadRefusedError(400, "the request line is malformed")
    if line[3] != b"1" or line[4] not in b"01":
        raise HeadRefusedError(505, "only HTTP/1.0 and HTTP/1.1 are supported")
    headers = parse_headers(content, line.end(), HEADERS_LIMIT, "the request")
    is_http_1_0 = line[4] == b"0"
    if "host" not in headers and not is_http_1_0:
        raise HeadRefusedError(400, "the request has no Host header")
    if " " in headers.get("host", ""):  # RFC 9112, section 3.2: two Host headers, joined by now, would be two requests
        raise HeadRefusedError(400, "the request has two Host headers, or one that is malformed")
    # A request with a body must be the last one, because the body is not read.
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    goes_on = not has_body and keeps_alive(headers, is_http_1_0=is_http_1_0)
    return RequestHead(line[1].decode(), line[2].decode(), headers, is_http_1_0, goes_on)


@dataclass(frozen=True, slots=True)
class Response:
    """``opening``, then ``size`` bytes of the chunk from ``start``; then the connection ends if ``is_last``."""

    opening: bytes
    is_last: bool
    start: int = 0
    size: int = 0


def answer_chunk(head: RequestHead, digest: Digest, size: int) -> Response:
    """The response to a GET or HEAD of a chunk of ``size`` bytes."""
    try:  # a HEAD's Range counts, too, as in nginx, although RFC 9110, section 14.2, defines it for GET only
        part = parse_range(head.headers.get("range"), size)
    except UnsatisfiableRangeError:
        return _answer(head, 416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
    start, length = (part.start, part.size) if part else (0, size)
    headers = {"Content-Type": MEDIA_CHUNK, "Content-Length": str(length), "Accept-Ranges": "bytes"}
    headers["ETag"] = f'"{digest}"'
    if part is not None:
        headers["Content-Range"] = format_content_range(part, size)
    answer = _answer(head, 200 if part is None else 206, headers)
    return answer if head.method == "HEAD" else Response(answer.opening, answer.is_last, start, length)


def answer_taken(head: RequestHead) -> Response:
    """The response to a PUT whose chunk was stored."""
    return _answer(head, 204, {})


def after_body(head: RequestHead) -> RequestHead:
    """The head of a request whose body was read: the connection can carry another request."""
    return replace(head, keeps_alive=keeps_alive(head.headers, is_http_1_0=head.is_http_1_0))


def body_size(head: RequestHead, limit: int) -> int:
    """The size of the body that follows. Raises ``HeadRefusedError`` for an unknown, zero or excessive size."""
    if "transfer-encoding" in head.headers:  # RFC 9112, section 6.1
        raise HeadRefusedError(501, "send the chunk unencoded, with its Content-Length")
    stated = head.headers.get("content-length")
    if stated is None:
        raise HeadRefusedError(411, "a chunk needs a Content-Length")
    if not _LENGTH.fullmatch(stated):  # a repeated header is joined to the first, and must not win
        raise HeadRefusedError(400, "the Content-Length is malformed")
    if not 0 < int(stated) <= limit:
        raise HeadRefusedError(413 if int(stated) else 400, f"a chunk has 1 to {limit} bytes")
    return int(stated)


def awaits_continue(head: RequestHead) -> bool:
    """Whether the client may withhold its body until a 100 (RFC 9110, section 10.1.1)."""
    return head.headers.get("expect", "").lower() == "100-continue" and not head.is_http_1_0


def answer_error(head: RequestHead | None, error: BdnError, status: int = 0) -> Response:
    """The error document. Without a ``head``, which was malformed, it is the last response of its connection."""
    content = json.dumps(document_of(error)).encode()
    known = head or RequestHead("", "", {}, is_http_1_0=False, keeps_alive=False)
    return _answer(known, status or status_of(error), {"Content-Type": MEDIA_JSON}, content)


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
