"""Listings as documents: what an upstream said of each file of a mirrored source. Agents never get them.

A root lists pages, as of a manifest (``manifest.py``). The next mirror of the source compares what it lists with them, and takes
files that are the same from where they lie.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from bdn.core.chunk import Digest, MalformedDocumentError, digest_of
from bdn.core.manifest import Cutter, Document
from bdn.core.source.upstream import UpstreamFile

_ROOT: Final = "bdn.listing.v1"
_ENTRY_BYTES: Final = 240  # about what a file takes in a page, beside its path


class Listed(NamedTuple):
    """A file as it was listed. ``key`` is its identity's; the checksum's kind and digits are the upstream's, where it gave one."""

    path: str
    size: int
    key: str
    checksum_kind: str | None
    checksum: str | None


class ListingWriter:
    """Makes the pages and the root of files that come in the order of their paths."""

    def __init__(self) -> None:
        self._cutter: Cutter[Listed] = Cutter(b"listing ")
        self._pages: list[str] = []
        self.root: Digest | None = None

    def add(self, file: UpstreamFile) -> Iterator[Document]:
        """The next file; yields the pages that are complete."""
        stated = (file.checksum.kind.value, file.checksum.hex) if file.checksum else (None, None)
        entry = Listed(file.path, file.size, file.identity.key, *stated)
        weight = _ENTRY_BYTES + len(json.dumps(file.path))
        yield from map(self._page, self._cutter.add(entry, file.path, weight))

    def finish(self) -> Iterator[Document]:
        """The last page, and then the root, whose name is ``root``."""
        yield from map(self._page, self._cutter.finish())
        content = json.dumps({"pages": self._pages, "schema": _ROOT}, separators=(",", ":")).encode()
        self.root = digest_of(content)
        yield Document(self.root, content)

    def _page(self, entries: Sequence[Listed]) -> Document:
        content = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        page = Document(digest_of(content), content)
        self._pages.append(str(page.digest))
        return page


def listing_pages(root: bytes) -> list[Digest]:
    """The pages of a listing. Raises ``MalformedDocumentError``."""
    try:
        body = json.loads(root)
        schema, pages = body["schema"], [Digest.parse(name) for name in body["pages"]]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise MalformedDocumentError(f"not a listing: {error}") from error
    if schema != _ROOT:
        raise MalformedDocumentError(f"not a listing of schema {_ROOT}")
    return pages


def listed_in(pages: Iterable[bytes]) -> Iterator[Listed]:
    """The files of a listing, from all its pages in order. Raises ``MalformedDocumentError``."""
    for page in pages:
        try:
            found = [_listed(entry) for entry in json.loads(page.decode("utf-8", "surrogatepass"))]
        except (TypeError, ValueError, RecursionError) as error:
            raise MalformedDocumentError(f"not a page of a listing: {error}") from error
        yield from found


def _listed(entry: list[object]) -> Listed:
    path, size, key, *checksum = entry
    texts = (path, key, *(one for one in checksum if one is not None))
    if type(size) is not int or size < 0 or not all(isinstance(one, str) for one in texts):
        raise TypeError(f"not a file: {entry!r:.80}")
    return Listed(path, size, key, *checksum)  # type: ignore[arg-type] # looked at above
