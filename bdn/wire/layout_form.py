"""A layout's document: read and written without models in between.

It has as many entries as its manifest has contents, which may be a million; as pydantic's models they would cost five times the
memory, and be checked twice.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, Self

from pydantic import BaseModel

from bdn.core.cache.digest_table import DigestTable
from bdn.core.chunk import Digest, FileLayout, MalformedDocumentError, Slice, chunk_count, read_files
from bdn.wire.location_schema import Delivery

_FILES_AT_ONCE: Final = 1000  # in a piece of a document: one of a million files has 300 MB
_ENTRY_BYTES: Final = 300  # of one file, with its slab and without its chunks
_NAME_BYTES: Final = 70  # of a chunk
_WORD: Final = (1 << 32) - 1


@dataclass(frozen=True)
class Layout:
    """Where every distinct content of one manifest lies; each entry was checked against its file's name.

    ``data_port`` and ``delivery`` are those of the mirror when the document was written; see ``LayoutBody``, whose form this is.
    """

    manifest: Digest
    data_port: int | None
    files: Mapping[Digest, FileLayout]
    delivery: Delivery = "proxy"

    @classmethod
    def parse(cls, document: bytes | bytearray) -> Self:
        """Read it. About 10 µs per file.

        Raises ``MalformedDocumentError``: not a layout, or one that is wrong about a file.
        """
        files = PackedLayouts()
        try:
            body = read_files(document, files.add, _Reader().read)
            delivery: Delivery = "direct" if body.get("delivery") == "direct" else "proxy"
            return cls(Digest.parse(body["manifest"]), _port(body["data_port"]), files, delivery)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise MalformedDocumentError(f"not a layout: {error}") from error

    def covers(self, contents: Mapping[Digest, int]) -> bool:
        """Whether it says of each of these contents, given with their sizes, where it lies."""
        found = self.files
        return all(digest in found and found[digest].size == size for digest, size in contents.items())

    @staticmethod
    def most_bytes(contents: Mapping[Digest, int]) -> int:
        """What a layout of these contents, given with their sizes, may have at the most: twice what ``encode`` makes of it."""
        return 2 * sum((_ENTRY_BYTES + _NAME_BYTES * chunk_count(size) for size in contents.values()), _ENTRY_BYTES)

    def encode(self) -> bytes:
        """The document again."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The document again, piece by piece: that of a million files has 300 MB."""
        return write_layout(self.manifest, self.data_port, map(_entry, self.files.values()), self.delivery)


class _Reader:
    """Makes a value of each object as soon as it is read. Thousands of slices name the same slab: it is read once."""

    def __init__(self) -> None:
        self._slabs: dict[str, Digest] = {}

    def read(self, record: dict[str, object]) -> object:
        if "chunks" in record:
            return self._file(record)
        return self._slice(record) if "offset" in record else record

    def _slice(self, record: dict[str, object]) -> Slice:
        name, size, offset = record["digest"], record["size"], record["offset"]
        if not (isinstance(name, str) and type(size) is int and type(offset) is int):
            raise TypeError(f"not a slice: {record!r:.200}")
        slab = self._slabs.get(name) or self._slabs.setdefault(name, Digest.parse(name))
        return Slice(slab, size, offset)

    @staticmethod
    def _file(record: dict[str, object]) -> FileLayout:
        name, size, chunks, lies = record["digest"], record["size"], record["chunks"], record.get("slab")
        if not (
            isinstance(lies, Slice | None) and isinstance(name, str) and type(size) is int and isinstance(chunks, list)
        ):
            raise TypeError(f"not the layout of a file: {record!r:.200}")
        digest = Digest.parse(name)
        named = (digest,) if chunks == [name] else tuple(map(Digest.parse, chunks))
        return FileLayout(digest, size, named, lies)


def _port(value: object) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(f"expected a port, not {value!r:.80}")
    return value


class PackedLayouts(Mapping[Digest, FileLayout]):
    """Layouts by their files' names. One of a single chunk takes 44 bytes here instead of 500; it is made anew when it is asked for."""

    def __init__(self) -> None:
        self._single = DigestTable(width=12)  # the number of its slab, 0 for none; its size; its offset: 4 bytes each
        self._slabs: dict[tuple[Digest, int], int] = {}  # name and size, with its number
        self._by_number: list[tuple[Digest, int] | None] = [None]
        self._others: dict[Digest, FileLayout] = {}

    def add(self, file: object) -> None:
        """Raises ``TypeError``: it is no layout."""
        if not isinstance(file, FileLayout):
            raise TypeError(f"expected the layout of a file, not {file!r:.80}")
        if len(file.chunks) != 1:
            self._single.pop(file.digest, None)
            self._others[file.digest] = file
            return
        self._others.pop(file.digest, None)
        number, offset = 0, 0
        if lies := file.slice:
            slab, offset = (lies.slab, lies.slab_size), lies.offset
            number = self._slabs.setdefault(slab, len(self._by_number))
            if number == len(self._by_number):
                self._by_number.append(slab)
        self._single[file.digest] = number << 64 | file.size << 32 | offset

    def __getitem__(self, digest: Digest) -> FileLayout:
        place = self._single.get(digest)
        if place is None:
            return self._others[digest]
        slab = self._by_number[place >> 64]
        return FileLayout(digest, place >> 32 & _WORD, (digest,), slab and Slice(*slab, place & _WORD))

    def __iter__(self) -> Iterator[Digest]:
        yield from self._single
        yield from self._others

    def __len__(self) -> int:
        return len(self._single) + len(self._others)


def _entry(file: FileLayout) -> str:
    lies = file.slice
    slab = None if lies is None else (lies.slab.hex, lies.slab_size, lies.offset)
    return write_file(file.digest.hex, file.size, [chunk.hex for chunk in file.chunks], slab)


def write_layout(
    manifest: Digest, data_port: int | None, files: Iterable[str], delivery: Delivery = "proxy"
) -> Iterator[bytes]:
    """The document in pieces, of files as ``write_file`` makes them: ten times as fast as a model of each."""
    yield layout_head(manifest, data_port, delivery)
    yield from write_files(files, is_first=True)
    yield LAYOUT_END


LAYOUT_END: Final = b"]}"


def layout_head(manifest: Digest, data_port: int | None, delivery: Delivery) -> bytes:
    """What of the document comes before the first file; after the last one comes ``LAYOUT_END``."""
    direct = '"delivery":"direct",' if delivery == "direct" else ""
    return f'{{"manifest":"{manifest}","data_port":{json.dumps(data_port)},{direct}"files":['.encode()


def write_files(files: Iterable[str], *, is_first: bool) -> Iterator[bytes]:
    """Files of the document in pieces."""
    left, comma = iter(files), "" if is_first else ","
    while some := ",".join(islice(left, _FILES_AT_ONCE)):
        yield f"{comma}{some}".encode()
        comma = ","


def write_file(digest: str, size: int, chunks: Iterable[str], slab: tuple[str, int, int] | None = None) -> str:
    """One file of the document. ``slab`` is digest, size and offset. Digests are hexadecimal, so nothing needs escaping."""
    listed = ",".join(f'"b3:{chunk}"' for chunk in chunks)
    lies = f',"slab":{{"digest":"b3:{slab[0]}","size":{slab[1]},"offset":{slab[2]}}}' if slab else ""
    return f'{{"digest":"b3:{digest}","size":{size},"chunks":[{listed}]{lies}}}'


class SliceBody(BaseModel):
    """Where a small file lies: ``offset`` bytes into the slab, a chunk of ``size`` bytes that is served by its digest."""

    digest: str
    size: int
    offset: int


class FileLayoutBody(BaseModel):
    """The chunks of one file, in order; absent ``slab``: each is an object of its own.

    A file in a slab has one chunk, which is named like the file. It can be read by that name, too, but not as fast.
    """

    digest: str
    size: int
    chunks: list[str]
    slab: SliceBody | None = None


class LayoutBody(BaseModel):
    """Where a manifest's bytes lie: every distinct content once.

    ``data_port`` is where the data plane serves the chunks, on the host that answered; null means on this port. With the
    ``delivery`` ``direct`` they are to be read where ``POST /chunks/locations`` says; none is ``proxy``.
    """

    manifest: str
    data_port: int | None
    delivery: Delivery = "proxy"
    files: list[FileLayoutBody]
