"""Listings as documents: an upstream's metadata of each file of a mirrored source. Agents never get them.

A root lists pages, as in a manifest (``manifest.py``). The next mirror of the source compares its own listing with
these pages, and reuses the stored bytes of unchanged files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from bdn.core.chunk import Digest, MalformedDocumentError, digest_of
from bdn.core.manifest import Cutter, Document
from bdn.core.source.upstream import UpstreamFile

_ROOT: Final = "bdn.listing.v2"
_ENTRY_BYTES: Final = 240  # approximate size of a file in a page, without its path


class ListedFile(NamedTuple):
    """A file as listed. ``key`` is its identity's key; checksum kind and digits are the upstream's, or None.

    ``git_name`` is a hub's git name of the file, or of its LFS pointer.
    """

    path: str
    size: int
    key: str
    checksum_kind: str | None
    checksum: str | None
    git_name: str | None


class ListingWriter:
    """Builds pages and root from files sorted by path. ``is_whole``: these are all files of a commit."""

    def __init__(self, *, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._cutter: Cutter[ListedFile] = Cutter(b"listing ")
        self._pages: list[str] = []
        self.root: Digest | None = None

    def add(self, file: UpstreamFile) -> Iterator[Document]:
        """Add a file; yield the pages that it completes."""
        kind, checksum = (file.checksum.kind.value, file.checksum.hex) if file.checksum else (None, None)
        entry = ListedFile(file.path, file.size, file.identity.key, kind, checksum, file.git_name)
        weight = _ENTRY_BYTES + len(json.dumps(file.path))
        yield from map(self._page, self._cutter.add(entry, file.path, weight))

    def finish(self) -> Iterator[Document]:
        """Yield the last page, then the root, and set ``root``."""
        yield from map(self._page, self._cutter.finish())
        content = json.dumps(
            {"pages": self._pages, "schema": _ROOT, "whole": self._is_whole}, separators=(",", ":")
        ).encode()
        self.root = digest_of(content)
        yield Document(self.root, content)

    def _page(self, entries: Sequence[ListedFile]) -> Document:
        content = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        page = Document(digest_of(content), content)
        self._pages.append(str(page.digest))
        return page


@dataclass(frozen=True, slots=True)
class ListingRoot:
    """``is_whole``: the listing names all files of a commit, not only the selected ones."""

    pages: tuple[Digest, ...]
    is_whole: bool

    @classmethod
    def parse(cls, root: bytes) -> Self:
        try:
            body = json.loads(root)
            schema, is_whole = body["schema"], body["whole"]
            pages = tuple(Digest.parse(name) for name in body["pages"])
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise MalformedDocumentError(f"not a listing: {error}") from error
        if schema != _ROOT or type(is_whole) is not bool:
            raise MalformedDocumentError(f"not a listing of schema {_ROOT}")
        return cls(pages, is_whole)


def listed_in(pages: Iterable[bytes]) -> Iterator[ListedFile]:
    """Iterate over the files of all pages, in order. Raises ``MalformedDocumentError``."""
    for page in pages:
        try:
            found = [_listed(entry) for entry in json.loads(page.decode("utf-8", "surrogatepass"))]
        except (TypeError, ValueError, RecursionError) as error:
            raise MalformedDocumentError(f"not a page of a listing: {error}") from error
        yield from found


def _listed(entry: list[object]) -> ListedFile:
    path, size, key, kind, checksum, git_name = entry
    texts = (path, key, *(one for one in (kind, checksum, git_name) if one is not None))
    if type(size) is not int or size < 0 or not all(isinstance(one, str) for one in texts):
        raise TypeError(f"not a file: {entry!r:.80}")
    return ListedFile(path, size, key, kind, checksum, git_name)  # type: ignore[arg-type] # checked above
