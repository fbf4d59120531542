import logging
import os
from types import SimpleNamespace

import pytest

from bdn.core.cache.index import SpaceLedger
from node_agent.cache.space import Space, TierBudgets
from node_agent.disk.cache_directory import CacheDirectory
from node_agent.settings import load_settings
from tests.support.content.names import named


def fill(monkeypatch: pytest.MonkeyPatch, left: int, **others: int) -> None:
    """A disk of 1000 blocks of 100 bytes, so many of them free."""
    disk = SimpleNamespace(f_blocks=1000, f_frsize=100, f_bavail=left, **others)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)


@pytest.fixture(autouse=True)
def four_in_ten_free(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, 400)


def space_of(disk: CacheDirectory, committed: int = 0, roles: str = "node", **allowed: int | None) -> Space:
    node = SpaceLedger({})
    node.reserve(named("file"), committed)
    node.commit(named("file"))
    return Space(load_settings(roles=roles, **allowed), disk, node=node, cluster=SpaceLedger({}))


@pytest.mark.parametrize(("limit", "headroom", "committed", "budget"), [
    (None, None, 0, 35_000),  # 40,000 free, less 5 % of the disk
    (None, None, 50_000, 85_000),  # what we hold is ours to use
    (None, None, 90_000, 90_000),  # 90 % of the disk at most
    (10_000, None, 0, 10_000),
    (10_000, 39_000, 0, 1_000),  # others have filled the disk: the operator's figure is not there to be had
    (10_000, 50_000, 0, 0),
])  # fmt: skip
def test_the_budget_is_what_is_allowed_and_what_is_really_there(
    disk: CacheDirectory, limit: int | None, headroom: int | None, committed: int, budget: int
) -> None:
    space = space_of(disk, committed, cache_bytes=limit, headroom_bytes=headroom)
    assert space.room().budgets.node == budget


@pytest.mark.parametrize(("percent", "budget"), [(0, 40_000), (20, 20_000), (60, 0)])
def test_headroom_may_be_a_part_of_the_disk(disk: CacheDirectory, percent: int, budget: int) -> None:
    assert space_of(disk, headroom_percent=percent).room().budgets.node == budget
    assert space_of(disk, headroom_percent=percent, headroom_bytes=1_000).room().budgets.node == 39_000


def test_blocks_of_files_in_progress_are_ours_as_well(disk: CacheDirectory) -> None:
    (disk.places.filling / "x.part").write_bytes(b"x" * 8192)
    blocks = (disk.places.filling / "x.part").stat().st_blocks * 512

    assert space_of(disk).room().budgets.node == 35_000 + blocks


def test_chunks_of_the_cluster_tier_are_ours_to_use_and_their_room_is_set_apart(disk: CacheDirectory) -> None:
    space = space_of(disk, 50_000, roles="node,cluster")
    space.cluster.reserve(named("chunk"), 5_000)
    space.cluster.commit(named("chunk"))

    assert space.room().budgets == TierBudgets(node=81_000, cluster=9_000)  # 90,000 are there: a tenth is the cluster's


def test_what_is_held_gives_way_to_others_down_to_what_is_kept_and_the_rest_is_told(
    disk: CacheDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    space = space_of(disk, 40_000, cache_bytes=50_000, headroom_bytes=0)
    found = []
    for left in (400, 0, 10, 200):  # others come, take all, and go; 40,000 are held
        fill(monkeypatch, left - 250)
        room = space.room()
        space.tell(room)
        found.append((room.budgets.node, room.pressed.node))

    assert found == [(50_000, 0), (25_000, 10_000), (25_000, 9_000), (35_000, 0)]
    began, ended = (record.message for record in caplog.records)
    assert began.startswith(f"disk of {disk.places.root}: other data takes up cache space (10 KB over budget)")
    assert ended == f"disk of {disk.places.root}: other data no longer takes up cache space"


def test_the_last_blocks_of_a_million_small_files_are_counted_before_they_are_let_in(disk: CacheDirectory) -> None:
    space = space_of(disk)

    assert space.padding([1, 100, 101, 0]) == 99 + 0 + 99
    assert space.room(padding=5_000).budgets.node == 30_000
    assert space_of(disk, cache_bytes=10_000).room(padding=5_000).budgets.node == 10_000


def test_inodes_that_are_promised_are_not_free_and_some_file_systems_count_none(
    disk: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = space_of(disk)
    space.node.reserve(named("promised"), 1)
    for total, left, expected in ((10, 4, 3), (10, 0, 0), (0, 0, None)):
        fill(monkeypatch, 400, f_files=total, f_favail=left)
        assert space.free_files() == expected
