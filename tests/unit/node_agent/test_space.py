from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from bdn.core.ledger import SpaceLedger
from bdn.core.tier_budgets import TierBudgets
from node_agent.cache.space import Allowed, Space
from node_agent.disk.aside import Aside
from node_agent.disk.places import Places
from tests.support.names import named


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """A disk of 1000 blocks of 100 bytes, 400 of them free."""
    places = Places(tmp_path)
    places.make()
    disk = SimpleNamespace(f_blocks=1000, f_frsize=100, f_bavail=400)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    return places


def space_of(places: Places, allowed: Allowed, committed: int = 0, roles: tuple[str, ...] = ("node",)) -> Space:
    node = SpaceLedger()
    node.reserve(named("file"), committed)
    node.commit(named("file"))
    return Space(places, Aside(), allowed, roles, node, SpaceLedger())


@pytest.mark.parametrize(
    ("limit", "headroom", "committed", "budget"),
    [
        (None, None, 0, 35_000),  # 40,000 free, less 5 % of the disk
        (None, None, 50_000, 85_000),  # what we hold is ours to use
        (None, None, 90_000, 90_000),  # 90 % of the disk at most
        (10_000, None, 0, 10_000),
        (10_000, 39_000, 0, 1_000),  # others have filled the disk: the operator's figure is not there to be had
        (10_000, 50_000, 0, 0),
    ],
)
def test_the_budget_is_what_is_allowed_and_what_is_really_there(
    places: Places, limit: int | None, headroom: int | None, committed: int, budget: int
) -> None:
    assert space_of(places, Allowed(limit, headroom), committed).budgets().node == budget


def test_blocks_of_files_in_progress_are_ours_as_well(places: Places) -> None:
    (places.filling / "x.part").write_bytes(b"x" * 8192)
    blocks = (places.filling / "x.part").stat().st_blocks * 512

    assert space_of(places, Allowed()).budgets().node == 35_000 + blocks


def test_chunks_of_the_cluster_tier_are_ours_to_use_and_their_room_is_set_apart(places: Places) -> None:
    space = space_of(places, Allowed(), 50_000, roles=("node", "cluster"))
    space.cluster.reserve(named("chunk"), 5_000)
    space.cluster.commit(named("chunk"))

    assert space.budgets() == TierBudgets(node=81_000, cluster=9_000)  # 90,000 are there: a tenth is the cluster's


def test_when_others_fill_the_disk_the_cluster_tier_shrinks_last(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = space_of(places, Allowed(), roles=("node", "cluster"))
    assert space.budgets() == TierBudgets(node=31_500, cluster=3_500)
    for left, expected in ((90, TierBudgets(500, 3_500)), (70, TierBudgets(0, 2_000)), (0, TierBudgets(0, 0))):
        disk = SimpleNamespace(f_blocks=1000, f_frsize=100, f_bavail=left)
        monkeypatch.setattr(os, "statvfs", lambda _, disk=disk: disk)
        assert space.budgets() == expected
