"""A disk that answers EIO when it is asked what stands where: stages fail for it, and the agent goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.core.errors import BdnError
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Clock, Rig, noise, staged
from tests.support.content.trees import tree
from tests.support.crash.forgetful_disk import ForgetfulDisk, forgetful_disk, needs_forgetful_disks
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = [needs_forgetful_disks, pytest.mark.promise("space")]

FILES, OTHER = {"f": noise(MIB, 1)}, {"g": noise(MIB, 2)}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ForgetfulDisk]:
    with forgetful_disk(tmp_path) as disk:
        yield disk


@pytest.mark.parametrize("place", ["*/mounts/stg_*", "*.part"])
async def test_a_stage_that_fails_where_nothing_can_be_looked_at_is_failed_and_ends_no_other_and_comes_later(
    disk: ForgetfulDisk, mirror: AgentMirror, tally: Tally, place: str
) -> None:
    """Its view cannot be taken down, or what of it was begun cannot be told."""
    manifest = mirror.publish(FILES)
    async with Rig(mirror, disk.place, {"cluster_cache_bytes": 0}).agent() as agent:
        await agent.heartbeats.beat()
        held = await staged(agent, mirror, manifest)
        disk.refuse("lookup", place)
        for _ in range(2):
            with pytest.raises(BdnError, match=r"the disk failed at .*: Input/output error"):
                await staged(agent, mirror, mirror.publish(OTHER), job="other")
        assert disk.faults_met >= 4
        disk.mend()
        assert agent.stages.document(agent.stages.registry.find(held.id)).state == "READY"
        tally.add(wrong=tree(Path(held.mounts[0].path)) != FILES)
        other = await staged(agent, mirror, mirror.publish(OTHER), job="other")
        tally.add(wrong=tree(Path(other.mounts[0].path)) != OTHER)
        await agent.stages.release(other.id)
        ledger = agent.cache.index.ledger
        assert (ledger.committed_bytes, ledger.reserved_bytes) == (2 * MIB, 0)
        assert agent.cache.index.leases.leased() == (manifest.digest,)
    tally.add(scenarios=1, faults=2, refused=2)


async def put_aside(agent: Agent, held: str) -> None:
    """A file of a READY stage is found to be wrong: the stage is to be mended."""
    stage = agent.stages.registry.find(held)
    ((content, _),) = agent.cache.index.contents_of(next(iter(stage.record.manifests))).items()

    def take() -> bool:
        agent.places.file(content).unlink()
        return False

    await agent.cache.withdraw(content, take)


@pytest.mark.parametrize("place", ["*/mounts/stg_*", "*.part"])
async def test_a_stage_that_cannot_be_mended_where_nothing_can_be_looked_at_stays_and_is_mended_later(
    disk: ForgetfulDisk, mirror: AgentMirror, tally: Tally, place: str
) -> None:
    elapsed = Clock(0.0)
    async with Rig(mirror, disk.place, {"cluster_cache_bytes": 0}).agent(elapsed=elapsed) as agent:
        await agent.heartbeats.beat()
        held = await staged(agent, mirror, mirror.publish(FILES))
        stage = agent.stages.registry.find(held.id)
        await put_aside(agent, held.id)
        disk.refuse("lookup", place)
        await agent.housekeeping.reap()
        await stage.wait(None)
        disk.mend()
        document = agent.stages.document(stage)
        assert (document.state, document.error and document.error.code) == ("READY", "DISK_FAILED")
        tally.add(lost=tree(Path(held.mounts[0].path)) != FILES)  # what a job reads was not taken down
        elapsed.now += 301
        await agent.housekeeping.reap()
        await stage.wait(None)
        document = agent.stages.document(stage)
        assert (document.state, document.error) == ("READY", None)
        tally.add(wrong=tree(Path(held.mounts[0].path)) != FILES)
    tally.add(scenarios=1, faults=1, repaired=1)


async def test_an_eviction_where_neither_can_be_deleted_nor_be_looked_is_an_error_that_names_the_disk(
    disk: ForgetfulDisk, mirror: AgentMirror, tally: Tally
) -> None:
    async with Rig(mirror, disk.place, {"cluster_cache_bytes": 0, "cache_bytes": MIB}).agent() as agent:
        await agent.heartbeats.beat()
        old = await staged(agent, mirror, mirror.publish(FILES))
        await agent.stages.release(old.id)
        disk.refuse("unlink", "*/manifests/*")
        disk.refuse("lookup", "*/files/??/*")
        with pytest.raises(BdnError) as caught:
            await staged(agent, mirror, mirror.publish(OTHER), job="other")
        assert caught.value.code == "DISK_FAILED"
        disk.mend()
        ledger = agent.cache.index.ledger
        assert ledger.reserved_bytes == 0
        assert not agent.cache.index.leases.leased()
    tally.add(scenarios=1, faults=1, refused=1)
