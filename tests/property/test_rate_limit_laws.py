"""Limits hold in every period, and classes get what they are due, whoever asks when."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.pace.rate_limit import SHARE, BandwidthTurn, RateLimit, TokenBucket, TrafficClass

BURST = 100
rates = st.integers(1, 1000)
sizes = st.integers(1, BURST)
pauses = st.floats(0, 5, allow_nan=False)
classes = st.sampled_from(TrafficClass)
ROUNDING = 1e-6


def keeps_to(flows: list[tuple[float, int]], rate: float) -> bool:
    """Whether no period, from any flow to any later one, has more than rate x period + burst."""
    return all(
        sum(size for _, size in flows[start : stop + 1]) <= rate * (flows[stop][0] - flows[start][0]) + BURST + ROUNDING
        for start in range(len(flows))
        for stop in range(start, len(flows))
    )


@given(rate=rates, steps=st.lists(st.tuples(pauses, sizes), max_size=20))
def test_bytes_that_wait_for_their_reservation_keep_to_the_rate_in_every_period(
    rate: int, steps: list[tuple[float, int]]
) -> None:
    bucket, flows, now = TokenBucket(rate, BURST, 0.0), [], 0.0
    for pause, size in steps:
        now += pause
        flows.append((now + bucket.reserve(size, now), size))
    assert keeps_to(flows, rate)
    assert [at for at, _ in flows] == sorted(at for at, _ in flows)  # nobody is overtaken


@given(rate=rates, steps=st.lists(st.tuples(pauses, sizes), max_size=20))
def test_bytes_that_are_taken_keep_to_the_rate_in_every_period(rate: int, steps: list[tuple[float, int]]) -> None:
    bucket, flows, now = TokenBucket(rate, BURST, 0.0), [], 0.0
    for pause, size in steps:
        now += pause
        if bucket.take(size, now):
            flows.append((now, size))
        else:
            now += bucket.seconds_until(size, now) + ROUNDING
            assert bucket.take(size, now)
            flows.append((now, size))
    assert keeps_to(flows, rate * (1 + ROUNDING))


@given(rate=rates, moments=st.lists(pauses, min_size=2, max_size=10))
def test_a_clock_that_is_read_in_another_order_gives_nothing_away(rate: int, moments: list[float]) -> None:
    bucket = TokenBucket(rate, BURST, 0.0)
    taken = sum(bucket.take(1, now) for now in moments for _ in range(BURST))
    assert taken <= rate * max(moments) + BURST + ROUNDING


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_a_limit_that_lets_nothing_through_is_refused(rate: float, burst: int) -> None:
    with pytest.raises(ValueError, match="nothing through"):
        TokenBucket(rate, burst, 0.0)


def test_a_turn_that_the_bucket_can_never_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the burst"):
        RateLimit(1, BURST, 0.0).ask(TrafficClass.STAGE, BURST + 1)


def run_dry(limit: RateLimit, now: float = 0.0) -> list[tuple[float, BandwidthTurn]]:
    """Grant until nobody waits, each time as late as the limit itself says."""
    granted: list[tuple[float, BandwidthTurn]] = []
    for _ in range(1000):
        granted += [(now, turn) for turn in limit.grant(now)]
        seconds = limit.seconds_until_next(now)
        if seconds is None:
            return granted
        now += seconds + ROUNDING
    raise AssertionError("somebody waits forever")


@given(rate=rates, turns=st.lists(st.tuples(classes, sizes, st.booleans()), max_size=40))
def test_who_does_not_withdraw_is_granted_once_in_the_order_of_its_class_and_within_the_rate(
    rate: int, turns: list[tuple[TrafficClass, int, bool]]
) -> None:
    limit = RateLimit(rate, BURST, 0.0)
    waiting = [(limit.ask(traffic, size), stays) for traffic, size, stays in turns]
    for turn, stays in waiting:
        if not stays:
            limit.withdraw(turn)
    granted = run_dry(limit)
    assert keeps_to([(at, turn.size) for at, turn in granted], rate * (1 + ROUNDING))
    for traffic in TrafficClass:
        theirs = [turn for turn, stays in waiting if stays and turn.traffic is traffic]
        assert [turn for _, turn in granted if turn.traffic is traffic] == theirs


@given(turns=st.lists(st.tuples(classes, sizes), max_size=40))
def test_while_a_class_waits_lower_ones_have_at_most_their_share(turns: list[tuple[TrafficClass, int]]) -> None:
    limit = RateLimit(10, BURST, 0.0)
    for traffic, size in turns:
        limit.ask(traffic, size)
    order = [turn for _, turn in run_dry(limit)]
    for lower in (TrafficClass.PREFETCH, TrafficClass.SCRUB):
        last = max((at for at, turn in enumerate(order) if turn.traffic < lower), default=-1)
        before = order[: last + 1]
        theirs = sum(turn.size for turn in before if turn.traffic is lower)
        assert theirs <= SHARE * sum(turn.size for turn in before if turn.traffic < lower) + ROUNDING


@given(
    lower=st.sampled_from([TrafficClass.PREFETCH, TrafficClass.SCRUB]),
    wanted=sizes,
    others=st.lists(sizes, max_size=60),
)
def test_a_class_that_waits_is_granted_once_its_share_has_come(
    lower: TrafficClass, wanted: int, others: list[int]
) -> None:
    limit = RateLimit(10, BURST, 0.0)
    turn = limit.ask(lower, wanted)
    for size in others:
        limit.ask(TrafficClass.STAGE, size)
    order = [one for _, one in run_dry(limit)]
    before = [one.size for one in order[: order.index(turn)]]
    owed = [*accumulate(SHARE * size for size in before)]
    assert not owed or owed[-1] - SHARE * before[-1] < wanted  # it was not due before the last of them


def test_a_clock_that_was_read_earlier_takes_nothing_away() -> None:
    bucket = TokenBucket(10, BURST, 0.0)
    assert bucket.take(1, 5.0)
    assert bucket.take(BURST - 1, 0.0)


def test_a_share_is_not_saved_up_by_who_does_not_wait() -> None:
    limit = RateLimit(10, BURST, 0.0)
    for _ in range(3):
        limit.ask(TrafficClass.STAGE, 100)
        limit.ask(TrafficClass.PREFETCH, 20)
        run_dry(limit)
    prefetch = limit.ask(TrafficClass.PREFETCH, 10)
    limit.ask(TrafficClass.STAGE, 10)
    assert run_dry(limit)[-1][1] is prefetch


def test_half_a_bucket_is_waited_for_half_as_long_and_a_full_one_not_at_all() -> None:
    bucket = TokenBucket(10, BURST, 0.0)
    assert (bucket.reserve(BURST // 2, 0.0), bucket.seconds_until(BURST, 0.0)) == (0.0, 5.0)
    assert bucket.reserve(BURST, 0.0) == 5.0
    assert bucket.reserve(1, 100.0) == 0.0


def test_who_gave_up_waiting_and_comes_again_is_owed_nothing() -> None:
    limit = RateLimit(1, BURST, 0.0)
    gone = limit.ask(TrafficClass.SCRUB, BURST)
    for _ in range(2):
        limit.ask(TrafficClass.STAGE, BURST // 2)
    limit.grant(0.0)  # the scrub is owed five bytes by now
    limit.withdraw(gone)
    scrub, stage = limit.ask(TrafficClass.SCRUB, 1), limit.ask(TrafficClass.STAGE, 1)
    assert limit.grant(1.0) == [stage]
    assert not scrub.is_granted
