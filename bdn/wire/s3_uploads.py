"""The documents of S3's uploads, as its clients send and read them, and the coding ``aws-chunked`` of bodies."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from bdn.core.chunk import Digest
from bdn.core.errors import InvalidRequestError

_NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
_NUMBER: Final = re.compile(r"[0-9]{1,5}")
_MOST_NUMBER: Final = 10_000  # of a part
_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,8})(?:;[^\r\n]*)?")
_LONGEST_LINE: Final = 1024
# S3's own rule, which also bounds the work per byte: InvalidChunkSizeError for a smaller chunk before the last.
_LEAST_BYTES: Final = 8 * 1024
_MOST_TRAILERS: Final = 16


def part_number(text: str | None) -> int:
    """From 1 to 10,000, as S3 has it. Raises ``InvalidRequestError`` otherwise."""
    if text is None or not _NUMBER.fullmatch(text) or not 1 <= int(text) <= _MOST_NUMBER:
        raise InvalidRequestError(f"partNumber is a number from 1 to {_MOST_NUMBER}")
    return int(text)


def part_digests(document: bytes) -> list[Digest]:
    """The ETags of a ``CompleteMultipartUpload``, in the order of the object. Raises ``InvalidRequestError``."""
    try:
        # expat itself refuses entity bombs.
        root = ET.fromstring(document)  # noqa: S314
    except (ET.ParseError, ValueError):
        raise InvalidRequestError("the body is not XML") from None
    numbers: list[int] = []
    digests: list[Digest] = []
    for part in root:
        found = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in part}
        numbers.append(part_number(found.get("PartNumber")))
        try:
            digests.append(Digest.parse(found.get("ETag", "").strip('"')))
        except ValueError:
            raise InvalidRequestError(f"part {numbers[-1]} has an ETag that no part was answered with") from None
    if not numbers or numbers != sorted(set(numbers)):
        raise InvalidRequestError("the parts are to be listed once each, in ascending order of their numbers")
    return digests


def answer(name: str, **fields: str) -> bytes:
    return _document(f'{name} xmlns="{_NAMESPACE}"', name, fields)


def error(code: str, message: str) -> bytes:
    return _document("Error", "Error", {"Code": code, "Message": message})


def _document(begin: str, end: str, fields: Mapping[str, str]) -> bytes:
    inside = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{begin}>{inside}</{end}>'.encode()


@dataclass(slots=True)
class AwsChunked:
    """Decodes a body in ``aws-chunked``: chunks with their sizes, then trailers by lower-case name.

    Signatures of chunks are not checked. Source: "Signature calculations for the authorization header: transferring
    payload in multiple chunks", Amazon S3 API reference.
    """

    trailers: dict[str, str] = field(default_factory=dict)
    is_over: bool = False
    _line: bytearray = field(default_factory=bytearray)
    _left: int = 0  # bytes left of the current chunk
    _last: int = _LEAST_BYTES  # size of the current chunk, or of the one before
    _is_data: bool = False
    _are_trailers: bool = False

    def feed(self, received: bytes) -> Iterator[memoryview]:
        """The decoded bytes in these received ones. Raises ``InvalidRequestError``."""
        view, at = memoryview(received), 0
        while at < len(view):
            if self._left:
                taken = view[at : at + self._left]
                at += len(taken)
                self._left -= len(taken)
                yield taken
                continue
            end = received.find(b"\n", at) + 1
            self._line += view[at : end or len(view)]
            if len(self._line) > _LONGEST_LINE or self.is_over:
                raise InvalidRequestError("the body is not in aws-chunked")
            at = end or len(view)
            if end:
                line = bytes(self._line)
                self._line.clear()
                self._read(line)

    def _read(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise InvalidRequestError("a line of aws-chunked does not end with CRLF")
        text = line[:-2]
        if self._are_trailers:
            self._read_trailer(text)
        elif self._is_data:  # the end of the chunk's bytes
            self._is_data = False
            if text:
                raise InvalidRequestError("a chunk of aws-chunked is longer than its size")
        else:
            self._begin(text)

    def _begin(self, text: bytes) -> None:
        if (match := _SIZE_LINE.fullmatch(text)) is None:
            raise InvalidRequestError("a chunk of aws-chunked has no size")
        size = int(match[1], 16)
        if size and self._last < _LEAST_BYTES:
            raise InvalidRequestError(f"a chunk of aws-chunked before the last has less than {_LEAST_BYTES} bytes")
        self._left, self._last, self._is_data, self._are_trailers = size, size, size > 0, size == 0

    def _read_trailer(self, text: bytes) -> None:
        if not text:
            self.is_over = True
            return
        name, colon, value = text.decode("latin-1").partition(":")
        name = name.strip().lower()
        if not colon or name in self.trailers or len(self.trailers) >= _MOST_TRAILERS:
            raise InvalidRequestError("the body in aws-chunked has malformed trailers")
        self.trailers[name] = value.strip()
