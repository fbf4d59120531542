"""While a job writes checkpoints, agent and mirror are killed and their machines lose power: no checkpoint is seen that never was."""

import asyncio
import os
from pathlib import Path
from random import Random

import pytest

from tests.support.crash.forgetful_disk import forgetful_disk, needs_forgetful_disks
from tests.support.crash.killed_syncs import KilledSyncs
from tests.support.promises.tally import FULL, Tally

JOBS = 10
KILLS = 100  # of each


@needs_forgetful_disks
@pytest.mark.skipif(not FULL, reason="make fault: it takes half an hour")
@pytest.mark.promise("commit-order", "power-loss", "whole-files")
async def test_whatever_fails_while_a_job_writes_checkpoints_each_that_is_listed_is_one_that_it_left(
    tmp_path: Path, tally: Tally
) -> None:
    cores = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def live(seed: int) -> tuple[int, int]:
        root = tmp_path / str(seed)
        async with cores:
            with forgetful_disk(root / "node") as node, forgetful_disk(root / "central") as central:
                syncs = KilledSyncs(root, node, central, Random(20261126 + seed))
                await syncs.live(KILLS)
                again, once = syncs.sent_again()
        print(
            f"{syncs.counts}, {syncs.versions} versions of {len(syncs.listed)} checkpoints, {again} of {once} bytes again"
        )
        assert syncs.versions
        cuts = sum(number for kind, number in syncs.counts.items() if kind.startswith("power"))
        tally.add(scenarios=1, kills=syncs.kills, faults=cuts)
        return again, once

    async with asyncio.TaskGroup() as group:
        lives = [group.create_task(live(seed)) for seed in range(JOBS)]
    again, once = map(sum, zip(*(one.result() for one in lives), strict=True))
    assert again <= once / 100, f"{again} of {once} bytes were sent again"
