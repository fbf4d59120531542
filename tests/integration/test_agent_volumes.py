"""Room for job volumes is kept in the agent's space: in one sum with the cache, and before it exists."""

from pathlib import Path

import pytest

from bdn.core.chunk import Manifest
from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError
from bdn.disk.durable import remove_tree
from bdn.wire.job_schema import JobVolumeRequest
from node_agent.app import Agent
from node_agent.job.volume import Volume
from tests.support.agent.mirror import AgentMirror, fresh_mirror
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.rig import MIB, Rig, noise, staged

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"cache_bytes": 64 * MIB, "cluster_cache_bytes": 0, "exposure": "symlink"})


def published(mirror: AgentMirror, seed: int, size: int) -> Manifest:
    return mirror.publish({"file": noise(size, seed)})


async def a_volume(agent: Agent, size: int, run: str = "job-1") -> Volume:
    return await agent.volumes.create(JobVolumeRequest(run_id=run, scratch_bytes=size))


async def used(agent: Agent, mirror: AgentMirror, manifest: Manifest) -> None:
    await agent.stages.release((await staged(agent, mirror, manifest, job=str(manifest.digest))).id)


async def test_what_nobody_needs_makes_room_for_a_volume_and_what_is_leased_stays(
    rig: Rig, mirror: AgentMirror
) -> None:
    idle, needed = published(mirror, 1, 30 * MIB), published(mirror, 2, 20 * MIB)
    async with rig.agent() as agent:
        await used(agent, mirror, idle)
        await staged(agent, mirror, needed)
        with pytest.raises(CacheFullError) as full:
            await a_volume(agent, 50 * MIB)
        assert full.value.details()["needed_bytes"] == 50 * MIB
        assert full.value.details()["leased_bytes"] == 20 * MIB
        assert agent.cache.index.holds(idle.digest)
        with pytest.raises(CacheTooSmallError):
            await a_volume(agent, 65 * MIB)

        await a_volume(agent, 40 * MIB)
        assert not agent.cache.index.holds(idle.digest)
        assert agent.cache.index.is_complete(needed.digest)
        with pytest.raises(CacheFullError):
            await a_volume(agent, 16 * MIB, "job-2")


async def test_a_stage_gets_no_room_of_a_volume_until_that_is_removed(rig: Rig, mirror: AgentMirror) -> None:
    model = published(mirror, 1, 30 * MIB)
    async with rig.agent() as agent:
        volume = await a_volume(agent, 40 * MIB)
        with pytest.raises(BdnError, match=r"41\.9 MB are in use") as full:
            await staged(agent, mirror, model)
        assert full.value.code == "CACHE_FULL"
    async with rig.agent() as agent:
        (volume,) = agent.volumes.all()
        with pytest.raises(BdnError) as full:
            await staged(agent, mirror, model)
        assert full.value.code == "CACHE_FULL"
        await agent.volumes.end(volume)
        await staged(agent, mirror, model)


@needs_mounts
@pytest.mark.parametrize("exposure", ["symlink", "bind"])
async def test_what_a_job_writes_takes_nothing_from_the_cache(rig: Rig, mirror: AgentMirror, exposure: str) -> None:
    model = published(mirror, 1, 20 * MIB)
    with unmounting(rig.cache):
        async with rig.agent(exposure=exposure) as agent:
            await used(agent, mirror, model)
            volume = await a_volume(agent, 40 * MIB)
            before = agent.cache.space.room()
            (volume.scratch.place / "file").write_bytes(noise(30 * MIB, 3))
            volume.scratch.look()
            await agent.cache.trim()
            assert agent.cache.index.is_complete(model.digest)
            assert agent.cache.space.room().budgets == before.budgets


async def test_volumes_on_another_disk_are_bounded_by_that(rig: Rig, mirror: AgentMirror, tmp_path: Path) -> None:
    model = published(mirror, 1, 60 * MIB)
    other = Path("/dev/shm") / tmp_path.name  # another file system, wherever the tests lie
    try:
        async with rig.agent(scratch_dir=other) as agent:
            volume = await a_volume(agent, 60 * MIB)
            await staged(agent, mirror, model)
            with pytest.raises(CacheTooSmallError):
                await a_volume(agent, 10**15, "job-2")
            await agent.volumes.end(volume)
    finally:
        remove_tree(other)
