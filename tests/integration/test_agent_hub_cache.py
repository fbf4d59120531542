"""Snapshots in the cache of the hub's client, published by an embedded agent: leases, repairs and ends."""

import shutil
from pathlib import Path

import pytest

from bdn.core.layout import Manifest
from node_agent.app import Agent
from tests.support.agent.hub_place import COMMIT, repository_with
from tests.support.agent.mirror import AgentMirror, fresh_mirror
from tests.support.agent.rig import Rig
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror
PART = {"config.json": b"{}"}
FILES = {**PART, "weights": noise(MIB, 1)}


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path / "data", {"cache_bytes": 3 * MIB})


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return repository_with(tmp_path / "hub", FILES).snapshot(COMMIT)


async def pulled(agent: Agent, mirror: AgentMirror, manifest: Manifest, snapshot: Path) -> None:
    stage = await agent.pulls.begin(mirror.grant(manifest), snapshot, hub=True)
    await agent.stages.finish(stage.record.id)


def leased(agent: Agent, *manifests: Manifest) -> list[bool]:
    return [agent.cache.index.leases.is_leased(manifest.digest) for manifest in manifests]


async def test_a_snapshot_leases_each_selection_of_its_commit_until_it_is_gone(
    rig: Rig, mirror: AgentMirror, snapshot: Path
) -> None:
    whole, part = mirror.publish(FILES), mirror.publish(PART)
    async with rig.agent() as agent:
        for manifest in (whole, part):
            await pulled(agent, mirror, manifest, snapshot)
        await agent.housekeeping.reap()
        assert (tree(snapshot), leased(agent, whole, part)) == (FILES, [True, True])
    async with rig.agent() as agent:
        assert leased(agent, whole, part) == [True, True]

        shutil.rmtree(snapshot)
        await agent.housekeeping.reap()

        assert leased(agent, whole, part) == [False, False]


async def test_a_blob_is_linked_to_the_file_that_replaces_it_in_the_cache(
    rig: Rig, mirror: AgentMirror, snapshot: Path
) -> None:
    manifest = mirror.publish(FILES)
    (content,) = (entry.digest for entry in manifest.files if entry.path == "weights")
    async with rig.agent() as agent:
        await pulled(agent, mirror, manifest, snapshot)
        cached, aside = agent.places.file(content), rig.root / "aside"
        earlier = cached.stat()
        shutil.copyfile(cached, aside)
        agent.cache.files.whole.appear(content, aside)
        assert not cached.samefile(snapshot / "weights")

        agent.scrub.scrubber.repair.relink(content, earlier)

        assert cached.samefile(snapshot / "weights")
        assert (snapshot / "weights").is_symlink()
