"""Sizes, durations and times as people write and read them."""

import re
import sys
from datetime import UTC, datetime
from typing import Final

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
_BYTES = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _BYTES[_letter] = _BYTES[f"{_letter}B"] = 1000**_power
    _BYTES[f"{_letter}I"] = _BYTES[f"{_letter}IB"] = 1024**_power


def parse_size(text: str) -> int:
    """Bytes. ``K M G T P`` (with or without ``B``) are powers of 1000, ``Ki Mi …`` of 1024.

    Raises ``ValueError``: anything else; the message says which forms are accepted.
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text)
    unit = _BYTES.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"not a size: {text!r}; write bytes or a number with a unit, such as 500GB or 64MiB")
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def format_size(size: int) -> str:
    """``1.5 GB``: three significant digits, powers of 1000, for messages and tables."""
    value = float(max(-sys.float_info.max, min(size, sys.float_info.max)))  # others may say anything
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def counted(number: int | None, thing: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def parse_duration(text: str) -> int:
    """Seconds of ``90d``, ``12h``, ``30m``, ``45s`` or ``2w``. Raises ``ValueError``."""
    match = re.fullmatch(r"([0-9]{1,12})([smhdw])", text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a duration such as 90d, 12h, 30m or 45s")
    return int(match[1]) * _SECONDS[match[2]]


def format_duration(seconds: float) -> str:
    """``45s``, ``12m 30s``, ``3h 20m``, ``4d 3h``: two units at most, as people read them."""
    whole = max(0, round(min(seconds, 1e12)))
    if whole < 60:
        return f"{whole}s"
    for large, small, unit, below in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large}{unit} {rest}{below}" if rest else f"{whole // large}{unit}"
    raise AssertionError(whole)


def format_age(seconds: float) -> str:
    """``2 min ago``, in the largest unit of which there are two or more."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def format_time(at: float) -> str:
    """Seconds since the epoch as they stand in sentences: ``2027-01-15 08:00:01Z``."""
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (ValueError, OverflowError, OSError):
        return f"second {max(-1e300, min(at, 1e300)):g}"  # of a clock that is far off
