"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from bdn.core.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1_048_576),
        ("7B", 7),
        ("1K", 1000),
        ("1KB", 1000),
        ("1Ki", 1024),
        ("64MiB", 64 * 1024**2),
        ("500GB", 500 * 1000**3),
        ("2T", 2 * 1000**4),
        ("2TiB", 2 * 1024**4),
        ("1PB", 1000**5),
        ("1PiB", 1024**5),
        ("1.5GB", 1_500_000_000),
        ("0.5 KiB", 512),
        ("  10 gb ", 10 * 1000**3),
        ("10mib", 10 * 1024**2),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_bytes_and_units_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "GB", "-1", "+1", "1e9", "1,5GB", "1.GB", ".5GB", "1 G B", "12XB", "1GBB", "0x10", "1_000", "9" * 400],
)
def test_anything_else_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="500GB or 64MiB"):
        parse_size(text)


def test_a_number_beyond_every_disk_is_refused_like_any_other_text() -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size("9" * 400 + ".5")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1500, "1.5 KB"),
        (1_234_567, "1.23 MB"),
        (12_345_678, "12.3 MB"),
        (123_456_789, "123 MB"),
        (999_600, "1 MB"),
        (10**12, "1 TB"),
        (10**15, "1 PB"),
        (10**18, "1e+03 PB"),
        (-1500, "-1.5 KB"),
    ],
)
def test_a_size_is_shown_with_three_significant_digits(size: int, shown: str) -> None:
    assert format_size(size) == shown
