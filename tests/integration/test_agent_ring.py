"""Agents of one cluster fill from one another, and read the mirror once."""

import asyncio
from pathlib import Path

import pytest

from tests.support.agent.mirror import AgentMirror, fresh_mirror, in_both_forms
from tests.support.agent.rig import staged
from tests.support.agent.ring import Ring, came_from
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror

FILES = {
    "large.safetensors": noise(17 * MIB + 3, 1),
    "other.safetensors": noise(9 * MIB + 1, 2),
    "one.bin": noise(2 * MIB, 3),
    **{f"small/{number}": noise(30_000 + number, 100 + number) for number in range(20)},
}
SIZE = sum(map(len, FILES.values()))


@pytest.fixture
def ring(mirror: AgentMirror, tmp_path: Path) -> Ring:
    return Ring(mirror, tmp_path)


@pytest.mark.parametrize(("mirror", "count"), [("whole", 3), ("packed", 8)], indirect=["mirror"])
async def test_a_cold_cluster_reads_each_chunk_once(ring: Ring, mirror: AgentMirror, count: int) -> None:
    manifest = mirror.publish(FILES)
    async with ring.nodes(count, byte_threads=2):
        stages = await ring.staged_by_all(manifest)

        assert [tree(Path(stage.mounts[0].path)) for stage in stages] == [FILES] * count
        assert set(mirror.chunk_requests.values()) == {1}
        (page,) = mirror.trees[manifest.digest].root.pages
        assert mirror.documents[f"/chunks/{page.digest}"] == 1
        assert mirror.documents[f"/manifests/{manifest.digest}"] <= 2 * count  # each node, and owners for their peers
        assert came_from(stages, "mirror") <= SIZE  # an owner may read a chunk for a peer before its own fill does
        assert [stage.mounts[0].bytes_done for stage in stages] == [SIZE] * count


async def test_a_member_that_joins_late_is_asked_for_what_is_not_begun(ring: Ring, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    gate, asked = mirror.hold(mirror.chunks(manifest, "large.safetensors")[0])
    async with ring.nodes(1, byte_threads=1) as agents:
        stage = await agents[0].stages.start("job", mirror.grant(manifest))
        async with asyncio.timeout(60):
            await asked.wait()
        async with ring.agent("late"):
            gate.set()
            async with asyncio.timeout(60):
                document = await agents[0].stages.finish(stage.record.id)

            assert tree(Path(document.mounts[0].path)) == FILES
            assert document.mounts[0].bytes_from.cluster > 0
            assert set(mirror.chunk_requests.values()) == {1}


@pytest.mark.promise("network")
@in_both_forms
async def test_a_cluster_serves_a_late_node_while_the_mirror_is_away(ring: Ring, mirror: AgentMirror) -> None:
    """It never saw the manifest, and owns a third of chunks that only others hold."""
    manifest = mirror.publish(FILES)
    async with ring.nodes(2) as agents:
        await ring.staged_by_all(manifest)
        async with ring.agent("late") as late:
            mirror.down = True
            mirror.forget()

            stage = await staged(late, mirror, manifest)

            assert tree(Path(stage.mounts[0].path)) == FILES
            assert stage.mounts[0].bytes_from.model_dump() == {"node": 0, "cluster": SIZE, "mirror": 0}
            assert [len(agent.stages.registry.all()) for agent in agents] == [1, 1]
