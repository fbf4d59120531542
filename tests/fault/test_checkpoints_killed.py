"""While a job writes checkpoints, agent and mirror are killed and their machines lose power: no checkpoint is seen that never was."""

from pathlib import Path
from random import Random

import pytest

from tests.support.crash.forgetful_disk import forgetful_disk, needs_forgetful_disks
from tests.support.crash.killed_syncs import KilledSyncs
from tests.support.promises.tally import FULL, Tally


@needs_forgetful_disks
@pytest.mark.skipif(not FULL, reason="make fault: each takes minutes")
@pytest.mark.promise("commit-order", "power-loss", "whole-files")
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_fails_while_a_job_writes_checkpoints_each_that_is_listed_is_one_that_it_left(
    tmp_path: Path, tally: Tally, seed: int
) -> None:
    with forgetful_disk(tmp_path / "node") as node, forgetful_disk(tmp_path / "central") as central:
        syncs = KilledSyncs(tmp_path, node, central, Random(20261126 + seed))
        await syncs.live(100)
        again, once = syncs.sent_again()
    print(
        f"{syncs.counts}, {syncs.versions} versions of {len(syncs.listed)} checkpoints, {once} bytes, {again} sent again"
    )
    assert syncs.versions
    assert again <= once / 100
    tally.add(
        scenarios=1, kills=syncs.kills, faults=sum(n for kind, n in syncs.counts.items() if kind.startswith("power"))
    )
