"""The time of the database's machine, as one process knows it."""

from bdn.mirror.db.clock import DatabaseClock


class Clocks:
    """``own`` is set, and steps; ``elapsed`` goes on."""

    def __init__(self) -> None:
        self.own = 1000.0
        self.elapsed = 50.0
        self.now = DatabaseClock(lambda: self.own, lambda: self.elapsed)


def test_rows_are_dated_by_this_machine_s_clock_until_the_database_has_told_its_time() -> None:
    clocks = Clocks()
    assert clocks.now() == 1000.0
    clocks.own += 3600
    assert clocks.now() == 4600.0


def test_rows_are_dated_by_the_database_s_time_however_this_machine_s_clock_is_set_meanwhile() -> None:
    clocks = Clocks()
    clocks.elapsed = 50.2
    clocks.now.set(1300.1, asked_at=50.0)  # it was told half-way
    assert round(clocks.now(), 6) == 1300.2
    clocks.own += 3600
    clocks.elapsed += 7
    assert round(clocks.now(), 6) == 1307.2


def test_an_answer_that_took_long_is_better_than_none_and_worse_than_any() -> None:
    clocks = Clocks()
    clocks.now.set(500.0, asked_at=40.0)
    assert clocks.now() == 505.0
    clocks.now.set(700.0, asked_at=40.0)
    assert clocks.now() == 505.0
