"""Durations in text: how people write them on a command line."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
_FORM: Final = re.compile(r"([0-9]{1,12})([smhdw])")


def parse_duration(text: str) -> int:
    """Seconds of ``90d``, ``12h``, ``30m``, ``45s`` or ``2w``. Raises ``ValueError``."""
    match = _FORM.fullmatch(text)
    if match is None:
        msg = f"{text[:40]!r} is not a duration such as 90d, 12h, 30m or 45s"
        raise ValueError(msg)
    return int(match[1]) * _UNITS[match[2]]
