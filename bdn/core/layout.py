"""Where a file's bytes lie: its chunks in order. Served beside the manifest and not part of its name.

A layout needs no trust: it exists only when its chunk digests add up to the file digest that the manifest names.
"""

from __future__ import annotations

from dataclasses import dataclass

from bdn.core.chunk import ByteRange, chunk_count, chunk_range
from bdn.core.digest import Digest, file_digest


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """One chunk of a file: its name, and the bytes of the file that it is."""

    digest: Digest
    index: int
    range: ByteRange


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The chunks of one file, checked against the file's digest when the value is made."""

    digest: Digest
    size: int
    chunks: tuple[Digest, ...]

    def __post_init__(self) -> None:
        fits = self.size >= 0 and len(self.chunks) == chunk_count(self.size)
        if not fits or file_digest(self.size, self.chunks) != self.digest:
            msg = f"{len(self.chunks)} chunks do not make up file {self.digest} of {self.size} bytes"
            raise ValueError(msg)

    @classmethod
    def of(cls, size: int, chunks: tuple[Digest, ...]) -> FileLayout:
        """The layout of a file of ``size`` bytes with these chunks; names the file."""
        return cls(file_digest(size, chunks), size, chunks)

    def placed(self) -> tuple[PlacedChunk, ...]:
        """Every chunk with its place in the file, in order."""
        return tuple(
            PlacedChunk(digest, index, chunk_range(self.size, index)) for index, digest in enumerate(self.chunks)
        )
