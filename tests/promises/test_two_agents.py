"""Two agents, as processes, on one cache directory: one has it, the other says who; and what a dead one left stops nobody."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bdn.wire.stage_schema import StageDocument
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.process import Daemon, Program
from tests.support.agent.rig import noise
from tests.support.content.trees import tree
from tests.support.promises.tally import Scale, Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("whole-files")
FILES = {"weights": noise(300_000, 1), "config.json": b"{}"}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


@pytest.fixture
def program(mirror: AgentMirror, tmp_path: Path) -> Program:
    cache = {"BDN_AGENT_CACHE_DIR": str(tmp_path / "cache"), "BDN_AGENT_CLUSTER_CACHE_BYTES": "0"}
    return Program(tmp_path / "first", mirror.url, cache)


async def ready(daemon: Daemon, mirror: AgentMirror, job: str) -> StageDocument:
    return await daemon.staged(job, mirror.grant(mirror.publish(FILES)))


def entries(root: Path) -> dict[str, tuple[int, int]]:
    """Every file of a cache, but for the journal of what its agent does meanwhile."""
    found = [path for path in root.rglob("*") if path.is_file() and "journal" not in path.parts]
    return {str(path.relative_to(root)): (path.stat().st_ino, path.stat().st_size) for path in found}


@pytest.mark.promise("leases")
async def test_a_second_agent_ends_and_names_the_first_which_is_unharmed(
    program: Program, mirror: AgentMirror, tmp_path: Path, scale: Scale, tally: Tally
) -> None:
    async with program.daemon() as daemon:
        stage = await ready(daemon, mirror, "job")
        before = entries(tmp_path / "cache")
        others = [replace(program, root=tmp_path / f"second-{turn}") for turn in range(scale.of(1, 5))]
        for other in (*others, program):  # with a socket of its own, and with the same
            done = await asyncio.to_thread(other.run)
            assert done.returncode == 3, done.stderr
            told = f"error: cache directory {tmp_path / 'cache'} is in use by process {daemon.process.pid} [IN_USE]"
            assert told in done.stderr.splitlines()[-1], done.stderr
            assert entries(tmp_path / "cache") == before
            assert await daemon.client.ready()
            tally.add(scenarios=1, refused=1)
        assert tree(Path(stage.mounts[0].path)) == FILES
        assert (await daemon.client.stage_by_id(stage.id, 0)).state == "READY"
        await ready(daemon, mirror, "another-job")


@pytest.mark.promise("leases")
@pytest.mark.parametrize("left", ["a living process", "nothing", "rubbish"])
async def test_what_a_killed_agent_wrote_into_its_lock_keeps_no_other_from_starting(
    program: Program, mirror: AgentMirror, tmp_path: Path, left: str, tally: Tally
) -> None:
    owner = tmp_path / "cache/owner"
    async with program.daemon() as daemon:
        stage = await ready(daemon, mirror, "job")
        recorded = owner.read_text()
        assert str(daemon.process.pid) in recorded
        await daemon.kill()
    ours = recorded.replace(str(daemon.process.pid), str(os.getpid()))  # the kernel gave its number to another program
    owner.write_text({"a living process": ours, "nothing": "", "rubbish": "\0{"}[left])
    async with program.daemon() as daemon:
        again = await daemon.client.stage_by_id(stage.id, 60)
        assert again.state == "READY"
        assert tree(Path(again.mounts[0].path)) == FILES
        assert str(daemon.process.pid) in owner.read_text()
    tally.add(scenarios=1, kills=1)
