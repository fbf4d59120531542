"""Whatever a host does, the pace stays within its bounds; and with a host that can be understood, it finds its way."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.pace.limit import Outcome, Pace, PaceRule
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


def test_it_uses_no_more_requests_than_the_goodput_needs() -> None:
    history = run(Capacity(50 * MB, 500 * MB))
    limits = [limit for at, limit, _ in history.limits if at > 40]
    assert sum(limits) / len(limits) <= 13


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
