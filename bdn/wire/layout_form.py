"""A layout as an agent has it in its hands: read from the wire's document once, with no model in between.

A layout has as many entries as its manifest has contents, which may be a million; as pydantic's models they would cost five
times the memory, and be checked twice.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from bdn.core.chunk import Digest, chunk_count
from bdn.core.manifest import MalformedDocumentError
from bdn.core.store import FileLayout, Slice

_ENTRY_BYTES: Final = 300  # of one file, with its slab and without its chunks
_NAME_BYTES: Final = 70  # of a chunk


@dataclass(frozen=True)
class Layout:
    """Where every distinct content of one manifest lies; each entry was checked against its file's name.

    ``data_port`` is that of the mirror's data plane when the document was written; see ``LayoutBody``, whose form this is.
    """

    manifest: Digest
    data_port: int | None
    files: Mapping[Digest, FileLayout]

    @classmethod
    def parse(cls, document: bytes) -> Self:
        """Read it. About 10 µs per file.

        Raises:
            MalformedDocumentError: not a layout, or one that is wrong about a file.
        """
        try:
            body = json.loads(document, object_hook=_Reader().read)
            files = {file.digest: file for file in body["files"]}
            return cls(Digest.parse(body["manifest"]), _port(body["data_port"]), files)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            msg = f"not a layout: {error}"
            raise MalformedDocumentError(msg) from error

    def covers(self, contents: Mapping[Digest, int]) -> bool:
        """Whether it says of each of these contents, given with their sizes, where it lies."""
        found = self.files
        return all(digest in found and found[digest].size == size for digest, size in contents.items())

    @staticmethod
    def most_bytes(contents: Mapping[Digest, int]) -> int:
        """What a layout of these contents, given with their sizes, may have at the most: twice what ``encode`` makes of it."""
        return 2 * sum((_ENTRY_BYTES + _NAME_BYTES * chunk_count(size) for size in contents.values()), _ENTRY_BYTES)

    def encode(self) -> bytes:
        """The document again. Nothing in it needs escaping: there are hexadecimal digits and numbers only."""
        head = f'{{"manifest":"{self.manifest}","data_port":{json.dumps(self.data_port)},"files":['
        return b"".join((head.encode(), ",".join(map(_entry, self.files.values())).encode(), b"]}"))


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
            msg = f"not a slice: {record!r:.200}"
            raise TypeError(msg)
        slab = self._slabs.get(name) or self._slabs.setdefault(name, Digest.parse(name))
        return Slice(slab, size, offset)

    @staticmethod
    def _file(record: dict[str, object]) -> FileLayout:
        name, size, chunks, lies = record["digest"], record["size"], record["chunks"], record.get("slab")
        if not (
            isinstance(lies, Slice | None) and isinstance(name, str) and type(size) is int and isinstance(chunks, list)
        ):
            msg = f"not the layout of a file: {record!r:.200}"
            raise TypeError(msg)
        digest = Digest.parse(name)
        named = (digest,) if chunks == [name] else tuple(map(Digest.parse, chunks))
        return FileLayout(digest, size, named, lies)


def _port(value: object) -> int | None:
    if value is not None and type(value) is not int:
        msg = f"expected a port, not {value!r:.80}"
        raise TypeError(msg)
    return value


def _entry(file: FileLayout) -> str:
    chunks = ",".join(f'"{chunk}"' for chunk in file.chunks)
    head = f'{{"digest":"{file.digest}","size":{file.size},"chunks":[{chunks}]'
    if file.slice is None:
        return f"{head}}}"
    lies = file.slice
    return f'{head},"slab":{{"digest":"{lies.slab}","size":{lies.slab_size},"offset":{lies.offset}}}}}'
