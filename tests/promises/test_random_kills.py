"""A mirror and two agents of a ring are killed again and again while they mirror, stage, release and evict, and jobs read."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from tests.doubles.hub import Hub
from tests.support.crash.forgetful_mirror import fill, repositories
from tests.support.crash.killing_cluster import NODES, Cluster, Kills
from tests.support.crash.killing_reader import reading_all
from tests.support.promises.tally import FULL, Scale, Tally

pytest_plugins = ("tests.support.mirror.fixtures",)


@pytest.mark.promise("whole-files", "commit-order")
@pytest.mark.parametrize("seed", range(5 if FULL else 1))
async def test_whatever_is_killed_when_readers_see_whole_files_alone_and_all_ends_well(
    tmp_path: Path, hub: Hub, scale: Scale, tally: Tally, seed: int
) -> None:
    fill(hub)
    kills = Kills(scale.of(4, 60))
    cluster = Cluster(tmp_path, hub, Random(seed), kills)
    roots = [tmp_path / node / "cache/mounts" for node in NODES]
    async with reading_all(roots, list(repositories().values())) as seen:
        async with asyncio.TaskGroup() as group:
            group.create_task(cluster.lives_of_mirror())
            for node in NODES:
                group.create_task(cluster.lives_of_agent(node))
        await cluster.finish()
    assert not seen.wrong, f"{seen.wrong[:5]}"
    assert seen.whole_views
    tally.add(scenarios=1, kills=kills.done)
