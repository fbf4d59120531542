"""A damaged object in pieces."""

from bdn.core.chunk import digest_of
from bdn.core.store import Needed, Piece, closed_up
from tests.support.content.names import named


def piece(content: bytes, offset: int) -> Piece:
    return Piece(digest_of(content), offset, len(content), digest_of(content), len(content), 0)


def test_what_is_left_of_a_slab_closes_up_in_its_order() -> None:
    pieces = [piece(b"last", 90), piece(b"first", 3), piece(b"middle", 20)]
    placed = closed_up(pieces)
    assert [(one.offset, offset) for one, offset in placed] == [(3, 0), (20, 5), (90, 11)]


def test_the_whole_is_asked_for_by_the_object_s_own_name() -> None:
    needed = Needed(named("slab"), 100, (piece(b"first", 3),), ("public",))
    assert (needed.whole.name, needed.whole.offset, needed.whole.size) == (named("slab"), 0, 100)
    assert needed.whole.content == digest_of(b"first")
