"""Deadlines against the plain list of everything that came, and a budget that nobody overdraws."""

from math import ceil
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from bdn.core.ring.peer_health import Deadlines, HedgeBudget

MIB = 1024 * 1024
arrivals = st.tuples(st.integers(0, 8 * MIB), st.floats(0, 60))


@given(came=st.lists(st.one_of(arrivals, st.none()), max_size=300), size=st.integers(0, 8 * MIB))
def test_it_is_in_proportion_to_the_percentile_of_the_last_two_hundred(
    came: list[tuple[int, float] | None], size: int
) -> None:
    deadlines = Deadlines()
    paces: list[float] = []

    def tail() -> float:
        last = sorted(paces[-200:])
        return last[ceil(0.99 * len(last)) - 1]

    for one in came:
        if one is not None:
            deadlines.came(*one)
            paces.append(one[1] / (one[0] + MIB))
        elif paces:
            deadlines.left()
            paces.append(tail())
    slack = 4 if len(paces) < 100 else 2
    expected = 300.0 if len(paces) < 8 else min(300.0, max(1.0, slack * tail() * (size + MIB)))
    assert deadlines.deadline(size) == expected


@given(seed=st.integers(0, 10**6))
def test_a_source_that_stays_as_it_is_rarely_meets_its_deadline(seed: int) -> None:
    random, missed = Random(seed), 0
    deadlines = Deadlines(shortest=0.0)
    for _ in range(500):
        seconds = 0.05 + random.expovariate(20)
        if seconds > deadlines.deadline(8 * MIB):
            deadlines.left()
            missed += 1
        else:
            deadlines.came(8 * MIB, seconds)
    assert missed <= 5


@given(stage_size=st.integers(0, 10_000), sizes=st.lists(st.integers(0, 300), max_size=60))
def test_what_was_allowed_is_never_more_than_the_share(stage_size: int, sizes: list[int]) -> None:
    budget = HedgeBudget(stage_size)
    allowed = 0
    for size in sizes:
        fits = (allowed + size) * 20 <= stage_size
        assert budget.take(size) == fits
        allowed += size if fits else 0
        assert budget.used == allowed
