"""Deadlines of chunks, and what may be asked for twice."""

from __future__ import annotations

import pytest

from bdn.core.ring.hedging import Deadlines, HedgeBudget

MIB = 1024 * 1024


def after(*seconds: float, size: int = 7 * MIB) -> Deadlines:
    deadlines = Deadlines(shortest=0.01, longest=30.0)
    for one in seconds:
        deadlines.came(size, one)
    return deadlines


def test_nobody_is_late_before_eight_chunks_are_known() -> None:
    assert after(*[0.1] * 7).deadline(7 * MIB) == 30.0
    assert after(*[0.1] * 8).deadline(7 * MIB) == pytest.approx(0.4)


def test_a_chunk_may_take_four_times_as_long_while_fewer_than_a_hundred_are_known() -> None:
    assert after(*[0.1] * 99).deadline(7 * MIB) == pytest.approx(0.4)
    assert after(*[0.1] * 100).deadline(7 * MIB) == pytest.approx(0.2)


def test_a_node_whose_own_link_is_slow_finds_nobody_late() -> None:
    assert after(*[27.0] * 8).deadline(7 * MIB) == 30.0
    assert Deadlines().deadline(7 * MIB) == 300.0


def test_a_chunk_may_take_twice_as_long_as_all_but_one_of_a_hundred() -> None:
    assert after(*[0.1] * 198, 0.4, 9.0).deadline(7 * MIB) == pytest.approx(0.2)
    assert after(*[0.1] * 197, 0.4, 8.0, 9.0).deadline(7 * MIB) == pytest.approx(0.8)


def test_only_the_last_two_hundred_count() -> None:
    assert after(*[3.0] * 50, *[0.1] * 197).deadline(7 * MIB) == pytest.approx(6.0)
    assert after(*[3.0] * 50, *[0.1] * 198).deadline(7 * MIB) == pytest.approx(0.2)


def test_a_smaller_chunk_has_less_time_and_yet_time_to_be_asked_for() -> None:
    deadlines = after(*[0.8] * 100)
    assert deadlines.deadline(3 * MIB) == pytest.approx(0.8)
    assert deadlines.deadline(0) == pytest.approx(0.2)


def test_there_is_a_shortest_and_a_longest_deadline() -> None:
    assert after(*[0.0001] * 100).deadline(7 * MIB) == 0.01
    assert after(*[100.0] * 100).deadline(7 * MIB) == 30.0


def test_the_deadline_follows_when_everything_becomes_slower() -> None:
    deadlines = after(*[0.1] * 200, *[1.0] * 3)
    assert deadlines.deadline(7 * MIB) == pytest.approx(2.0)


def test_chunks_that_were_left_move_the_deadline_neither_up_nor_down() -> None:
    deadlines = after(*[0.001 * number for number in range(1, 101)])
    before = deadlines.deadline(7 * MIB)
    for _ in range(1000):
        deadlines.left()
    assert deadlines.deadline(7 * MIB) == before


def test_a_chunk_left_before_anything_is_known_counts_for_nothing() -> None:
    deadlines = Deadlines()
    deadlines.left()
    for _ in range(7):
        deadlines.came(7 * MIB, 1.0)
    assert deadlines.deadline(7 * MIB) == 300.0
    deadlines.came(7 * MIB, 1.0)
    assert deadlines.deadline(7 * MIB) == pytest.approx(4.0)


def test_a_twentieth_of_a_stage_may_be_asked_for_twice() -> None:
    budget = HedgeBudget(1000)
    assert budget.take(30)
    assert not budget.take(21)
    assert budget.take(20)
    assert not budget.take(1)
    assert (budget.used, budget.limit) == (50, 50)


def test_nine_of_ten_chunks_take_what_is_usual_and_twice_as_much_is_said_while_few_are_known() -> None:
    assert after(*[0.1] * 180, *[9.0] * 20).usual(7 * MIB) == pytest.approx(0.1)
    assert after(*[0.1] * 179, *[9.0] * 21).usual(7 * MIB) == pytest.approx(9.0)
    assert after(*[0.1] * 8).usual(7 * MIB) == pytest.approx(0.2)
    assert after(*[0.1] * 7).usual(7 * MIB) == 30.0
    assert after(*[0.0001] * 8).usual(7 * MIB) == 0.02  # twice the shortest


def test_what_is_common_lately_is_told_by_the_last_sixteen_chunks() -> None:
    paces = after(*[9.0] * 50, *[0.1] * 15, 9.0)
    assert paces.lately(7 * MIB) == pytest.approx(0.1)
    assert paces.common(7 * MIB) == pytest.approx(9.0)
    assert after(*[0.1] * 7).lately(7 * MIB) == 30.0
