"""Durations as people write them."""

from __future__ import annotations

import pytest

from bdn.core.units import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("30m", 1800), ("12h", 43200), ("90d", 7776000), ("2w", 1209600)]
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1.5h", "1y", " 1d", "1d ", "1d1h", "9" * 13 + "s", "\u0661d"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)
