"""When what is read in rounds is read again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.pace.rounds import is_round_due

PERIOD = 100.0
TIMES = st.floats(0, 1e6)


@given(TIMES)
def test_what_was_never_read_is_read_at_once(now: float) -> None:
    assert is_round_due(None, PERIOD, now)


@pytest.mark.parametrize("began", [None, 5.0, 50.0])
def test_no_period_is_never(began: float | None) -> None:
    assert not is_round_due(began, 0, 10.0)


@given(TIMES, TIMES)
def test_rounds_begin_a_period_apart(began: float, later: float) -> None:
    assert is_round_due(began, PERIOD, began + later) == (began + later >= began + PERIOD)


@given(TIMES, st.floats(1, 1e6))
def test_a_clock_that_was_set_back_puts_off_nothing(began: float, back: float) -> None:
    assert is_round_due(began, PERIOD, began - back)
