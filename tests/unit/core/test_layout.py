"""Where a file's bytes lie, and that a wrong layout cannot exist."""

from __future__ import annotations

import pytest

from bdn.core.chunk import CHUNK_SIZE, ByteRange
from bdn.core.digest import EMPTY, digest_of
from bdn.core.layout import FileLayout, PlacedChunk
from tests.support.names import named

ONE, TWO = named("one"), named("two")
SIZE = CHUNK_SIZE + 5


def test_a_layout_names_its_file() -> None:
    assert FileLayout.of(3, (digest_of(b"abc"),)).digest == digest_of(b"abc")
    assert FileLayout.of(0, ()).digest == EMPTY


def test_chunks_are_placed_in_order_without_gaps() -> None:
    assert FileLayout.of(SIZE, (ONE, TWO)).placed() == (
        PlacedChunk(ONE, 0, ByteRange(0, CHUNK_SIZE)),
        PlacedChunk(TWO, 1, ByteRange(CHUNK_SIZE, SIZE)),
    )


def test_an_empty_file_has_no_chunk_to_place() -> None:
    assert FileLayout.of(0, ()).placed() == ()


def test_chunks_in_another_order_do_not_make_up_the_file() -> None:
    layout = FileLayout.of(SIZE, (ONE, TWO))
    with pytest.raises(ValueError, match="do not make up file"):
        FileLayout(layout.digest, SIZE, (TWO, ONE))


def test_another_size_does_not_make_up_the_file() -> None:
    layout = FileLayout.of(SIZE, (ONE, TWO))
    with pytest.raises(ValueError, match="do not make up file"):
        FileLayout(layout.digest, SIZE + 1, (ONE, TWO))


@pytest.mark.parametrize("size", [0, CHUNK_SIZE + 1, -1])
def test_the_number_of_chunks_must_fit_the_size(size: int) -> None:
    with pytest.raises(ValueError, match="do not make up file"):
        FileLayout(ONE, size, (ONE,))


@pytest.mark.parametrize("size", [-1, 1])
def test_no_chunks_make_up_the_empty_file_alone(size: int) -> None:
    with pytest.raises(ValueError, match="do not make up file"):
        FileLayout(EMPTY, size, ())


def test_a_small_file_cannot_pose_as_a_large_one() -> None:
    """Its layout of one chunk would be as good as the large file's own if both had one name."""
    large = FileLayout.of(SIZE, (ONE, TWO))
    with pytest.raises(ValueError, match="do not make up file"):
        FileLayout(large.digest, 64, (digest_of(ONE.to_bytes() + TWO.to_bytes()),))
