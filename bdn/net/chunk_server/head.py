"""The head of a request to the data plane, parsed strictly: who misjudges where a request ends answers the wrong client.

Line ends are CRLF, lines are not folded, names are tokens (RFC 9112, sections 2.2, 3 and 5). Our own code, because
``http.server`` spends 200 us on a request, most of it in the parser of e-mails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

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
