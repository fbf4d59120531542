"""HTTP byte ranges, both ways. HTTP's end is inclusive; ours is not. Source: RFC 9110, section 14."""

from __future__ import annotations

import re

from bdn.core.chunk import ByteRange

_ONE_RANGE = re.compile(r"bytes=\s*([0-9]{0,30})-([0-9]{0,30})\s*", re.IGNORECASE)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,30})-([0-9]{1,30})/([0-9]{1,30})")


class UnsatisfiableRangeError(ValueError):
    """The range asks for nothing that exists: status 416."""


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """The part of ``size`` bytes that a ``Range`` header asks for; None for the whole.

    Malformed headers, other units and several ranges are ignored, as the RFC allows.

    Raises:
        UnsatisfiableRangeError: it begins past the end, or is a suffix of zero bytes.
    """
    match = _ONE_RANGE.fullmatch(header or "")
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, stop = max(0, size - int(match[2])), size
    else:
        start = int(match[1])
        stop = min(size, int(match[2]) + 1) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= stop:
        raise UnsatisfiableRangeError(header)
    return ByteRange(start, stop)


def format_range(byte_range: ByteRange) -> str:
    """The ``Range`` header that asks for these bytes."""
    return f"bytes={byte_range.start}-{byte_range.stop - 1}"


def format_content_range(byte_range: ByteRange, size: int) -> str:
    """The ``Content-Range`` header of an answer with these bytes."""
    return f"bytes {byte_range.start}-{byte_range.stop - 1}/{size}"


def parse_content_range(header: str | None) -> tuple[ByteRange, int] | None:
    """The bytes that an answer says it holds and the total size; None for any other form, an unknown total included."""
    match = _CONTENT_RANGE.fullmatch(header or "")
    if match is None or not int(match[1]) <= int(match[2]) < int(match[3]):
        return None
    return ByteRange(int(match[1]), int(match[2]) + 1), int(match[3])
