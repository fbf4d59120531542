"""What grants open is kept by manifest, with a bound, and not pushed out by what is read at the same time."""

from bdn.mirror.access.access import OpenedObjects


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def objects(count: int) -> frozenset[bytes]:
    return frozenset(bytes([number]) * 32 for number in range(count))


def test_who_was_read_from_least_recently_makes_room() -> None:
    clock = Clock()
    kept = OpenedObjects(10, clock)
    for name in "abc":
        kept.keep((name, "o"), objects(3))
    clock.now = 100.0
    assert kept.get(("a", "o")) == objects(3)
    clock.now = 150.0
    kept.keep(("d", "o"), objects(4))
    assert [name for name in "abcd" if kept.get((name, "o")) is not None] == ["a", "c", "d"]


def test_manifests_that_are_read_from_do_not_push_each_other_out() -> None:
    clock = Clock()
    kept = OpenedObjects(10, clock)
    kept.keep(("a", "o"), objects(6))
    assert not kept.make_room(5)
    kept.keep(("b", "o"), objects(5))
    assert (kept.get(("a", "o")), kept.get(("b", "o"))) == (objects(6), None)
    clock.now = 100.0
    assert kept.make_room(5)
    assert kept.get(("a", "o")) is None


def test_what_is_larger_than_everything_that_is_kept_pushes_nothing_out() -> None:
    clock = Clock()
    kept = OpenedObjects(10, clock)
    kept.keep(("a", "o"), objects(6))
    clock.now = 100.0
    assert not kept.make_room(11)
    assert kept.get(("a", "o")) == objects(6)
