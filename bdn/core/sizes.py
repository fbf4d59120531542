"""Sizes as people write them: ``500GB``, ``64MiB``, ``1048576``."""

from __future__ import annotations

import re
import sys

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}I"] = _UNITS[f"{_letter}IB"] = 1024**_power


def parse_size(text: str) -> int:
    """Bytes. ``K M G T P`` (with or without ``B``) are powers of 1000, ``Ki Mi …`` of 1024.

    Raises:
        ValueError: anything else; the message says which forms are accepted.
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        msg = f"not a size: {text!r}; write bytes or a number with a unit, such as 500GB or 64MiB"
        raise ValueError(msg)
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def format_size(size: int) -> str:
    """``1.5 GB``: three significant digits, powers of 1000, for messages and tables."""
    value = float(max(-sys.float_info.max, min(size, sys.float_info.max)))  # others may say anything
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"
