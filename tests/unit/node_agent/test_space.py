from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from node_agent.cache.space import Space
from node_agent.disk.places import Places


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """A disk of 1000 blocks of 100 bytes, 400 of them free."""
    places = Places(tmp_path)
    places.make()
    disk = SimpleNamespace(f_blocks=1000, f_frsize=100, f_bavail=400)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    return places


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
    assert Space(places, limit, headroom).budget(committed) == budget


def test_blocks_of_files_in_progress_are_ours_as_well(places: Places) -> None:
    (places.filling / "x.part").write_bytes(b"x" * 8192)
    blocks = (places.filling / "x.part").stat().st_blocks * 512

    assert Space(places, None, None).budget(0) == 35_000 + blocks
