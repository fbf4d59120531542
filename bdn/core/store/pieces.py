"""What one damaged object of the store is made of: pieces that can be had one by one, each checked by a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.store.seal import seal_of


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
