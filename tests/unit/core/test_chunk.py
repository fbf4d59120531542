"""The unit of everything that moves."""

import pytest

from bdn.core.chunk import CHUNK_SIZE, ByteRange, chunk_range


def test_a_chunk_is_eight_mebibytes() -> None:
    assert CHUNK_SIZE == 8_388_608


@pytest.mark.parametrize(("size", "index"), [(0, 0), (1, 1), (1, -1), (CHUNK_SIZE, 1), (CHUNK_SIZE + 1, 2)])
def test_a_chunk_outside_the_file_is_refused(size: int, index: int) -> None:
    with pytest.raises(ValueError, match=f"a file of {size} bytes has no chunk {index}"):
        chunk_range(size, index)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (5, 5), (5, 4), (-1, 1)])
def test_an_empty_reversed_or_negative_range_does_not_exist(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not a byte range"):
        ByteRange(start, stop)


def test_the_size_of_a_range_is_its_stop_less_its_start() -> None:
    assert ByteRange(3, 10).size == 7
