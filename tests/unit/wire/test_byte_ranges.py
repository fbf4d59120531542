"""HTTP byte ranges, both ways: RFC 9110, section 14."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bdn.core.chunk import ByteRange
from bdn.wire.http_fields import (
    UnsatisfiableRangeError,
    format_content_range,
    format_range,
    parse_content_range,
    parse_range,
)
from tests.support.network.hypothesis import BRIEFLY

SIZES = st.integers(min_value=0, max_value=2**50)
POSITIONS = st.integers(min_value=0, max_value=2**50)


@st.composite
def ranges_and_sizes(draw: st.DrawFn) -> tuple[ByteRange, int]:
    """A range inside a size."""
    size = draw(st.integers(min_value=1, max_value=2**50))
    start = draw(st.integers(min_value=0, max_value=size - 1))
    return ByteRange(start, draw(st.integers(min_value=start + 1, max_value=size))), size


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-9", ByteRange(0, 10)),
        ("bytes=99-99", ByteRange(99, 100)),
        ("bytes=10-", ByteRange(10, 100)),
        ("bytes=-10", ByteRange(90, 100)),
        ("bytes=-1000", ByteRange(0, 100)),
        ("bytes=50-1000", ByteRange(50, 100)),
        ("bytes=0-" + "9" * 30, ByteRange(0, 100)),
        ("Bytes=0-9", ByteRange(0, 10)),
        ("bytes= 0-9 ", ByteRange(0, 10)),
    ],
)
def test_a_range_is_the_part_that_exists(header: str, expected: ByteRange) -> None:
    assert parse_range(header, 100) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0", "bytes=" + "9" * 30 + "-"])
def test_a_range_of_nothing_is_unsatisfiable(header: str) -> None:
    with pytest.raises(UnsatisfiableRangeError):
        parse_range(header, 100)


@pytest.mark.parametrize("header", ["bytes=0-", "bytes=0-0", "bytes=-5"])
def test_no_range_of_an_empty_chunk_can_be_satisfied(header: str) -> None:
    with pytest.raises(UnsatisfiableRangeError):
        parse_range(header, 0)


@pytest.mark.parametrize(
    "header",
    [
        None, "", "bytes", "bytes=", "bytes=-", "bytes=9-0", "bytes=a-b", "bytes=0-9,20-29", "bytes=0-9,", "bytes=0 - 9",
        "bytes=0--9", "bytes=+0-9", "bytes=1.0-2", "items=0-9", "0-9", "bytes=0-9;", "bytes=\u0660-\u0669",
        "bytes=0-" + "9" * 5000,
    ],
)  # fmt: skip
def test_what_is_not_one_range_of_bytes_is_ignored(header: str | None) -> None:
    assert parse_range(header, 100) is None


@BRIEFLY
@given(case=ranges_and_sizes())
@example(case=(ByteRange(0, 1), 1))
def test_a_range_survives_being_written_and_read(case: tuple[ByteRange, int]) -> None:
    asked, size = case
    assert parse_range(format_range(asked), size) == asked
    assert parse_content_range(format_content_range(asked, size)) == (asked, size)


@BRIEFLY
@given(first=POSITIONS | st.none(), last=POSITIONS | st.none(), size=SIZES)
def test_no_range_reaches_outside_the_size(first: int | None, last: int | None, size: int) -> None:
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    try:
        part = parse_range(header, size)
    except UnsatisfiableRangeError:
        assert first is None or first >= size
        return
    if part is None:
        assert (first is None and last is None) or (first is not None and last is not None and last < first)
        return
    assert 0 <= part.start < part.stop <= size
    expected = size - min(last or 0, size) if first is None else first
    assert part.start == expected


@BRIEFLY
@given(header=st.text(alphabet="bytes=0123456789-, /*", max_size=30), size=st.integers(min_value=0, max_value=1000))
def test_no_header_makes_a_range_outside_the_size(header: str, size: int) -> None:
    try:
        part = parse_range(header, size)
    except UnsatisfiableRangeError:
        return
    assert part is None or part.stop <= size
    stated = parse_content_range(header)
    assert stated is None or stated[0].stop <= stated[1]


@pytest.mark.parametrize(
    "header",
    [
        None, "", "bytes 0-9", "bytes 0-9/*", "bytes */100", "bytes 9-0/100", "bytes 0-9/9", "bytes 0-9/0", "bytes=0-9/100",
        "bytes 0-9/100 ", "bytes -9/100", "bytes 0-/100", "items 0-9/100", "bytes 0-9/" + "9" * 5000,
    ],
)  # fmt: skip
def test_an_answer_says_which_bytes_of_how_many_or_says_nothing(header: str | None) -> None:
    assert parse_content_range(header) is None


def test_the_last_byte_may_be_the_files_last() -> None:
    assert parse_content_range("bytes 0-9/10") == (ByteRange(0, 10), 10)
