"""Dates of clocks that are far off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bdn.core.events import Event
from bdn.core.units import format_time
from bdn.wire.event_schema import EventDocument
from bdn.wire.shapes import moment


@pytest.mark.parametrize(
    ("seconds", "date"),
    [
        (0.0, "1970-01-01T00:00:00+00:00"),
        (-1.0, "1969-12-31T23:59:59+00:00"),
        (1_800_000_000.5, "2027-01-15T08:00:00.500000+00:00"),
        (253_402_300_799.0, "9999-12-31T23:59:59+00:00"),
        (253_402_300_800.0, "9999-12-31T23:59:59+00:00"),
        (1e18, "9999-12-31T23:59:59+00:00"),
        (1e308, "9999-12-31T23:59:59+00:00"),
        (-62_135_596_801.0, "0001-01-01T00:00:00+00:00"),
        (-1e308, "0001-01-01T00:00:00+00:00"),
    ],
)
def test_a_time_is_a_date_or_the_nearest_that_there_is(seconds: float, date: str) -> None:
    assert moment(seconds).isoformat() == date


@pytest.mark.parametrize("at", [1e18, -1e18, 1e308, -1e308])
def test_an_agent_whose_clock_is_far_off_shows_its_own_events_and_they_are_read_again(at: float) -> None:
    found = replace(Event.of("found", {"bytes_whole": 10**400, "bytes_total": 10**400}), id="run/1", at=at)

    read = EventDocument.model_validate_json(EventDocument.of(found).model_dump_json()).event()

    assert replace(read, at=at) == found
    assert format_time(read.at).endswith(("9999-12-31 23:59:59Z", "1-01-01 00:00:00Z"))
