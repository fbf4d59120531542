"""Where a file's bytes lie, and that a wrong layout cannot exist."""

import pytest

from bdn.core.chunk import CHUNK_SIZE, EMPTY, ByteRange, digest_of
from bdn.core.store import FileLayout, PlacedChunk, Slab, Slice
from tests.support.content.names import named

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


FILE = digest_of(b"small")
SLAB = Slab(digest_of(b"a slab"), 100, "public")


def test_a_packed_file_is_its_own_only_chunk_and_says_where_it_lies() -> None:
    layout = FileLayout.packed(FILE, 5, SLAB, 95)
    assert layout.chunks == (FILE,)
    assert layout.slice == Slice(SLAB.digest, 100, 95)


@pytest.mark.parametrize(("size", "offset"), [(5, 96), (5, -1), (101, 0)])
def test_a_slice_lies_inside_its_slab(size: int, offset: int) -> None:
    with pytest.raises(ValueError, match="cannot hold file"):
        FileLayout.packed(FILE, size, SLAB, offset)


def test_a_slab_is_no_larger_than_a_chunk() -> None:
    with pytest.raises(ValueError, match="cannot hold file"):
        FileLayout.packed(FILE, 5, Slab(SLAB.digest, CHUNK_SIZE + 1, "public"), 0)


def test_neither_a_large_file_nor_an_empty_one_lies_in_a_slab() -> None:
    large = FileLayout.of(SIZE, (ONE, TWO))
    lies = Slice(SLAB.digest, 100, 0)
    for digest, size, chunks in ((large.digest, SIZE, (ONE, TWO)), (EMPTY, 0, ())):
        with pytest.raises(ValueError, match="cannot hold file"):
            FileLayout(digest, size, chunks, lies)


def test_a_packed_file_is_still_checked_against_its_name() -> None:
    with pytest.raises(ValueError, match="do not make up file"):
        FileLayout(FILE, 5, (ONE,), Slice(SLAB.digest, 100, 0))
