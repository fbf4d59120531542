"""The head of an HTTP/1.1 answer: parsed strictly, because who misjudges where a body ends takes one file for another.

Line ends are CRLF, lines are not folded, names are tokens, and a body has one length: whatever is ambiguous is refused
(RFC 9112, sections 2.2, 5 and 6.3). A head is checked by one regular expression and split at its lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

HEAD_LIMIT: Final = 64 * 1024  # bytes, status line included
HEADERS_LIMIT: Final = 200

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\x00-\x08\x0a-\x1f\x7f]*+)?\r\n")
_HEADER_LINES: Final = re.compile(rb"(?:%s:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+" % _TOKEN)
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_BODILESS: Final = frozenset({204, 304})


class ProtocolError(Exception):
    """What came is not an answer in HTTP/1.1. The message repeats nothing of it."""


class Headers:
    """Header fields by name, in any case. Fields of one name are joined by commas (RFC 9110, section 5.3)."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, str]) -> None:
        self._fields = fields  # names in lower case

    def get(self, name: str, /) -> str | None:
        """The header's value, or None."""
        return self._fields.get(name.lower())


@dataclass(frozen=True, slots=True)
class Head:
    """``length`` is that of the body; None where the end of the body shows in itself, or in the connection's end."""

    status: int
    headers: Headers
    length: int | None
    is_chunked: bool
    keeps_alive: bool


def parse_head(content: bytes) -> Head:
    """The head in ``content``, which ends with its empty line.

    Raises:
        ProtocolError: it is not one, or says two things about its body.
    """
    found = _STATUS_LINE.match(content)
    if found is None:
        raise ProtocolError("the answer is not HTTP/1.1")
    start, stop = found.end(), len(content) - 2
    if _HEADER_LINES.fullmatch(content, start, stop) is None:
        raise ProtocolError("the answer has a malformed header")
    lines = content[start : stop - 2].decode("latin-1").split("\r\n") if stop > start else []
    if len(lines) > HEADERS_LIMIT:
        raise ProtocolError(f"the answer has more than {HEADERS_LIMIT} headers")
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name = name.lower()
        value = value.strip(" \t")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return _framed(int(found[2]), fields, is_old=found[1] == b"0")


def _framed(status: int, fields: dict[str, str], *, is_old: bool) -> Head:
    """Where the body ends: nowhere, after a length, with a last chunk, or with the connection (RFC 9112, section 6.3)."""
    stated, coding = fields.get("content-length"), fields.get("transfer-encoding")
    if coding is not None and (is_old or stated is not None or coding.lower() != "chunked"):
        raise ProtocolError("the answer has no single, known framing")
    if stated is not None and _LENGTH.fullmatch(stated) is None:
        raise ProtocolError("the answer has no single, known length")
    if status < 200 or status in _BODILESS:
        length: int | None = 0
    else:
        length = int(stated) if stated is not None else None
    is_chunked = coding is not None and length is None
    options = fields.get("connection")
    return Head(
        status,
        Headers(fields),
        length,
        is_chunked,
        _keeps_alive(options, is_old) and (length is not None or is_chunked),
    )


def _keeps_alive(options: str | None, is_old: bool) -> bool:
    if options is None:
        return not is_old
    said = {option.strip() for option in options.lower().split(",")}
    return "close" not in said and (not is_old or "keep-alive" in said)
