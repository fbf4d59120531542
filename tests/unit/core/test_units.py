"""Sizes, durations and times as people write and read them."""

import pytest

from bdn.core.units import format_age, format_duration, format_size, format_time, parse_duration, parse_size

SIZES = {
    "0": 0, "1048576": 1_048_576, "7B": 7, "1K": 1000, "1KB": 1000, "1Ki": 1024, "64MiB": 64 * 1024**2, "500GB": 500 * 1000**3,
    "2T": 2 * 1000**4, "2TiB": 2 * 1024**4, "1PB": 1000**5, "1PiB": 1024**5, "1.5GB": 1_500_000_000, "0.5 KiB": 512,
    "  10 gb ": 10 * 1000**3, "10mib": 10 * 1024**2, "9007199254740993": 9_007_199_254_740_993,
}  # fmt: skip
SHOWN = {
    0: "0 B", 999: "999 B", 1000: "1 KB", 1500: "1.5 KB", 1_234_567: "1.23 MB", 12_345_678: "12.3 MB", 123_456_789: "123 MB",
    999_600: "1 MB", 10**12: "1 TB", 10**15: "1 PB", 10**18: "1e+03 PB", -1500: "-1.5 KB",
}  # fmt: skip
DURATIONS = {"45s": 45, "30m": 1800, "12h": 43200, "90d": 7776000, "2w": 1209600}
TIMES = {1.8e9: "2027-01-15 08:00:00Z", 0: "1970-01-01 00:00:00Z", 1e18: "second 1e+18", 10**400: "second 1e+300"}


def test_sizes_durations_and_times_are_read_and_shown() -> None:
    assert {text: parse_size(text) for text in SIZES} == SIZES
    assert {size: format_size(size) for size in SHOWN} == SHOWN
    assert {text: parse_duration(text) for text in DURATIONS} == DURATIONS
    assert {at: format_time(at) for at in TIMES} == TIMES


def test_ages_are_given_in_the_largest_unit_of_which_there_are_two() -> None:
    ages = {
        -5: "0 s ago",
        119: "119 s ago",
        120: "2 min ago",
        7199: "119 min ago",
        7200: "2 h ago",
        172_800: "2 days ago",
    }
    assert {seconds: format_age(seconds) for seconds in ages} == ages


@pytest.mark.parametrize(
    "text",
    ["", " ", "GB", "-1", "+1", "1e9", "1,5GB", "1.GB", ".5GB", "1 G B", "12XB", "1GBB", "0x10", "1_000", "9" * 400, "9" * 400 + ".5"],
)  # fmt: skip
def test_any_other_size_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="500GB or 64MiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1.5h", "1y", " 1d", "1d ", "1d1h", "9" * 13 + "s", "\u0661d"])
def test_any_other_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0s"), (59.4, "59s"), (60, "1m"), (750, "12m 30s"), (12_000, "3h 20m"), (356_400, "4d 3h"), (float("inf"), "11574074d 1h"),
])  # fmt: skip
def test_durations_are_written_in_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
