"""The time of the database's machine, as one process knows it."""

from bdn.mirror.db.clock import DatabaseClock


def test_rows_are_dated_by_the_database_s_time_whatever_this_machine_s_clock_says() -> None:
    own = 1000.0
    now = DatabaseClock(lambda: own)
    assert (now(), now.own(), now.is_old()) == (1000.0, 1000.0, True)
    own = 1000.2
    now.set(1300.1, asked_at=1000.0)  # it was told half-way
    assert (round(now(), 6), now.own(), now.is_old()) == (1300.2, 1000.2, False)
    own = 1007.2
    assert round(now(), 6) == 1307.2


def test_an_answer_that_took_long_is_better_than_none_and_worse_than_any() -> None:
    own = 1000.0
    now = DatabaseClock(lambda: own)
    now.set(500.0, asked_at=990.0)
    assert now() == 505.0
    now.set(700.0, asked_at=990.0)
    assert now() == 505.0
