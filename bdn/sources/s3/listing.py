"""One page of a bucket's listing, read from the XML of ListObjectsV2.

The client's own parser builds every field of every object by the service's description, on the event loop: 50 ms for 1000
keys. This one reads the three that are needed, in 5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

_ROOT: Final = "ListBucketResult"
_SIZE: Final = re.compile(r"[0-9]{1,30}")


class NotAListingError(ValueError):
    """The answer is something else than a listing; the text tells what, without any of its content."""


@dataclass(frozen=True, slots=True)
class S3Object:
    """One listed object. ``name`` is what S3 calls its key. ``etag`` is as it stands in the header of an answer, quotes included."""

    name: str
    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class S3Page:
    """Objects in the order of their keys, and the token of the page after them, None at the end."""

    objects: tuple[S3Object, ...]
    following: str | None


def read_page(document: bytes) -> S3Page:
    """The page; blocking, for some milliseconds.

    Raises:
        NotAListingError: also for a listing that goes on and does not tell where, which must not pass for its end.
    """
    try:
        # Entity bombs are refused by expat itself.
        root = ET.fromstring(document)  # noqa: S314
    except ET.ParseError:
        raise NotAListingError("the answer is not XML") from None
    space, _, name = root.tag.rpartition("}")
    if name != _ROOT:
        raise NotAListingError(f"the answer is a document {name[:100]!a}")
    prefix = f"{space}}}" if space else ""  # some servers leave the namespace out
    is_quoted = root.findtext(f"{prefix}EncodingType") == "url"
    key, etag, size = f"{prefix}Key", f"{prefix}ETag", f"{prefix}Size"
    try:
        objects = tuple(
            S3Object(_key(entry.findtext(key), is_quoted), _etag(entry.findtext(etag)), _size(entry.findtext(size, "")))
            for entry in root.iterfind(f"{prefix}Contents")
        )
    except ValueError as error:
        raise NotAListingError("the answer lists an object without key, ETag or size") from error
    if root.findtext(f"{prefix}IsTruncated") != "true":
        return S3Page(objects, None)
    following = root.findtext(f"{prefix}NextContinuationToken")
    if not following:
        raise NotAListingError("a listing goes on but does not tell where")
    return S3Page(objects, following)


def _key(text: str | None, is_quoted: bool) -> str:
    if not text:
        raise ValueError
    # As in a form: a space is "+", and "+" is "%2B".
    return unquote_plus(text, errors="strict") if is_quoted else text


def _size(text: str) -> int:
    if not _SIZE.fullmatch(text):  # int() would take "-5", "1_0" and the digits of every script
        raise ValueError
    return int(text)


def _etag(text: str | None) -> str:
    if not text:
        raise ValueError
    return text if text[0] == '"' else f'"{text}"'  # some servers list it without its quotes
