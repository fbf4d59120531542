"""A limit holds in every period, whatever is reserved when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.pace.rate_limit import TokenBucket

BURST = 100
rates = st.integers(1, 1000)
sizes = st.integers(1, BURST)
pauses = st.floats(0, 5, allow_nan=False)
ROUNDING = 1e-6


def keeps_to(flows: list[tuple[float, int]], rate: float) -> bool:
    """Whether no period, from any flow to any later one, has more than rate x period + burst."""
    return all(
        sum(size for _, size in flows[start : stop + 1]) <= rate * (flows[stop][0] - flows[start][0]) + BURST + ROUNDING
        for start in range(len(flows))
        for stop in range(start, len(flows))
    )


@given(rate=rates, steps=st.lists(st.tuples(pauses, sizes), max_size=20), is_patient=st.booleans())
def test_bytes_that_wait_for_their_reservation_or_before_it_keep_to_the_rate_in_every_period(
    rate: int, steps: list[tuple[float, int]], *, is_patient: bool
) -> None:
    bucket, flows, now = TokenBucket(rate, BURST, 0.0), [], 0.0
    for pause, size in steps:
        now += pause
        if is_patient:
            now += bucket.seconds_until(size, now)
            assert bucket.reserve(size, now) == pytest.approx(0, abs=ROUNDING)
            flows.append((now, size))
        else:
            flows.append((now + bucket.reserve(size, now), size))
    assert keeps_to(flows, rate)
    assert [at for at, _ in flows] == sorted(at for at, _ in flows)  # no caller is overtaken


@given(rate=rates, moments=st.lists(pauses, min_size=2, max_size=10))
def test_a_clock_that_is_read_in_another_order_gives_nothing_away(rate: int, moments: list[float]) -> None:
    bucket = TokenBucket(rate, BURST, 0.0)
    taken = sum(bucket.reserve(1, now) == 0.0 for now in moments for _ in range(BURST))
    assert taken <= rate * max(moments) + BURST + ROUNDING


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_a_limit_that_lets_nothing_through_is_refused(rate: float, burst: int) -> None:
    with pytest.raises(ValueError, match="nothing through"):
        TokenBucket(rate, burst, 0.0)


def test_a_clock_that_was_read_earlier_takes_nothing_away() -> None:
    bucket = TokenBucket(10, BURST, 0.0)
    assert bucket.reserve(1, 5.0) == bucket.reserve(BURST - 1, 0.0) == 0.0


def test_half_a_bucket_is_waited_for_half_as_long_and_a_full_one_not_at_all() -> None:
    bucket = TokenBucket(10, BURST, 0.0)
    assert (bucket.reserve(BURST // 2, 0.0), bucket.seconds_until(BURST, 0.0)) == (0.0, 5.0)
    assert bucket.reserve(BURST, 0.0) == 5.0
    assert bucket.reserve(1, 100.0) == 0.0
