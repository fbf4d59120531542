"""What grants open is kept by set, with a bound, and not pushed out by what is read at the same time."""

from bdn.mirror.access.access import OpenedObjects
from tests.fakes.clock import Clock


def objects(count: int) -> frozenset[bytes]:
    return frozenset(bytes([number]) * 32 for number in range(count))


def test_who_was_read_from_least_recently_makes_room() -> None:
    clock = Clock(0.0)
    kept = OpenedObjects(10, clock)
    for set_id in (1, 2, 3):
        kept.keep(set_id, objects(3))
    clock.now = 100.0
    assert kept.get(1) == objects(3)
    clock.now = 150.0
    kept.keep(4, objects(4))
    assert [set_id for set_id in (1, 2, 3, 4) if kept.get(set_id) is not None] == [1, 3, 4]


def test_manifests_that_are_read_from_do_not_push_each_other_out() -> None:
    clock = Clock(0.0)
    kept = OpenedObjects(10, clock)
    kept.keep(1, objects(6))
    assert not kept.make_room(5)
    kept.keep(2, objects(5))
    assert (kept.get(1), kept.get(2)) == (objects(6), None)
    clock.now = 100.0
    assert kept.make_room(5)
    assert kept.get(1) is None


def test_what_is_larger_than_everything_that_is_kept_pushes_nothing_out() -> None:
    clock = Clock(0.0)
    kept = OpenedObjects(10, clock)
    kept.keep(1, objects(6))
    clock.now = 100.0
    assert not kept.make_room(11)
    assert kept.get(1) == objects(6)
