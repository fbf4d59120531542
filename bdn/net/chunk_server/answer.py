"""What the data plane answers, decided without any I/O: status, headers, and which part of the chunk goes out.

Conditions are evaluated in the order of RFC 9110, section 13.2.2. A chunk's name is its strong validator.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.net.chunk_server.head import RequestHead
from bdn.wire.errors import document_of, status_of
from bdn.wire.paths import MEDIA_CHUNK, MEDIA_JSON
from bdn.wire.ranges import UnsatisfiableRangeError, format_content_range, parse_range

_ENTITY_TAGS: Final = re.compile(r'(W/)?("[^"]*+")')


@dataclass(frozen=True, slots=True)
class Answer:
    """``opening`` goes out first; then ``size`` bytes of the chunk from ``start`` on; then the connection ends if ``is_last``."""

    opening: bytes
    is_last: bool
    start: int = 0
    size: int = 0


def answer_chunk(head: RequestHead, digest: Digest, size: int) -> Answer:
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
    return answer if head.method == "HEAD" else Answer(answer.opening, answer.is_last, start, length)


def answer_document(head: RequestHead, size: int) -> Answer:
    """The answer to a GET or HEAD of a manifest or a layout of ``size`` bytes: always the whole."""
    answer = _answer(head, 200, {"Content-Type": MEDIA_JSON, "Content-Length": str(size)})
    return Answer(answer.opening, answer.is_last, 0, 0 if head.method == "HEAD" else size)


def answer_error(head: RequestHead, error: BdnError) -> Answer:
    """The error document, after which the connection can go on."""
    return _answer(head, status_of(error), {"Content-Type": MEDIA_JSON}, json.dumps(document_of(error)).encode())


def answer_refusal(status: int, error: BdnError) -> Answer:
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


def _answer(head: RequestHead, status: int, headers: dict[str, str], content: bytes = b"") -> Answer:
    if content:
        headers["Content-Length"] = str(len(content))
    if not head.keeps_alive:
        headers["Connection"] = "close"
    elif head.is_http_1_0:
        headers["Connection"] = "keep-alive"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    opening = f"{_status_line(status)}Server: bdn\r\nDate: {_date(int(time.time()))}\r\n{lines}\r\n".encode()
    return Answer(opening + content if head.method != "HEAD" else opening, is_last=not head.keeps_alive)


@lru_cache(maxsize=64)
def _status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"


@lru_cache(maxsize=1)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)
