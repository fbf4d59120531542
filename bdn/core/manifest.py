"""Manifests as documents: a root lists pages, and pages map each file to its bytes.

A manifest's name is the digest of its root. Root, pages and slabs are ordinary chunks. Files of 1 MiB or more have
chunks of their own; smaller files share slabs, in the order of their paths. Slab and page boundaries depend only on
paths and sizes, so equal trees have equal slabs and one manifest, and one changed file changes one slab and one page.
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

SMALL_FILE_SIZE: Final = 1024 * 1024  # files of this size or more have chunks of their own
_CUT_BYTES: Final = 4 * 1024 * 1024  # approximate size of a slab or a page; the maximum is a chunk
_ROOT: Final = "bdn.manifest.v2"
_PAGE: Final = "bdn.page.v2"
_ENTRY_BYTES: Final = 160  # approximate size of a file in a page, without its path and its chunks
_NAME_BYTES: Final = 70  # a chunk's name, with quotes and comma
_SLAB_BYTES: Final = 100  # a slab's name and size
_PART_CHUNKS: Final = 60_000  # per file and page; a longer file continues on the next page

_Item = TypeVar("_Item")


def is_small(size: int) -> bool:
    """Whether a file is stored in a slab. An empty file is stored nowhere."""
    return 0 < size < SMALL_FILE_SIZE


class Cutter(Generic[_Item]):
    """Cuts items, sorted by path, into pieces of about 4 MiB and at most 8 MiB.

    A boundary is pseudo-random, drawn from the path and weight of the item before it. So a piece depends on its own
    items alone, unless the previous piece reached the maximum.
    """

    def __init__(self, salt: bytes, least: int = 0) -> None:
        self._salt = salt
        self._least = least
        self._items: list[_Item] = []
        self._size = 0

    def add(self, item: _Item, path: str, weight: int) -> Iterator[list[_Item]]:
        """Add an item of ``weight`` bytes, at most 8 MiB; yield the pieces that it completes."""
        weight = max(weight, self._least)
        if self._items and self._size + weight > CHUNK_SIZE:
            yield self._take()
        self._items.append(item)
        self._size += weight
        drawn = int.from_bytes(blake3(self._salt + path.encode("utf-8", "surrogatepass")).digest(8), "big")
        if drawn * _CUT_BYTES < weight << 64:
            yield self._take()

    def finish(self) -> Iterator[list[_Item]]:
        if self._items:
            yield self._take()

    def _take(self) -> list[_Item]:
        items, self._items, self._size = self._items, [], 0
        return items


def slab_cutter() -> Cutter[Any]:
    """Cuts small files into slabs. A slab is the concatenation of its files; a file's weight is its size.

    A slab has at most 16,384 files, because readers hold the names of all its files in memory.
    """
    return Cutter(b"slab ", least=512)


@dataclass(frozen=True, slots=True)
class PlacedFile:
    path: str
    layout: FileLayout

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def digest(self) -> Digest:
        return self.layout.digest


@dataclass(frozen=True, slots=True)
class Document:
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
    """A manifest's root document. Pages are in path order; two pages begin with one path where a file spans both."""

    files_total: int
    bytes_total: int
    pages: tuple[PageRef, ...]

    @property
    def content(self) -> bytes:
        pages = [{"digest": str(page.digest), "first": page.first, "size": page.size} for page in self.pages]
        return _encoded({"bytes": self.bytes_total, "files": self.files_total, "pages": pages, "schema": _ROOT})

    @property
    def digest(self) -> Digest:
        return digest_of(self.content)

    @classmethod
    def parse(cls, content: bytes | bytearray | memoryview) -> Self:
        """Parse a root whose digest the caller has verified. Raises ``MalformedDocumentError``."""
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
        """The pages that can list this path, several where the file spans pages."""
        before = [page for page in self.pages if page.first < path][-1:]
        return (*before, *(page for page in self.pages if page.first == path))


class ManifestWriter:
    """Builds pages and root from files sorted by path, of a tree that passed ``check_tree``."""

    def __init__(self) -> None:
        self._cutter: Cutter[_Part] = Cutter(b"page ")
        self._pages: list[PageRef] = []
        self._last = ""
        self._files = self._bytes = 0

    def add(self, file: PlacedFile) -> Iterator[Document]:
        """Add a file; yield the pages that it completes. Raises ``ValueError`` when the file is out of order."""
        if file.path <= self._last:
            raise ValueError("a manifest's files are sorted by path")
        self._last = file.path
        self._files += 1
        self._bytes += file.size
        for part in _parts(file):
            for parts in self._cutter.add(part, f"{part.start} {file.path}", part.weight):
                yield self._page(parts)

    def finish(self) -> Iterator[Document]:
        for parts in self._cutter.finish():
            yield self._page(parts)
        root = self.root
        yield Document(root.digest, root.content)

    @property
    def root(self) -> Root:
        """The root of the files added so far."""
        return Root(self._files, self._bytes, tuple(self._pages))

    def _page(self, parts: Sequence[_Part]) -> Document:
        content = _write_page(parts)
        page = Document(digest_of(content), content)
        self._pages.append(PageRef(page.digest, len(content), parts[0].file.path))
        return page


@dataclass(frozen=True, slots=True)
class _Part:
    """One page's part of a file: all chunks, or the chunks from ``start`` on."""

    file: PlacedFile
    start: int
    chunks: tuple[Digest, ...]

    @property
    def weight(self) -> int:
        """An upper estimate of its bytes in a page."""
        escaped = len(encode_basestring_ascii(self.file.path))  # at least as long as UTF-8
        lies = _SLAB_BYTES if self.file.layout.slice else _NAME_BYTES * len(self.chunks)
        return _ENTRY_BYTES + escaped + lies


def _parts(file: PlacedFile) -> list[_Part]:
    chunks = () if file.layout.slice else file.layout.chunks
    starts = range(0, len(chunks) or 1, _PART_CHUNKS)
    return [_Part(file, start, chunks[start : start + _PART_CHUNKS]) for start in starts]


def _write_page(parts: Sequence[_Part]) -> bytes:
    slabs: dict[Digest, int] = {}  # sizes by digest
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
    """A file's record in a page.

    ``chunks`` begin at ``start``, and are empty for a file in a slab and for an empty file.
    """

    path: str
    size: int
    digest: Digest
    chunks: tuple[Digest, ...]
    start: int = 0
    slice: Slice | None = None

    @property
    def fetched(self) -> tuple[Digest, ...]:
        """The chunks to fetch from the store: the file's own, or its slab."""
        return (self.slice.slab,) if self.slice else self.chunks

    def placed(self) -> PlacedFile:
        """Convert the entry of a file that is on one page. Raises ``MalformedDocumentError``."""
        return _placed(self, self.chunks)


def read_page(content: bytes | bytearray | memoryview) -> list[PageEntry]:
    """Parse a page whose digest the caller has verified. Raises ``MalformedDocumentError``."""
    body = _body(content, _PAGE)
    try:
        slabs = [(Digest.parse(name), _count(size)) for name, size in body["slabs"]]
        return [_entry(one, slabs) for one in body["files"]]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedDocumentError(f"not a page of a manifest: {error}") from error


def files_of(pages: Iterable[bytes | bytearray | memoryview]) -> Iterator[PlacedFile]:
    """Iterate over the files of all pages, in order, with one page in memory. Raises ``MalformedDocumentError``."""
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
    """The files (path, size, digest) of one slab, given in slab order."""
    offset = 0
    for path, size, digest in files:
        yield PlacedFile(path, FileLayout(digest, size, (digest,), Slice(slab, slab_size, offset)))
        offset += size


def empty_file(path: str) -> PlacedFile:
    return PlacedFile(path, FileLayout(EMPTY, 0, ()))


def large_file(path: str, size: int, chunks: tuple[Digest, ...]) -> PlacedFile:
    return PlacedFile(path, FileLayout(file_digest(size, chunks), size, chunks))
