"""Training jobs while mirror and agents are killed: each ends as its script says, starts once, and leaves its log and nothing else."""

from pathlib import Path
from random import Random

import pytest

from tests.doubles.hub import Hub
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import needs_bwrap
from tests.support.crash.killed_jobs import TrainingCluster
from tests.support.crash.killing_cluster import Kills
from tests.support.crash.mirror_scenario import fill
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.mirror.fixtures",)


@needs_bwrap
@needs_mounts
@pytest.mark.usefixtures("backend")
@pytest.mark.promise("commit-order")
async def test_jobs__mirror_and_agents_are_killed__end_as_their_scripts_say_and_start_once(
    tmp_path: Path, hub: Hub, tally: Tally
) -> None:
    kills = Kills(at_scale(8, 100))
    cluster = TrainingCluster(tmp_path, hub, Random(20261129), kills)
    fill(hub)
    with unmounting(tmp_path):
        await cluster.live(at_scale(6, 50))
    assert not cluster.wrong, "\n".join(cluster.wrong)
    tally.add(scenarios=1, kills=kills.done)
