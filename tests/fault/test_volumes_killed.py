"""An agent that is killed at any step of making and removing job volumes: what a job was told of stays, and nothing else does."""

# ruff: noqa: ASYNC110 - another process: there is nothing to be notified by

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bdn.core.errors import BdnError
from bdn.core.source.uri import CheckpointUri
from bdn.wire.grants import PushGrant
from bdn.wire.job_schema import LEAST_BYTES, JobVolume, JobVolumeRequest
from node_agent.stage.view.exposure import mounts_below
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.process import COMMAND, Daemon, Program
from tests.support.crash.killing_steps import Fuse, is_done_before_the_end, two_at_a_time
from tests.support.promises.tally import Tally, at_scale

LIMIT = 20 * LEAST_BYTES
STEPS = 110  # of all that is done here
DONE = [("make", "job-1"), ("make", "job-2"), ("end", "job-1"), ("make", "job-3"), ("end", "job-3"), ("make", "job-1")]


@dataclass
class Node:
    """Whoever starts jobs on a node, and what it was told: the volumes that are open, by job, and those that were ended."""

    root: Path
    program: Program
    grant: str
    open: dict[str, JobVolume] = field(default_factory=dict)
    ended: list[JobVolume] = field(default_factory=list)
    done: int = 0

    async def live(self, daemon: Daemon) -> None:
        """Go on with what is to be done."""
        for deed, job in DONE[self.done :]:
            await (self._make if deed == "make" else self._end)(daemon, job)
            self.done += 1

    async def _make(self, daemon: Daemon, job: str) -> None:
        request = JobVolumeRequest(
            run_id=job, scratch_bytes=LEAST_BYTES, checkpoint_bytes=LEAST_BYTES, push_grant=self.grant
        )
        self.open[job] = made = await daemon.client.make_volume(request)
        assert made.scratch is not None
        (Path(made.scratch.path) / job).write_text(made.id)

    async def _end(self, daemon: Daemon, job: str) -> None:
        volume = self.open[job]
        try:
            await daemon.client.end_volume(volume.id)
        except BdnError as error:
            if error.code != "NOT_FOUND":  # it was ended by the request whose answer a kill took
                raise
        self.ended.append(self.open.pop(job))

    def check(self) -> None:
        """What is open has what was written there; of what was ended the scratch is gone."""
        for job, volume in self.open.items():
            assert volume.scratch is not None
            assert (Path(volume.scratch.path) / job).read_text() == volume.id
        for volume in self.ended:
            assert volume.scratch is not None
            assert not Path(volume.scratch.path).exists()

    async def leave(self, daemon: Daemon) -> None:
        """End all volumes that there are: no byte, folder or mount stays, and none is promised any more."""
        jobs = self.root / "cache/jobs"
        for volume in (await daemon.client.volumes()).items:
            await daemon.client.end_volume(volume.id)
        while [path for path in (*jobs.iterdir(), *(jobs / ".trash").iterdir()) if path.name != ".trash"]:
            await asyncio.sleep(0.02)
        assert mounts_below(jobs) == []
        assert (await daemon.client.cache()).tiers["node"].budget == LIMIT


async def survive(root: Path, step: int, exposure: str, tally: Tally) -> None:
    fuse = Fuse.at(root / "fuse")
    with ExitStack() as stack:
        stack.enter_context(unmounting(root))
        mirror = stack.enter_context(AgentMirror(is_packed=False).running())
        grant = mirror.signer.sign(PushGrant("org", CheckpointUri("llama", "job"), 4e9))
        program = Program(
            root,
            mirror.url,
            {"BDN_AGENT_EXPOSURE": exposure, "BDN_AGENT_CACHE_BYTES": str(LIMIT)},
            fuse.command("node_agent.__main__"),
        )
        node = Node(root, program, grant)
        async with node.program.daemon() as daemon:
            fuse.light(step, after=step % 2 == 0)
            is_done = await is_done_before_the_end(node.live(daemon), daemon.process, BdnError)
            await daemon.kill() if is_done else None
        async with replace(node.program, command=COMMAND).daemon() as daemon, asyncio.timeout(240):
            await node.live(daemon)
            node.check()
            await node.leave(daemon)
    tally.add(scenarios=1, kills=not is_done)


@pytest.mark.promise("commit-order")
@pytest.mark.parametrize("exposure", ["symlink", pytest.param("bind", marks=needs_mounts)])
async def test_an_agent_killed_at_any_step_keeps_volumes_whole_or_leaves_nothing(
    tmp_path: Path, exposure: str, tally: Tally
) -> None:
    count = at_scale(3, 40)
    steps = [3 + STEPS * number // count for number in range(count)]

    async def one(number: int) -> None:
        (tmp_path / str(number)).mkdir()
        await survive(tmp_path / str(number), steps[number], exposure, tally)

    await two_at_a_time(one, len(steps))
    assert tally.counts["kills"] > len(steps) // 2
