"""Where a file's bytes lie: its chunks in order, or a slice of a slab. Served beside the manifest and not part of its name.

A layout needs no trust: it exists only when its chunk digests add up to the file digest that the manifest names, and the
bytes of a slice are checked against the file's own digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from bdn.core.chunk import CHUNK_SIZE, ByteRange, chunk_count, chunk_range
from bdn.core.digest import Digest, file_digest


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """One chunk of a file: its name, and the bytes of the file that it is."""

    digest: Digest
    index: int
    range: ByteRange


@dataclass(frozen=True, slots=True)
class Slab:
    """A chunk that holds many small files one after the other. ``scope`` is whose files: see ``Identity``."""

    digest: Digest
    size: int
    scope: str


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a small file lies: ``offset`` bytes into the slab, which is ``slab_size`` bytes."""

    slab: Digest
    slab_size: int
    offset: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The chunks of one file, checked against the file's digest when the value is made.

    ``slice`` says that the file's only chunk does not rest by itself, but inside a slab.
    """

    digest: Digest
    size: int
    chunks: tuple[Digest, ...]
    slice: Slice | None = None

    def __post_init__(self) -> None:
        if self.slice is not None:
            stop = self.slice.offset + self.size
            if len(self.chunks) != 1 or self.slice.offset < 0 or not stop <= self.slice.slab_size <= CHUNK_SIZE:
                msg = f"{self.slice} cannot hold file {self.digest} of {self.size} bytes"
                raise ValueError(msg)
        fits = self.size >= 0 and len(self.chunks) == chunk_count(self.size)
        if not fits or file_digest(self.size, self.chunks) != self.digest:
            msg = f"{len(self.chunks)} chunks do not make up file {self.digest} of {self.size} bytes"
            raise ValueError(msg)

    @classmethod
    def of(cls, size: int, chunks: tuple[Digest, ...]) -> FileLayout:
        """The layout of a file of ``size`` bytes with these chunks; names the file."""
        return cls(file_digest(size, chunks), size, chunks)

    @classmethod
    def packed(cls, digest: Digest, size: int, slab: Slab, offset: int) -> FileLayout:
        """The layout of a small file inside a slab."""
        return cls(digest, size, (digest,), Slice(slab.digest, slab.size, offset))

    def placed(self) -> tuple[PlacedChunk, ...]:
        """Every chunk with its place in the file, in order."""
        return tuple(
            PlacedChunk(digest, index, chunk_range(self.size, index)) for index, digest in enumerate(self.chunks)
        )
