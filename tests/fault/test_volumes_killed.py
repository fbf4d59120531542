"""An agent that is killed at any step of making and removing job volumes: what a job was told of stays, and nothing else does."""

# ruff: noqa: ASYNC110 - another process: there is nothing to be notified by

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bdn.core.errors import BdnError
from bdn.core.source.uri import CheckpointUri
from bdn.disk.binding import mounts_below
from bdn.wire.grants import PushGrant
from bdn.wire.job_schema import LEAST_BYTES, JobVolume, JobVolumeRequest
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.process import COMMAND, Daemon, Program
from tests.support.crash.killing_steps import Fuse
from tests.support.crash.scenario import Action, Scenario, at_each
from tests.support.promises.tally import Tally, at_scale

LIMIT = 20 * LEAST_BYTES
STEPS = 110  # of all that is done here
DONE = [("make", "job-1"), ("make", "job-2"), ("end", "job-1"), ("make", "job-3"), ("end", "job-3"), ("make", "job-1")]


class Volumes(Scenario[Daemon]):
    """Volumes by job: ``open`` are volumes that the job controller has created, ``ended`` volumes that it has ended."""

    def __init__(self, program: Program, grant: str) -> None:
        self.program, self.grant = program, grant
        self.open: dict[str, JobVolume] = {}
        self.ended: list[JobVolume] = []

    def running(self) -> AbstractAsyncContextManager[Daemon]:
        return self.program.daemon()

    def actions(self, program: Daemon) -> Sequence[Action]:
        deeds = {"make": self._make, "end": self._end}
        return [partial(deeds[deed], program, job) for deed, job in DONE]

    async def _make(self, daemon: Daemon, job: str) -> None:
        request = JobVolumeRequest(
            run_id=job, scratch_bytes=LEAST_BYTES, checkpoint_bytes=LEAST_BYTES, push_grant=self.grant
        )
        self.open[job] = made = await daemon.client.make_volume(request)
        (scratch(made) / job).write_text(made.id)

    async def _end(self, daemon: Daemon, job: str) -> None:
        await _end_volume(daemon, self.open[job].id)
        self.ended.append(self.open.pop(job))

    async def check_end(self, program: Daemon, case: str) -> None:
        """What is open has what was written there; of ended volumes, and once all are ended, nothing stays."""
        for job, volume in self.open.items():
            assert (scratch(volume) / job).read_text() == volume.id, case
        assert not [volume for volume in self.ended if scratch(volume).exists()], case
        jobs = self.program.root / "cache/jobs"
        for item in (await program.client.volumes()).items:
            await _end_volume(program, item.id)
        while [path for path in (*jobs.iterdir(), *(jobs / ".trash").iterdir()) if path.name != ".trash"]:
            await asyncio.sleep(0.02)
        assert mounts_below(jobs) == []
        while (await program.client.cache()).tiers["node"].budget < LIMIT:
            await asyncio.sleep(0.02)


async def _end_volume(daemon: Daemon, volume_id: str) -> None:
    try:
        await daemon.client.end_volume(volume_id)
    except BdnError as error:
        if error.code != "NOT_FOUND":  # ended since, by a request before the kill or by the agent's restart
            raise


def scratch(volume: JobVolume) -> Path:
    assert volume.scratch is not None
    return Path(volume.scratch.path)


async def survive(root: Path, step: int, exposure: str) -> bool:
    """Returns whether all was done before the kill."""
    fuse, mirror = Fuse.at(root / "fuse"), AgentMirror(is_packed=False)
    with unmounting(root), mirror.running():
        given = {"BDN_AGENT_EXPOSURE": exposure, "BDN_AGENT_CACHE_BYTES": str(LIMIT)}
        program = Program(root, mirror.url, given, fuse.command("node_agent.__main__"))
        volumes = Volumes(program, mirror.signer.sign(PushGrant("org", CheckpointUri("llama", "job"), 4e9)))
        async with volumes.running() as daemon:
            fuse.light(step, after=step % 2 == 0)
            is_done = await volumes.until_killed(daemon)
        volumes.program = replace(program, command=COMMAND)
        async with volumes.running() as daemon, asyncio.timeout(240):
            await volumes.resumes(daemon, f"step {step}")
    return is_done


@pytest.mark.promise("commit-order")
@pytest.mark.parametrize("exposure", ["symlink", pytest.param("bind", marks=needs_mounts)])
async def test_an_agent_killed_at_any_step_keeps_volumes_whole_or_leaves_nothing(
    tmp_path: Path, exposure: str, tally: Tally
) -> None:
    count = at_scale(3, 40)

    async def one(root: Path, _: int, step: int) -> None:
        tally.add(scenarios=1, kills=not await survive(root, step, exposure))

    await at_each(tmp_path, [3 + STEPS * number // count for number in range(count)], one)
    assert tally.counts["kills"] > count // 2
