"""Needs are added up for each file system, and what does not fit is refused with its figures."""

import pytest

from bdn.core.errors import NoRoomError
from bdn.core.room import Need, by_file_system, check_room

STORE, CACHE = Need("the store", "/s", 1, 30, room=100), Need("the cache", "/c", 1, 30, room=60)


def test_needs_of_one_file_system_are_added_up_and_the_nearest_bound_says_what_is_free() -> None:
    one, other = by_file_system([STORE, Need("the files", "/d", 2, 30, room=40), CACHE])
    assert (one.needs, one.needed, one.free) == ((STORE, CACHE), 60, 90)
    assert (other.needed, other.free) == (30, 40)


def test_what_fits_exactly_is_let_pass() -> None:
    check_room("hf://o/m", [STORE, Need("the cache", "/c", 1, 60, room=60)])
    check_room("hf://o/m", [])


def test_each_file_system_that_is_too_small_is_named_with_what_it_would_hold() -> None:
    with pytest.raises(NoRoomError) as refused:
        check_room("hf://o/m", [STORE, Need("the cache", "/c", 1, 61, room=60), Need("the files", "/d", 2, 9, room=0)])
    said = str(refused.value)
    assert (
        "hf://o/m does not fit. 91 B are needed and 90 B free: 30 B for the store at /s, 61 B for the cache at /c"
        in said
    )
    assert "9 B are needed and 0 B free: 9 B for the files at /d" in said
