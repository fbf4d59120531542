"""The unit of everything that moves."""

from __future__ import annotations

import pytest

from bdn.core.chunk import CHUNK_SIZE, ByteRange, chunk_count, chunk_range


def test_a_chunk_is_eight_mebibytes() -> None:
    assert CHUNK_SIZE == 8_388_608


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 0),
        (1, 1),
        (CHUNK_SIZE - 1, 1),
        (CHUNK_SIZE, 1),
        (CHUNK_SIZE + 1, 2),
        (3 * CHUNK_SIZE, 3),
        (10**15, 119_209_290),
    ],
)
def test_a_file_has_as_many_chunks_as_it_needs(size: int, count: int) -> None:
    assert chunk_count(size) == count


@pytest.mark.parametrize(
    ("size", "index", "expected"),
    [
        (1, 0, ByteRange(0, 1)),
        (CHUNK_SIZE, 0, ByteRange(0, CHUNK_SIZE)),
        (CHUNK_SIZE + 1, 0, ByteRange(0, CHUNK_SIZE)),
        (CHUNK_SIZE + 1, 1, ByteRange(CHUNK_SIZE, CHUNK_SIZE + 1)),
        (2 * CHUNK_SIZE, 1, ByteRange(CHUNK_SIZE, 2 * CHUNK_SIZE)),
    ],
)
def test_only_the_last_chunk_is_short(size: int, index: int, expected: ByteRange) -> None:
    assert chunk_range(size, index) == expected


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
