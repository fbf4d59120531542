"""What is wrong with a record, and the pieces of a damaged object that can be fetched one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bdn.core.chunk import chunk_count
from bdn.core.digest import EMPTY, Digest, digest_of, file_digest
from bdn.core.store.slabs import is_small, seal_of

_RAW = 32  # bytes of a raw digest


def manifest_fault(digest: Digest, canonical: bytes) -> str | None:
    """What is wrong with a manifest's bytes, or None."""
    actual = digest_of(canonical)
    return None if actual == digest else f"its manifest has the name {actual}"


def content_fault(digest: Digest, size: int, chunks: bytes) -> str | None:
    """What is wrong with the record of a file, or None. ``chunks`` are raw digests, none where it lies in slabs.

    Where in a slab a file lies proves itself by the file's bytes alone, and is not asked here.
    """
    if not chunks:
        fits = size == 0 if digest == EMPTY else size > 0 and is_small(size)
        return None if fits else f"the record of a file of {size} bytes has no chunks"
    if size < 0 or len(chunks) != _RAW * chunk_count(size):
        return f"the record of a file of {size} bytes has {len(chunks)} bytes of chunk names"
    names = tuple(Digest.from_bytes(chunks[start : start + _RAW]) for start in range(0, len(chunks), _RAW))
    return None if file_digest(size, names) == digest else "the chunks of a file's record do not make up the file"


@dataclass(frozen=True, slots=True)
class Piece:
    """``size`` bytes at ``offset`` of the object, called ``name``: bytes from ``start`` on of a content of ``content_size``.

    For a chunk that is the chunk itself; for a slab, each small file in it.
    """

    name: Digest
    offset: int
    size: int
    content: Digest
    content_size: int
    start: int


@dataclass(frozen=True, slots=True)
class Needed:
    """A damaged object: its name, size and pieces. A slab's may leave gaps, where files were that nobody needs any more.

    ``scopes`` are those who may read a slab; None says that it is no slab.
    """

    digest: Digest
    size: int
    pieces: tuple[Piece, ...]
    scopes: tuple[str, ...] | None = None

    @property
    def is_slab(self) -> bool:
        """Whether it holds small files, rather than being a piece of a large one."""
        return self.scopes is not None

    @property
    def seal(self) -> bytes:
        """What a slab ended in when it was packed; it is nobody's piece."""
        return seal_of(self.scopes[0]) if self.scopes is not None and len(self.scopes) == 1 else b""

    @property
    def whole(self) -> Piece:
        """The object itself, for those who may hold it under its own name."""
        first = self.pieces[0]
        return Piece(self.digest, 0, self.size, first.content, first.content_size, first.start)


def closed_up(pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """The pieces in order with new offsets that leave no gaps."""
    placed: list[tuple[Piece, int]] = []
    offset = 0
    for piece in sorted(pieces, key=lambda one: one.offset):
        placed.append((piece, offset))
        offset += piece.size
    return placed
