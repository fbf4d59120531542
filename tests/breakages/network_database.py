"""Breakages of what holds between the mirror and PostgreSQL when nothing is answered any more."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_SILENT: Final = "tests/promises/test_network_database.py"
_LOCKS: Final = "tests/promises/test_network_database.py"
_POSTGRES: Final = "bdn/mirror/db/postgres.py"
_ALONE: Final = "bdn/mirror/db/alone.py"
_TWO: Final = f"{_LOCKS}::test_what_two_do_at_once_that_one_should_loses_nothing_and_leaves_nothing"

BREAKAGES: Final = [
    Breakage(
        "network",
        _POSTGRES,
        "the pool is asked for as long as it takes whether its connections live",
        'driver.execute("SELECT 1", timeout=PING_SECONDS)',
        'driver.execute("SELECT 1")',
        f"{_SILENT}::test_connections_that_died_silently_in_the_pool_cost_no_request",
    ),
    Breakage(
        "network",
        _POSTGRES,
        "a dead connection is an error and not replaced",
        "raise InvalidatePoolError from error",
        "raise",
        f"{_SILENT}::test_connections_that_died_silently_in_the_pool_cost_no_request",
    ),
    Breakage(
        "network",
        _POSTGRES,
        "a statement has as long as it takes",
        '"command_timeout": statement_seconds',
        '"command_timeout": None',
        f"{_SILENT}::test_a_statement_that_is_not_answered_ends_and_nobody_asks_its_neighbours",
    ),
    Breakage(
        "network",
        _POSTGRES,
        "what lies in the pool beside a connection that fell silent is believed in",
        "isinstance(failure.original_exception, TimeoutError)",
        "False",
        f"{_SILENT}::test_a_statement_that_is_not_answered_ends_and_nobody_asks_its_neighbours",
    ),
    Breakage(
        "network",
        _POSTGRES,
        "a server may let somebody in and say nothing",
        '"timeout": CONNECT_SECONDS',
        '"timeout": 1000 * CONNECT_SECONDS',
        f"{_SILENT}::test_a_server_that_lets_in_and_says_nothing_is_not_waited_for",
        also=(f"{_SILENT}::test_a_mirror_whose_database_falls_silent_says_so_and_goes_on_without_a_restart",),
    ),
    Breakage(
        "network",
        "bdn/mirror/db/errors.py",
        "no answer in time is for ever",
        "return isinstance(error, (OSError, PoolTimeoutError))",
        "return False",
        f"{_SILENT}::test_a_server_that_lets_in_and_says_nothing_is_not_waited_for",
    ),
    Breakage(
        "network",
        _ALONE,
        "a lock is believed in without confirmation",
        "belief = asyncio.timeout(BELIEF_SECONDS)",
        "belief = asyncio.timeout(None)",
        f"{_LOCKS}::test_who_held_a_lock_across_a_network_that_fell_silent_stops_before_another_begins",
    ),
    Breakage(
        "network",
        _ALONE,
        "who lost the session is told when it would have run out",
        "        belief.reschedule(now())",
        "        belief.reschedule(now() + BELIEF_SECONDS)",
        f"{_LOCKS}::test_who_lost_the_session_hears_of_it_at_once",
    ),
    Breakage(
        "network",
        "bdn/mirror/db/alone.py",
        "who stands still keeps the lock",
        "select(forgotten, lock))).one()[1]",
        "select(true(), lock))).one()[1]",
        f"{_LOCKS}::test_who_stands_still_is_forgotten_and_finds_out_when_he_goes_on",
    ),
    Breakage(
        "network",
        "bdn/mirror/db/database.py",
        "a second writer of the same row fails",
        ".on_conflict_do_nothing()",
        "",
        f"{_TWO}[nobody is alone]",
    ),
    Breakage(
        "collection",
        "bdn/store/directory.py",
        "two collectors have one name for what lies aside",
        'self._aside / f"{chunk.digest.hex}-{self._own_name()}"',
        "self._aside / chunk.digest.hex",
        "tests/unit/store/test_directory_collecting.py::test_a_chunk_that_is_put_anew_while_two_collect_it_stays",
    ),
]
