"""Bounds of JSON, checked before parsing: depth, number of elements, and valid Unicode.

A parser allocates 64 bytes or more for the two bytes ``[]``, so a document's length does not bound its memory. This
module scans bytes in C, in windows, and creates no object per element.
"""

import json
import re
from typing import Any, Final

from bdn.core.errors import InvalidRequestError, LimitExceededError

DEEPEST: Final = 128  # levels; JSON parsers recurse at each
BYTES_PER_ELEMENT: Final = (
    16  # the minimum in documents with more than ``FEW_ELEMENTS``; a commit of many small files has 20
)
FEW_ELEMENTS: Final = 1000
_WINDOW: Final = 64 * 1024
_STRUCTURE: Final = b'"[]{},'
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")  # the parser checks that brackets match in kind
_REST: Final = bytes(set(range(256)) - set(_STRUCTURE))
# Characters. Python's own limit of 4,300 digits raises an error that references the body until a garbage collection.
_LONGEST_NUMBER: Final = 1000
_LONG_NUMBER: Final = re.compile(rb"(?:^|[\[,:\s])[0-9.eE+-]{%d}" % (_LONGEST_NUMBER + 1))
# A lone surrogate, as an escape (RFC 8259, section 7) or as bytes that are invalid in UTF-8.
_HALF: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
    rb"|\xed[\xa0-\xbf]"
)


class ElementCount:
    """Counts the elements of JSON piece by piece, and stores the brackets for ``check_depth``.

    Raises ``LimitExceededError`` above ``limit``.
    """

    def __init__(self, what: str, limit: int) -> None:
        self.count = 0
        self._what = what
        self._limit = limit
        self._is_inside = False  # inside a string
        self._has_escape = False  # the last piece ended in a backslash
        self._brackets = bytearray()

    def add(self, content: bytes) -> None:
        if self._has_escape:
            content = content[1:]
        content = content.replace(b"\\\\", b"")
        self._has_escape = content.endswith(b"\\")
        content = content.replace(b'\\"', b"").translate(None, _REST)
        for start in range(0, len(content), _WINDOW):
            parts = content[start : start + _WINDOW].split(b'"')
            structure = b"".join(parts[self._is_inside :: 2])
            self._is_inside ^= len(parts) % 2 == 0
            self.count += structure.count(b",") + structure.count(b"[") + structure.count(b"{")
            if self.count > self._limit:
                raise LimitExceededError(f"elements of {self._what}", self.count, self._limit)
            self._brackets += structure.translate(None, b",")

    def check_depth(self) -> None:
        """Raise ``InvalidRequestError`` for JSON nested too deep, or with unbalanced brackets."""
        left = self._brackets.translate(_SQUARE)
        for _ in range(DEEPEST):
            if not left:
                return
            left = left.replace(b"[]", b"")  # removes one level
        if left:
            raise InvalidRequestError(f"{self._what}: JSON nested deeper than {DEEPEST} levels, or unbalanced brackets")


def check_json(body: bytes, most_elements: int, what: str = "the body") -> None:
    """Refuse JSON that is too expensive to parse, or whose text no reply, file or database can represent.

    Raises:
        LimitExceededError: too many elements.
        InvalidRequestError: nested too deep, a lone surrogate, a number that is too long, or not UTF-8.
    """
    if b"\0" in body:
        raise InvalidRequestError(f"{what}: a NUL byte; JSON is UTF-8 (RFC 8259, section 8.1) and escapes it")
    if _LONG_NUMBER.search(body):
        raise InvalidRequestError(f"{what}: a number of more than {_LONGEST_NUMBER} characters")
    elements = ElementCount(what, most_elements)
    elements.add(body)
    elements.check_depth()
    if b"\\u" not in body and b"\xed" not in body:
        return
    if _HALF.search(body.replace(b"\\\\", b"  ")):
        try:
            place = _place_of_half(json.loads(body))
        except (ValueError, RecursionError):
            return  # not JSON: the route's parser reports it
        if place is not None:
            named = ".".join(str(part)[:100] for part in place)
            raise InvalidRequestError(f"{named or what}: invalid Unicode: lone surrogate")


def _place_of_half(value: Any) -> tuple[str | int, ...] | None:  # noqa: ANN401 - any JSON
    """The place of a lone surrogate in a document, such as ``("weights", 0, "source")``, or None."""
    match value:
        case str():
            return () if any("\ud800" <= sign <= "\udfff" for sign in value) else None
        case list():
            for index, one in enumerate(value):
                if (found := _place_of_half(one)) is not None:
                    return (index, *found)
        case dict():
            for name, one in value.items():
                if _place_of_half(name) is not None:
                    return ()
                if (found := _place_of_half(one)) is not None:
                    return (name, *found)
        case _:
            pass
    return None
