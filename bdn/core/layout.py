"""A manifest in memory: files by path, and the layout of each content."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

from bdn.core.cache.digest_table import DigestTable
from bdn.core.chunk import Digest, FileEntry, FileLayout, MalformedDocumentError, Slice, check_tree
from bdn.core.manifest import Root, files_of

_WORD: Final = (1 << 32) - 1


@dataclass(frozen=True)
class Manifest:
    """A manifest's files, sorted by path. ``digest`` is the root's."""

    digest: Digest
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        check_tree(entry.path for entry in self.files)

    @cached_property
    def bytes_total(self) -> int:
        """The sum of all file sizes; content with several paths counts once per path."""
        return sum(entry.size for entry in self.files)

    @cached_property
    def contents(self) -> dict[Digest, int]:
        """Size by digest, each distinct content once: what a cache has to hold."""
        return {entry.digest: entry.size for entry in self.files}


class Layout(Mapping[Digest, FileLayout]):
    """The layout of every distinct content of one manifest, by file digest.

    A layout of one chunk takes 44 bytes here instead of 500, and is rebuilt at each access.
    """

    def __init__(self, manifest: Digest) -> None:
        self.manifest = manifest
        # 4 bytes each: the slab's number (0: no slab), the file's size, its offset in the slab.
        self._single = DigestTable(width=12)
        self._slabs: dict[tuple[Digest, int], int] = {}  # (digest, size) to number
        self._by_number: list[tuple[Digest, int] | None] = [None]
        self._others: dict[Digest, FileLayout] = {}

    @classmethod
    def of(cls, root: Root, pages: Iterable[bytes]) -> Self:
        """Parse the pages, at 10 µs per file. Raises ``MalformedDocumentError``."""
        files = cls(root.digest)
        for file in files_of(pages):
            files.add(file.layout)
        return files

    def add(self, file: FileLayout) -> None:
        """For content in several slabs, the last slab wins."""
        if len(file.chunks) != 1:
            self._others[file.digest] = file
            return
        number, offset = 0, 0
        if lies := file.slice:
            slab, offset = (lies.slab, lies.slab_size), lies.offset
            number = self._slabs.setdefault(slab, len(self._by_number))
            if number == len(self._by_number):
                self._by_number.append(slab)
        self._single[file.digest] = number << 64 | file.size << 32 | offset

    def large(self) -> Iterator[FileLayout]:
        return (file for file in self._others.values() if file.chunks)

    def chunks(self) -> Iterator[tuple[Digest, int]]:
        """Names and sizes of all chunks of the manifest, possibly with duplicates."""
        yield from filter(None, self._by_number)
        for digest in self._single:
            place = self._single[digest]
            if not place >> 64:
                yield digest, place >> 32 & _WORD
        for file in self._others.values():
            yield from ((chunk.digest, chunk.range.size) for chunk in file.placed())

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


def read_documents(root: Root, pages: Iterable[bytes]) -> tuple[Manifest, Layout]:
    """Parse all pages of a manifest, at 20 µs per file. Raises ``MalformedDocumentError``."""
    entries: list[FileEntry] = []
    layout = Layout(root.digest)
    try:
        for file in files_of(pages):
            entries.append(FileEntry(file.path, file.size, file.digest))
            layout.add(file.layout)
        manifest = Manifest(root.digest, tuple(entries))
    except ValueError as error:
        raise MalformedDocumentError(f"not the pages of a manifest: {error}") from error
    if (len(entries), manifest.bytes_total) != (root.files_total, root.bytes_total):
        raise MalformedDocumentError("the pages of a manifest do not add up to its root's totals")
    return manifest, layout
