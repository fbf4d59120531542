"""Whatever a host does, the pace stays within its bounds; and with a host that can be understood, it finds its way."""

from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.pace.limit import Outcome, Pace, PaceRule, Window
from tests.support.mirror.paced_upstream import Capacity, Host, RateLimited, Run, Treatment, simulate

MB = 1_000_000
MOST = 64


def run(host: Host, *, most: int = MOST, seconds: float = 120.0, workers: int = 1000) -> Run:
    return simulate(Pace(PaceRule(most), 0.0), host, seconds=seconds, workers=workers)


treatments = st.tuples(
    st.floats(0.001, 30.0),
    st.sampled_from([0, 1000, 100_000, 8 * 1024 * 1024]),
    st.sampled_from(list(Outcome)),
    st.sampled_from([None, None, None, 0.0, 0.5, 20.0]),
)


@given(most=st.integers(1, 40), treated=st.lists(treatments, min_size=1, max_size=30), workers=st.integers(1, 50))
def test_no_host_brings_the_limit_below_one_or_above_the_most_and_no_request_starts_in_a_pause(
    most: int, treated: list[Treatment], workers: int
) -> None:
    asked = iter(range(10**9))

    def host(_: float, active: int) -> Treatment:
        assert active <= most
        return treated[next(asked) % len(treated)]

    pace = Pace(PaceRule(most), 0.0)
    history = simulate(pace, host, seconds=60.0, workers=workers)
    assert all(1 <= limit <= most for _, limit, _ in history.limits)
    assert pace.active == pace.slots


@given(seed=st.integers(0, 10**6), noise=st.floats(0, 0.3))
def test_the_same_requests_move_it_in_the_same_way(seed: int, noise: float) -> None:
    first, second = (run(Capacity(20 * MB, 300 * MB, noise=noise, random=Random(seed)), seconds=15.0) for _ in range(2))
    assert first.limits == second.limits


HOSTS = [
    pytest.param(50 * MB, 500 * MB, float("inf"), id="enough for ten"),
    pytest.param(50 * MB, 500 * MB, 12, id="enough for ten, and thirteen are too many"),
    pytest.param(50 * MB, 5000 * MB, 12, id="no limit but the collapse"),
    pytest.param(10 * MB, 10_000 * MB, float("inf"), id="never enough"),
    pytest.param(200 * MB, 200 * MB, float("inf"), id="one is enough"),
    pytest.param(200 * MB, 200 * MB, 3, id="one is enough, and four are too many"),
    pytest.param(20 * MB, 1000 * MB, 55, id="far away"),
]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("size", [16 * 1024, 8 * 1024 * 1024])
@pytest.mark.parametrize(("each", "total", "knee"), HOSTS)
def test_it_finds_four_fifths_of_the_best_goodput_and_keeps_them(
    each: int, total: int, knee: float, size: int, noise: float
) -> None:
    scale = size / (8 * MB)  # so that a request takes as long, whatever its size
    host = Capacity(each * scale, total * scale, size, knee, noise)
    history = run(host)
    for start in range(40, 120, 20):
        assert history.goodput(start, start + 20) >= 0.8 * host.best(MOST)


@pytest.mark.parametrize(
    ("each", "total", "most"), [(50 * MB, 500 * MB, 13), (10 * MB, 80 * MB, 10), (10 * MB, 15 * MB, 2.5)]
)
def test_it_uses_no_more_requests_than_the_goodput_needs(each: int, total: int, most: float) -> None:
    limits = [limit for at, limit, _ in run(Capacity(each, total)).limits if at > 40]
    assert sum(limits) / len(limits) <= most


@pytest.mark.parametrize(("each", "total", "most"), [(50 * MB, 500 * MB, 64), (100 * MB, 350 * MB, 16)])
def test_it_goes_down_with_the_capacity_and_up_again(each: int, total: int, most: int) -> None:
    full, less = Capacity(each, total), Capacity(each / 10, total / 10, knee=4)

    def host(now: float, active: int) -> Treatment:
        return (less if 60 <= now < 180 else full)(now, active)

    history = run(host, most=most, seconds=300.0)
    assert history.goodput(30, 60) >= 0.8 * full.best(most)
    assert history.goodput(120, 180) >= 0.8 * less.best(most)
    assert max(limit for at, limit, _ in history.limits if 140 <= at < 180) <= 5
    assert history.goodput(220, 300) >= 0.8 * full.best(most)


@pytest.mark.parametrize("retry_after", [None, 1.0], ids=["429", "429 with a second to wait"])
@pytest.mark.parametrize(("per_second", "latency"), [(50, 0.2), (20, 0.1), (100, 0.05), (1000, 0.05), (20, 0.05)])
def test_it_lives_with_a_limit_of_requests_per_second(
    per_second: int, latency: float, retry_after: float | None
) -> None:
    host = RateLimited(per_second, latency, retry_after)
    history = run(host)
    assert history.requests(40, 120) >= 0.8 * per_second
    assert len(host.refused) <= 0.1 * len(history.starts)


def test_where_one_request_at_a_time_is_too_much_already_nothing_else_is_lost() -> None:
    host = RateLimited(5, 0.1, 1.0)
    assert run(host).requests(40, 120) >= 0.8 * 5


def test_hosts_that_refuse_everything_are_asked_one_request_at_a_time() -> None:
    history = run(lambda _, __: (0.1, 0, Outcome.REFUSED, None), seconds=60.0)
    assert {limit for at, limit, _ in history.limits if at > 5} == {1}


# --- single hosts, each of whose requests takes a second ---


def limits(host: Host, rule: PaceRule, *, workers: int = 1000) -> list[tuple[float, int]]:
    """The limit after every request of the first 30 seconds, with the time."""
    history = simulate(Pace(rule, 0.0), host, seconds=30.0, workers=workers)
    return [(at, limit) for at, limit, _ in history.limits]


def answering(outcome: Outcome, *, since: float = 0.0, until: float = float("inf")) -> Host:
    """Everything arrives, but what is asked for between these times."""
    return lambda now, _: (1.0, 10 * MB, outcome if since <= now < until else Outcome.ARRIVED, None)


def test_the_limit_begins_low_and_doubles_while_that_doubles_what_arrives_and_somebody_needs_it() -> None:
    growing = [limit for at, limit in limits(answering(Outcome.ARRIVED), PaceRule(32)) if at < 13]
    assert sorted(set(growing)) == [4, 8, 16, 32]
    assert growing == sorted(growing)
    assert {limit for _, limit in limits(answering(Outcome.ARRIVED), PaceRule(32), workers=3)} == {4}


def test_one_refusal_cuts_the_limit_at_once_and_those_in_flight_do_not_cut_it_again() -> None:
    cut = [limit for at, limit in limits(answering(Outcome.REFUSED, since=15, until=16), PaceRule(32)) if 15 < at < 17]
    assert set(cut) == {22}


def test_no_refusal_brings_the_limit_below_the_least() -> None:
    assert limits(answering(Outcome.REFUSED), PaceRule(32, first=8, least=3))[-1][1] == 3
    assert Pace(PaceRule(32, first=2, least=3), 0.0).limit == 3


@pytest.mark.parametrize(("failures", "limit"), [(1, 32), (7, 22)])
def test_one_failure_in_a_hundred_is_bad_luck_and_one_in_ten_is_congestion(failures: int, limit: int) -> None:
    numbers = count()

    def host(_: float, __: int) -> Treatment:
        return 1.0, MB, Outcome.FAILED if next(numbers) < failures else Outcome.ARRIVED, None

    assert limits(host, PaceRule(32, first=32))[63][1] == limit


def test_answers_that_are_not_about_the_pace_do_not_change_it() -> None:
    assert {limit for _, limit in limits(answering(Outcome.ANSWERED), PaceRule(32))} == {4}


def test_small_files_after_large_ones_are_not_taken_for_a_slower_host() -> None:
    seen = limits(lambda now, _: (1.0, 10 * MB if now < 15 else 1000, Outcome.ARRIVED, None), PaceRule(32))
    before = max(limit for at, limit in seen if at < 15)
    assert min(limit for at, limit in seen if 15 <= at < 19) >= before * 3 // 4  # one trial at most


@pytest.mark.parametrize(("asked", "closed_until"), [((30.0, 2.0), 131.0), ((1e9,), 3701.0)])
def test_a_host_that_asks_for_a_pause_gets_the_longest_but_for_more_than_an_hour(
    asked: tuple[float, ...], closed_until: float
) -> None:
    pace = Pace(PaceRule(32), 100.0)
    assert pace.closed_until <= 100.0
    for seconds in asked:
        pace.take()
        pace.began(100.0)
        pace.ended(101.0, Outcome.REFUSED, 0, 1.0, seconds)
    assert pace.closed_until == closed_until


def test_what_is_in_flight_is_counted_over_the_time_in_which_anything_was() -> None:
    window = Window(0.0, 0)
    for start in (10.0, 20.0):
        for _ in range(3):
            window.advance(start, 1)
        for _ in range(3):
            window.advance(start + 2, -1)
            window.arrived(MB, 2.0)
    measure = window.measure(22.0)
    assert measure is not None
    assert (measure.in_flight, window.seconds(22.0)) == (3.0, 4.0)
