"""Settling agrees with a slow reading of all looks, whatever jobs do; and the cases that tell a rename from what resembles one."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bdn.core.training.checkpoints import is_looked_at
from bdn.core.training.settling import Folder, Settling, Stamp

SETTLE, REST = 30.0, 5.0
NAMES = ["checkpoint-1", "checkpoint-2", "tmp-a", ".b"]
names, paths = st.sampled_from(NAMES), st.sampled_from(["model", "optimizer", ".metadata"])
Tree = dict[str, Stamp]
Look = tuple[float, dict[str, Tree], dict[str, Folder]]


class World:
    """A directory in memory, where inodes are given away again as soon as they are free, and times never repeat."""

    def __init__(self) -> None:
        self.folders: dict[str, tuple[Folder, Tree]] = {}
        self.ticks = 0

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def make(self, name: str) -> None:
        if name not in self.folders:
            taken = {folder.inode for folder, _ in self.folders.values()}
            inode = min(set(range(len(taken) + 1)) - taken)
            self.folders[name] = Folder(1, inode, self.tick()), {}

    def write(self, name: str, path: str) -> None:
        self.make(name)
        now = self.tick()
        self.folders[name][1][path] = Stamp(7, now, now, hash(path) % 100, 1)

    def rename(self, old: str, new: str) -> None:
        if old in self.folders and old != new:
            self.folders[new] = self.folders.pop(old)

    def look(self, now: float) -> Look:
        checkpoints = {name: dict(files) for name, (_, files) in self.folders.items() if files and is_looked_at(name)}
        return now, checkpoints, {name: folder for name, (folder, _) in self.folders.items()}


class SettlingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.settling = Settling(SETTLE, REST)
        self.looks: list[Look] = []
        self.now = 1000.0

    @rule(name=names)
    def make(self, name: str) -> None:
        self.world.make(name)

    @rule(name=names, path=paths)
    def write(self, name: str, path: str) -> None:
        self.world.write(name, path)

    @rule(name=names, path=paths)
    def unlink(self, name: str, path: str) -> None:
        if name in self.world.folders:
            self.world.folders[name][1].pop(path, None)

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.world.folders.pop(name, None)

    @rule(old=names, new=names)
    def rename(self, old: str, new: str) -> None:
        self.world.rename(old, new)

    @rule(seconds=st.sampled_from([0.0, 2.0, 4.9, 5.0, 29.9, 30.0, 600.0]))
    def look(self, seconds: float) -> None:
        self.now += seconds
        self.looks.append(self.world.look(self.now))
        self.settling.look(*self.looks[-1])

    @precondition(lambda self: self.looks)
    @invariant()
    def it_says_what_all_looks_say(self) -> None:
        for name in NAMES:
            assert self.settling.is_settled(name, self.now) is self.settled(name), name
            assert self.settling.rested(name, self.now) == self.rested(name), name

    def settled(self, name: str) -> bool:
        files = self.looks[-1][1].get(name)
        if files is None:
            return False
        first = self.first(lambda look: look[1].get(name) == files)
        return self.now - self.looks[first][0] >= SETTLE or self.came_by_rename(name, first)

    def rested(self, name: str) -> set[str]:
        return {
            path
            for path, stamp in self.looks[-1][1].get(name, {}).items()
            if self.now - self.looks[self.first(lambda look: look[1].get(name, {}).get(path) == stamp)][0] >= REST  # noqa: B023
        }

    def first(self, holds: object) -> int:
        """The first of the looks up to the last of which all are like this."""
        assert callable(holds)
        at = len(self.looks) - 1
        while at and holds(self.looks[at - 1]):
            at -= 1
        return at

    def came_by_rename(self, name: str, at: int) -> bool:
        folder = self.looks[at][2][name]
        if at and self.looks[at - 1][2].get(name) == folder:
            return False
        for before in (at - 1, at - 2):
            known = {found: other for other, found in self.looks[before][2].items()} if before >= 0 else {}
            if folder in known:
                return known[folder] != name
        return False


TestSettling = SettlingMachine.TestCase


@pytest.fixture(name="world")
def a_world() -> World:
    return World()


def looked(world: World, settling: Settling, now: float) -> bool:
    settling.look(*world.look(now))
    return settling.is_settled("checkpoint-1", now)


def test_a_folder_that_was_renamed_settles_at_once_and_rests_again_once_it_changes(world: World) -> None:
    settling = Settling(SETTLE)
    world.write("tmp-a", "model")
    assert not looked(world, settling, 0)
    world.write("tmp-a", "optimizer")  # written to the end and renamed, between two looks
    world.rename("tmp-a", "checkpoint-1")
    assert looked(world, settling, 2)
    assert looked(world, settling, 4)

    world.write("checkpoint-1", "model")

    assert [looked(world, settling, now) for now in (6, 8, 35.9, 36)] == [False, False, False, True]


def test_a_folder_that_takes_the_place_of_another_by_a_rename_settles_at_once(world: World) -> None:
    settling = Settling(SETTLE)
    world.write("checkpoint-1", "model")
    world.write(".b", "model")
    assert not looked(world, settling, 0)

    world.folders.pop("checkpoint-1")
    world.rename(".b", "checkpoint-1")

    assert looked(world, settling, 2)


def test_a_new_folder_with_the_inode_of_a_temporary_one_has_to_rest(world: World) -> None:
    settling = Settling(SETTLE)
    world.write("tmp-a", "model")
    looked(world, settling, 0)
    inode = world.folders.pop("tmp-a")[0].inode

    world.write("checkpoint-1", "model")

    assert world.folders["checkpoint-1"][0].inode == inode
    assert not looked(world, settling, 2)


def test_a_folder_that_was_renamed_empty_has_to_rest_once_it_is_written(world: World) -> None:
    settling = Settling(SETTLE)
    world.make("tmp-a")
    looked(world, settling, 0)
    world.rename("tmp-a", "checkpoint-1")
    looked(world, settling, 2)

    world.write("checkpoint-1", "model")

    assert not looked(world, settling, 4)


def test_a_rename_during_a_look_which_finds_neither_name_is_seen_by_the_next(world: World) -> None:
    settling = Settling(SETTLE)
    world.write("tmp-a", "model")
    looked(world, settling, 0)
    settling.look(2, {}, {})
    world.rename("tmp-a", "checkpoint-1")

    assert looked(world, settling, 4)


def test_times_of_files_settle_nothing(world: World) -> None:
    """They are as old as the job says, and its clock jumps."""
    settling = Settling(SETTLE)
    world.make("checkpoint-1")
    world.folders["checkpoint-1"][1]["model"] = Stamp(1, 0, 0, 1, 1)
    assert not looked(world, settling, 1e9)
    world.folders["checkpoint-1"][1]["model"] = Stamp(1, -(10**18), 10**19, 1, 1)

    assert not looked(world, settling, 1e9 + 29)
