"""How the limit of one host moves: what is kept, what is taken back, and how long everybody waits."""

from collections.abc import Callable

import pytest

from bdn.core.pace.limit import Outcome, Pace, PaceRule, Window

MB = 1_000_000
RULE = PaceRule(most=32, first=4)


class Rounds:
    """Rounds of requests of one second each: everybody starts, everybody ends."""

    def __init__(self, rule: PaceRule = RULE) -> None:
        self.now = 100.0
        self.pace = Pace(rule, self.now)

    def round(self, size: Callable[[int], int], workers: int = 1000, outcome: Outcome = Outcome.ARRIVED) -> int:
        """One second; ``size`` tells what each request brings when so many are in flight. Returns how many were."""
        count = 0
        while not self.pace.is_full and count < workers:
            self.pace.take()
            self.pace.began(self.now)
            count += 1
        self.now += 1
        for _ in range(count):
            self.pace.give_back()
            self.pace.ended(self.now, outcome, size(count), 1.0)
        return count

    def rounds(self, number: int, size: Callable[[int], int], workers: int = 1000) -> list[int]:
        return [self.round(size, workers) for _ in range(number)]


def plenty(_: int) -> int:
    return 10 * MB


def shared(total: int) -> Callable[[int], int]:
    """The host gives so much, however many ask; and never more than 10 MB to one."""
    return lambda count: min(10 * MB, total // count)


def test_the_limit_begins_low_and_doubles_while_that_doubles_what_arrives() -> None:
    counts = Rounds().rounds(12, plenty)
    assert counts[0] == 4
    assert sorted(set(counts)) == [4, 8, 16, 32]
    assert counts == sorted(counts)


def test_a_limit_that_brings_nothing_more_is_taken_back() -> None:
    rounds = Rounds()
    counts = rounds.rounds(60, shared(80 * MB))
    assert max(counts) == 16, "8 was worth it, 16 was tried once"
    assert set(counts[20:]) <= {6, 8, 10}
    assert counts[20:].count(8) > 25


def test_of_two_limits_that_bring_the_same_the_lower_one_is_kept() -> None:
    rounds = Rounds()
    rounds.rounds(40, shared(15 * MB))
    assert rounds.pace.limit <= 2


def test_a_limit_that_nobody_needs_does_not_grow() -> None:
    assert Rounds().rounds(30, plenty, workers=3) == [3] * 30
    rounds = Rounds()
    rounds.rounds(30, plenty, workers=3)
    assert rounds.pace.limit == 4


def test_one_refusal_cuts_the_limit_at_once_and_those_in_flight_do_not_cut_it_again() -> None:
    rounds = Rounds()
    rounds.rounds(10, plenty)
    assert rounds.pace.limit == 32
    rounds.round(plenty, outcome=Outcome.REFUSED)
    assert rounds.pace.limit == 22


def test_no_refusal_brings_the_limit_below_the_least() -> None:
    rounds = Rounds(PaceRule(most=32, first=8, least=3))
    for _ in range(20):
        rounds.round(plenty, outcome=Outcome.REFUSED)
    assert rounds.pace.limit == 3
    assert Rounds(PaceRule(most=32, first=2, least=3)).pace.limit == 3


@pytest.mark.parametrize(("failures", "limit"), [(1, 32), (7, 22)])
def test_one_failure_in_a_hundred_is_bad_luck_and_one_in_ten_is_congestion(failures: int, limit: int) -> None:
    rounds = Rounds(PaceRule(most=32, first=32))
    pace = rounds.pace
    for _ in range(64):
        pace.take()
        pace.began(rounds.now)
    rounds.now += 1
    for number in range(64):
        pace.give_back()
        pace.ended(rounds.now, Outcome.FAILED if number < failures else Outcome.ARRIVED, MB, 1.0)
    assert pace.limit <= limit
    assert (pace.limit == 22) == (failures == 7)


def test_answers_that_are_not_about_the_pace_do_not_change_it() -> None:
    rounds = Rounds()
    for _ in range(20):
        rounds.round(plenty, outcome=Outcome.ANSWERED)
    assert rounds.pace.limit == 4


def test_a_host_that_asks_for_a_pause_gets_it_and_a_shorter_one_does_not_shorten_it() -> None:
    pace = Pace(RULE, 100.0)
    assert pace.closed_until <= 100.0
    for seconds in (30.0, 2.0):
        pace.take()
        pace.began(100.0)
        pace.ended(101.0, Outcome.REFUSED, 0, 1.0, seconds)
        assert pace.closed_until == 131.0


def test_a_host_that_asks_for_years_is_asked_again_after_an_hour() -> None:
    pace = Pace(RULE, 100.0)
    pace.take()
    pace.began(100.0)
    pace.ended(100.0, Outcome.REFUSED, 0, 1.0, 1e9)
    assert pace.closed_until == 3700.0


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
    assert measure.in_flight == 3.0
    assert window.seconds(22.0) == 4.0


def test_small_files_after_large_ones_are_not_taken_for_a_slower_host() -> None:
    rounds = Rounds()
    rounds.rounds(20, plenty)
    before = rounds.pace.limit
    rounds.rounds(3, lambda _: 1000)
    assert rounds.pace.limit >= before * 3 // 4, (
        "one trial at most; ten thousand times fewer bytes per second are no news"
    )
