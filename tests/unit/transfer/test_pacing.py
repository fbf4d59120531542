"""How long threads wait before they send."""

import pytest

from bdn.transfer.pacing import Pacer, pacer

MIB = 1024 * 1024


class SetClock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_goes_at_once_and_what_follows_waits_for_the_rate() -> None:
    pace = Pacer(MIB, SetClock())
    assert [pace(MIB) for _ in range(3)] == pytest.approx([0.0, 1.0, 2.0])


def test_time_that_passes_pays_for_what_was_sent() -> None:
    clock = SetClock()
    pace = Pacer(MIB, clock)
    pace(3 * MIB)
    clock.now = 2.0
    assert pace(MIB) == pytest.approx(1.0)


def test_no_rate_is_no_pacer() -> None:
    assert pacer(None) is None
