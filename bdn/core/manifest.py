"""Manifests as documents: a root that lists pages, and pages that say of each file where its bytes lie.

A manifest's name is the digest of its root. Root, pages and slabs are chunks like any other. Files of 1 MiB or more have chunks of
their own; smaller ones lie in slabs, in the order of their paths. Where a slab or a page ends follows from the paths and sizes
of the files alone, so equal trees have equal slabs and one manifest, and a file that changes changes one slab and one page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any, Final, Generic, Self, TypeVar

from blake3 import blake3

from bdn.core.chunk import (
    CHUNK_SIZE,
    EMPTY,
    Digest,
    FileLayout,
    MalformedDocumentError,
    Slice,
    UnsafePathError,
    chunk_count,
    digest_of,
    file_digest,
    normalise_path,
)

SMALL_FILE_SIZE: Final = 1024 * 1024  # a file of this size or more has chunks of its own
_CUT_BYTES: Final = 4 * 1024 * 1024  # about the size of a slab or a page; none is larger than a chunk
_ROOT: Final = "bdn.manifest.v2"
_PAGE: Final = "bdn.page.v2"
_ENTRY_BYTES: Final = 160  # about what a file takes in a page, beside its path and its chunks
_NAME_BYTES: Final = 70  # a chunk's name, with quotes and comma
_SLAB_BYTES: Final = 100  # a slab's name and size
_PART_CHUNKS: Final = 60_000  # of a file in one page: a longer one goes on in the next

_Item = TypeVar("_Item")


def is_small(size: int) -> bool:
    """Whether a file of so many bytes lies in a slab. An empty file has no bytes that could lie anywhere."""
    return 0 < size < SMALL_FILE_SIZE


class Cutter(Generic[_Item]):
    """Cuts items, which come in the order of their paths, into pieces of about 4 MiB and at most 8 MiB.

    A piece ends behind an item by chance, drawn from the item's path and weight: so a piece depends on its own items alone,
    unless the one before it had to end for its size.
    """

    def __init__(self, salt: bytes, least: int = 0) -> None:
        self._salt = salt
        self._least = least
        self._items: list[_Item] = []
        self._size = 0

    def add(self, item: _Item, path: str, weight: int) -> Iterator[list[_Item]]:
        """Add an item of ``weight`` bytes, at most 8 MiB; yields the pieces that are complete now."""
        weight = max(weight, self._least)
        if self._items and self._size + weight > CHUNK_SIZE:
            yield self._take()
        self._items.append(item)
        self._size += weight
        drawn = int.from_bytes(blake3(self._salt + path.encode()).digest(8), "big")
        if drawn * _CUT_BYTES < weight << 64:
            yield self._take()

    def finish(self) -> Iterator[list[_Item]]:
        """The last piece, if there is one."""
        if self._items:
            yield self._take()

    def _take(self) -> list[_Item]:
        items, self._items, self._size = self._items, [], 0
        return items


def slab_cutter() -> Cutter[Any]:
    """Cuts small files into slabs, each of which is its files one after the other. The weight of a file is its size.

    A slab has at most 16,384 files: who reads them has all their names in memory.
    """
    return Cutter(b"slab ", least=512)


@dataclass(frozen=True, slots=True)
class PlacedFile:
    """A file of a manifest and where its bytes lie."""

    path: str
    layout: FileLayout

    @property
    def size(self) -> int:
        """Bytes."""
        return self.layout.size

    @property
    def digest(self) -> Digest:
        """Of its content."""
        return self.layout.digest


@dataclass(frozen=True, slots=True)
class Document:
    """A root or a page as a chunk."""

    digest: Digest
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PageRef:
    """A page as the root lists it. ``first`` is the path of its first file."""

    digest: Digest
    size: int
    first: str


@dataclass(frozen=True)
class Root:
    """What a manifest's name stands for. The pages are in the order of their paths; two begin with one path where a file goes on."""

    files_total: int
    bytes_total: int
    pages: tuple[PageRef, ...]

    @property
    def content(self) -> bytes:
        """The document."""
        pages = [{"digest": str(page.digest), "first": page.first, "size": page.size} for page in self.pages]
        return _encoded({"bytes": self.bytes_total, "files": self.files_total, "pages": pages, "schema": _ROOT})

    @property
    def digest(self) -> Digest:
        """The manifest's name."""
        return digest_of(self.content)

    @classmethod
    def parse(cls, content: bytes | bytearray | memoryview) -> Self:
        """Read a root, of which the caller has compared the name. Raises ``MalformedDocumentError``."""
        body = _body(content, _ROOT)
        try:
            pages = tuple(
                PageRef(Digest.parse(one["digest"]), _count(one["size"]), normalise_path(one["first"]))
                for one in body["pages"]
            )
            root = cls(_count(body["files"]), _count(body["bytes"]), pages)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MalformedDocumentError(f"not the root of a manifest: {error}") from error
        firsts = [page.first for page in pages]
        if not pages or firsts != sorted(firsts) or not all(0 < page.size <= CHUNK_SIZE for page in pages):
            raise MalformedDocumentError("the pages of a manifest are out of order, or too large")
        return root

    def pages_of(self, path: str) -> tuple[PageRef, ...]:
        """The pages that a file of this path can be on: one, or several where it goes on."""
        before = [page for page in self.pages if page.first < path][-1:]
        return (*before, *(page for page in self.pages if page.first == path))


class ManifestWriter:
    """Makes the pages and the root of files that come in the order of their paths, of a tree that was checked."""

    def __init__(self) -> None:
        self._cutter: Cutter[_Part] = Cutter(b"page ")
        self._pages: list[PageRef] = []
        self._last = ""
        self._files = self._bytes = 0

    def add(self, file: PlacedFile) -> Iterator[Document]:
        """The next file; yields the pages that are complete. ``ValueError``: it is out of order."""
        if file.path <= self._last:
            raise ValueError("a manifest's files are sorted by path")
        self._last = file.path
        self._files += 1
        self._bytes += file.size
        for part in _parts(file):
            for parts in self._cutter.add(part, f"{part.start} {file.path}", part.weight):
                yield self._page(parts)

    def finish(self) -> Iterator[Document]:
        """The last page, and then the root; see ``root``."""
        for parts in self._cutter.finish():
            yield self._page(parts)
        root = self.root
        yield Document(root.digest, root.content)

    @property
    def root(self) -> Root:
        """The root of what was added."""
        return Root(self._files, self._bytes, tuple(self._pages))

    def _page(self, parts: Sequence[_Part]) -> Document:
        content = _write_page(parts)
        page = Document(digest_of(content), content)
        self._pages.append(PageRef(page.digest, len(content), parts[0].file.path))
        return page


@dataclass(frozen=True, slots=True)
class _Part:
    """What one page says of a file: all of it, or its chunks from ``start`` on."""

    file: PlacedFile
    start: int
    chunks: tuple[Digest, ...]

    @property
    def weight(self) -> int:
        """About the bytes that it takes in a page, and never fewer."""
        escaped = len(encode_basestring_ascii(self.file.path))  # at least as long as in UTF-8
        lies = _SLAB_BYTES if self.file.layout.slice else _NAME_BYTES * len(self.chunks)
        return _ENTRY_BYTES + escaped + lies


def _parts(file: PlacedFile) -> list[_Part]:
    chunks = () if file.layout.slice else file.layout.chunks
    starts = range(0, len(chunks) or 1, _PART_CHUNKS)
    return [_Part(file, start, chunks[start : start + _PART_CHUNKS]) for start in starts]


def _write_page(parts: Sequence[_Part]) -> bytes:
    slabs: dict[Digest, int] = {}  # with their sizes
    numbers: dict[Digest, int] = {}
    files: list[dict[str, object]] = []
    for part in parts:
        file, lies = part.file, part.file.layout.slice
        entry: dict[str, object] = {"digest": str(file.digest), "path": file.path, "size": file.size}
        if lies is not None:
            slabs[lies.slab] = lies.slab_size
            entry["slab"] = [numbers.setdefault(lies.slab, len(numbers)), lies.offset]
        elif part.chunks and part.chunks != (file.digest,):
            entry["chunks"] = [str(chunk) for chunk in part.chunks]
        if part.start:
            entry["from"] = part.start
        files.append(entry)
    listed = [[str(slab), size] for slab, size in slabs.items()]
    return _encoded({"files": files, "schema": _PAGE, "slabs": listed})


@dataclass(frozen=True, slots=True)
class PageEntry:
    """What a page says of a file. ``chunks`` are those from ``start`` on, none where the file lies in a slab or is empty."""

    path: str
    size: int
    digest: Digest
    chunks: tuple[Digest, ...]
    start: int = 0
    slice: Slice | None = None

    @property
    def fetched(self) -> tuple[Digest, ...]:
        """The chunks of the store that it names: its own, or its slab."""
        return (self.slice.slab,) if self.slice else self.chunks

    def placed(self) -> PlacedFile:
        """The file, where this is all of it. Raises ``MalformedDocumentError``."""
        return _placed(self, self.chunks)


def read_page(content: bytes | bytearray | memoryview) -> list[PageEntry]:
    """The files of a page, of which the caller has compared the name. Raises ``MalformedDocumentError``."""
    body = _body(content, _PAGE)
    try:
        slabs = [(Digest.parse(name), _count(size)) for name, size in body["slabs"]]
        return [_entry(one, slabs) for one in body["files"]]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedDocumentError(f"not a page of a manifest: {error}") from error


def files_of(pages: Iterable[bytes | bytearray | memoryview]) -> Iterator[PlacedFile]:
    """The files of a manifest from all its pages in order. Memory follows the page. Raises ``MalformedDocumentError``."""
    begun: PageEntry | None = None
    chunks: list[Digest] = []
    last = ""
    for page in pages:
        for entry in read_page(page):
            if begun is not None and (entry.path, entry.digest) == (begun.path, begun.digest):
                if entry.start != len(chunks):
                    raise MalformedDocumentError(f"chunks of {entry.path!a} are missing")
                chunks += entry.chunks
            else:
                if begun is not None or entry.path <= last or entry.start:
                    raise MalformedDocumentError(f"{entry.path!a} is out of order")
                last, chunks = entry.path, list(entry.chunks)
            begun = entry if entry.slice is None and len(chunks) < chunk_count(entry.size) else None
            if begun is None:
                yield _placed(entry, tuple(chunks))
    if begun is not None:
        raise MalformedDocumentError(f"chunks of {begun.path!a} are missing")


def _placed(entry: PageEntry, chunks: tuple[Digest, ...]) -> PlacedFile:
    try:
        return PlacedFile(
            entry.path, FileLayout(entry.digest, entry.size, (entry.digest,) if entry.slice else chunks, entry.slice)
        )
    except ValueError as error:
        raise MalformedDocumentError(str(error)) from error


def _entry(record: dict[str, Any], slabs: Sequence[tuple[Digest, int]]) -> PageEntry:
    path, size, digest = record["path"], _count(record["size"]), Digest.parse(record["digest"])
    if normalise_path(path) != path:
        raise UnsafePathError(f"path {path!a} is not normalised")
    if (size == 0) != (digest == EMPTY):
        raise ValueError(f"{path!a}: size {size} does not fit digest {digest}")
    if "slab" in record:
        number, offset = map(_count, record["slab"])
        slab, slab_size = slabs[number]
        return PageEntry(path, size, digest, (), 0, Slice(slab, slab_size, offset))
    listed = record.get("chunks")
    chunks = tuple(map(Digest.parse, listed)) if listed is not None else (digest,) if size else ()
    return PageEntry(path, size, digest, chunks, _count(record.get("from", 0)))


def _encoded(body: dict[str, object]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def _body(content: bytes | bytearray | memoryview, schema: str) -> dict[str, Any]:
    try:
        body = json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise MalformedDocumentError(f"not JSON: {error}") from error
    if not isinstance(body, dict) or body.get("schema") != schema:
        raise MalformedDocumentError(f"not a document of schema {schema}")
    return body


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a count, not {value!r:.80}")
    return value


def slab_layouts(files: Iterable[tuple[str, int, Digest]], slab: Digest, slab_size: int) -> Iterator[PlacedFile]:
    """The files (path, size, digest) of one slab, in the order in which they lie in it."""
    offset = 0
    for path, size, digest in files:
        yield PlacedFile(path, FileLayout(digest, size, (digest,), Slice(slab, slab_size, offset)))
        offset += size


def empty_file(path: str) -> PlacedFile:
    """A file without bytes."""
    return PlacedFile(path, FileLayout(EMPTY, 0, ()))


def large_file(path: str, size: int, chunks: tuple[Digest, ...]) -> PlacedFile:
    """A file with chunks of its own."""
    return PlacedFile(path, FileLayout(file_digest(size, chunks), size, chunks))
