"""Deadlines of chunks, and what may be asked for twice."""

import pytest

from bdn.core.ring.peer_health import Deadlines, HedgeBudget

MIB = 1024 * 1024


def after(*seconds: float) -> Deadlines:
    """What is known after chunks of 7 MiB that took so long."""
    deadlines = Deadlines(shortest=0.01, longest=30.0)
    for one in seconds:
        deadlines.came(7 * MIB, one)
    return deadlines


@pytest.mark.parametrize(("came", "deadline"), [
    ([0.1] * 7, 30.0),  # too few are known
    ([0.1] * 8, 0.4),  # four times while fewer than a hundred are known
    ([0.1] * 99, 0.4),
    ([0.1] * 100, 0.2),
    ([27.0] * 8, 30.0),  # a node whose own link is slow finds nobody late
    ([100.0] * 100, 30.0),
    ([0.0001] * 100, 0.01),
    ([0.1] * 198 + [0.4, 9.0], 0.2),  # twice as long as all but one of a hundred
    ([0.1] * 197 + [0.4, 8.0, 9.0], 0.8),
    ([3.0] * 50 + [0.1] * 197, 6.0),  # only the last two hundred count
    ([3.0] * 50 + [0.1] * 198, 0.2),
    ([0.1] * 200 + [1.0] * 3, 2.0),  # it follows when everything becomes slower
])  # fmt: skip
def test_a_deadline_follows_the_chunks_that_came(came: list[float], deadline: float) -> None:
    assert after(*came).deadline(7 * MIB) == pytest.approx(deadline)


def test_a_smaller_chunk_has_less_time_and_yet_time_to_be_asked_for() -> None:
    deadlines = after(*[0.8] * 100)
    assert deadlines.deadline(3 * MIB) == pytest.approx(0.8)
    assert deadlines.deadline(0) == pytest.approx(0.2)


def test_chunks_that_were_left_move_the_deadline_neither_up_nor_down() -> None:
    deadlines = after(*[0.001 * number for number in range(1, 101)])
    before = deadlines.deadline(7 * MIB)
    for _ in range(1000):
        deadlines.left()
    assert deadlines.deadline(7 * MIB) == before
    nothing_known = after()
    nothing_known.left()
    for _ in range(7):
        nothing_known.came(7 * MIB, 1.0)
    assert nothing_known.deadline(7 * MIB) == 30.0


def test_a_twentieth_of_a_stage_may_be_asked_for_twice() -> None:
    budget = HedgeBudget(1000)
    assert [budget.take(size) for size in (30, 21, 20, 1)] == [True, False, True, False]
    assert (budget.used, budget.limit) == (50, 50)


@pytest.mark.parametrize(("came", "usual"), [
    ([0.1] * 180 + [9.0] * 20, 0.1),  # nine of ten
    ([0.1] * 179 + [9.0] * 21, 9.0),
    ([0.1] * 8, 0.2),  # twice as much while few are known
    ([0.1] * 7, 30.0),
    ([0.0001] * 8, 0.02),  # twice the shortest
])  # fmt: skip
def test_nine_of_ten_chunks_take_what_is_usual(came: list[float], usual: float) -> None:
    assert after(*came).usual(7 * MIB) == pytest.approx(usual)


def test_what_is_common_lately_is_told_by_the_last_sixteen_chunks() -> None:
    known = after(*[9.0] * 50, *[0.1] * 15, 9.0)
    assert known.lately(7 * MIB) == pytest.approx(0.1)
    assert known.common(7 * MIB) == pytest.approx(9.0)
    assert after(*[0.1] * 7).lately(7 * MIB) == 30.0
