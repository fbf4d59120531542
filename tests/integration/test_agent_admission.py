"""What a stage of several manifests may push out."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Clock, Rig, noise, staged


@pytest.fixture
def mirror() -> Iterator[AgentMirror]:
    with AgentMirror().running() as mirror:
        yield mirror


async def test_making_room_for_one_manifest_never_evicts_another_of_the_same_stage(
    mirror: AgentMirror, tmp_path: Path
) -> None:
    """The stage needs NEW and OLD; OLD is held, used by nobody, and the least recently used of all."""
    old, recent, new = (mirror.publish({"file.bin": noise(MIB, seed)}) for seed in range(3))
    clock = Clock(time.time())
    async with Rig(mirror, tmp_path, {"cache_bytes": 2 * MIB}).agent(clock) as agent:
        for manifest in (old, recent):
            clock.now += 1
            stage = await staged(agent, mirror, manifest, job=str(manifest.digest))
            await agent.stages.release(stage.id)
        clock.now += 1

        both = await staged(agent, mirror, new, old, job="both")

        assert [mount.bytes_from.mirror for mount in both.mounts] == [MIB, 0]
        assert set(agent.cache.index.manifests()) == {new.digest, old.digest}
