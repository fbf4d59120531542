"""Stages of an agent on a real disk, against a real mirror's HTTP."""
# ruff: noqa: ASYNC240 - a test's loop serves no other clients

import asyncio
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest

from bdn.core.errors import InvalidRequestError, NotFoundError
from node_agent.app import Agent
from node_agent.stage import housekeeping
from tests.fakes.clock import Clock
from tests.support.agent.mirror import AgentMirror, fresh_mirror, in_both_forms
from tests.support.agent.mounts import needs_mounts
from tests.support.agent.rig import Rig, at_rest, staged
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.crash.rot import now

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror
FILES = {
    "model.safetensors": noise(17 * MIB + 3, 1),
    "config.json": b"{}",
    "nested/a name with spaces and \u00fc\u4e2d.txt": b"unicode",
    "nested/empty": b"",
    "same/again": b"{}",
}


@in_both_forms
async def test_a_cold_stage_brings_every_byte_from_the_mirror_once(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        stage = await staged(agent, mirror, manifest)

        mount = stage.mounts[0]
        assert tree(Path(mount.path)) == FILES
        assert mount.path == str(rig.cache / "mounts" / stage.id / "m0")
        assert (mount.view, mount.view_reason, mount.exposure) == ("hardlink", None, "none")
        assert (mount.files_total, mount.bytes_total) == (5, sum(map(len, FILES.values())))
        assert mount.bytes_from.mirror == sum(map(len, FILES.values())) - 2  # one "{}" is the other's link
        assert mount.bytes_done == mount.bytes_total
        assert set(mirror.chunk_requests.values()) == {1}


@in_both_forms
async def test_a_stage_of_several_mounts_shares_what_they_have_in_common(rig: Rig, mirror: AgentMirror) -> None:
    one, two = mirror.publish(FILES), mirror.publish({"other.bin": noise(9 * MIB, 2), "config.json": b"{}"})
    async with rig.agent(exposure="symlink") as agent:
        stage = await staged(agent, mirror, one, two)

        assert tree(Path(stage.mounts[0].path)) == FILES
        assert set(tree(Path(stage.mounts[1].path))) == {"other.bin", "config.json"}
        assert Path(stage.mounts[1].path).is_symlink()
        assert [mount.bytes_done for mount in stage.mounts] == [mount.bytes_total for mount in stage.mounts]
        assert stage.mounts[1].bytes_from.node == 2
        assert set(mirror.chunk_requests.values()) == {1}


async def test_a_grant_for_nothing_is_a_stage_without_mounts(rig: Rig, mirror: AgentMirror) -> None:
    async with rig.agent(exposure="symlink") as agent:
        stage = await agent.stages.start("job", mirror.grant(), warm=True)
        document = await agent.stages.finish(stage.record.id)
        assert (document.state, document.mounts, document.error) == ("READY", [], None)
        assert (await agent.stages.start("job", mirror.grant())).record.state == "READY"
    async with rig.agent(exposure="symlink") as agent:
        assert agent.stages.registry.find(document.id).record.state == "READY"
        assert (await agent.stages.release(document.id)).record.state == "RELEASED"
    assert not mirror.chunk_requests


async def test_what_a_job_wrote_through_a_link_is_mended_before_anybody_is_told_that_it_is_ready(
    rig: Rig, mirror: AgentMirror
) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent(exposure="symlink") as agent:
        first = await agent.stages.start("job", mirror.grant(manifest))
        place = Path((await agent.stages.finish(first.record.id)).mounts[0].path)
        for again in ("job", "another"):
            edited = place / "model.safetensors"
            edited.chmod(0o644)
            with edited.open("r+b") as file:
                file.write(b"mine")
            stage = await agent.stages.start(again, mirror.grant(manifest))
            document = await agent.stages.finish(stage.record.id)

            assert tree(Path(document.mounts[0].path)) == tree(place) == FILES


async def test_release__of_a_job_with_the_same_id_in_another_team__leaves_the_files_of_this_one(
    rig: Rig, mirror: AgentMirror
) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent(exposure="symlink") as agent:
        mine, theirs = [
            await agent.stages.finish((await agent.stages.start("job", mirror.grant(manifest, team=team))).record.id)
            for team in ("alpha", "beta")
        ]
        await agent.stages.release(theirs.id)
        assert tree(Path(mine.mounts[0].path)) == FILES


async def test_a_released_stage_is_gone_but_its_files_are_not(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent(exposure="symlink") as agent:
        stage = await staged(agent, mirror, manifest)
        model = Path(stage.mounts[0].path) / "model.safetensors"
        held = model.stat().st_ino
        mirror.forget()

        for _ in range(2):
            released = await agent.stages.release(stage.id)
            assert released.record.state == "RELEASED"

        assert list((rig.cache / "mounts").iterdir()) == list((rig.cache / "views").iterdir()) == []
        assert not agent.cache.index.leases.is_leased(manifest.digest)
        with pytest.raises(InvalidRequestError, match="RELEASED; stage it again"):
            await agent.stages.renew(stage.id, 100)
        again = await staged(agent, mirror, manifest)
        assert again.id == stage.id
        assert again.state == "READY"
        assert (mirror.requests, model.stat().st_ino) == (0, held)  # neither moved nor copied
        with pytest.raises(NotFoundError):
            await agent.stages.release("stg_unknown")


@needs_mounts
async def test_a_bound_stage_is_read_only_and_survives_a_restart(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent(exposure="auto") as agent:
        stage = await staged(agent, mirror, manifest)
        place = Path(stage.mounts[0].path)
        assert stage.mounts[0].exposure == "bind"
        with pytest.raises(OSError, match="Read-only"):
            (place / "config.json").write_bytes(b"")
    assert tree(place) == FILES  # the agent is gone and the job goes on
    async with rig.agent(exposure="auto") as agent:
        assert tree(place) == FILES
        await agent.stages.release(stage.id)
        assert not place.exists()


async def test_a_view_and_its_exposure_that_were_damaged_while_the_agent_was_down_are_mended(
    rig: Rig, mirror: AgentMirror
) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent(exposure="symlink") as agent:
        stage = await staged(agent, mirror, manifest)
    (rig.cache / "views" / stage.id / "m0/config.json").unlink()
    (rig.cache / "views" / stage.id / "m0/stranger").write_bytes(b"")
    Path(stage.mounts[0].path).unlink()  # as a reboot does with a mount
    async with rig.agent(exposure="symlink") as agent:
        assert Path(stage.mounts[0].path).is_symlink()  # before anybody is answered
        await at_rest(agent.stages.registry)
        assert agent.stages.registry.find(stage.id).record.state == "READY"
        assert tree(Path(stage.mounts[0].path)) == FILES


async def test_a_ready_stage_is_exposed_in_the_new_way_after_the_setting_changed(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent(exposure="none") as agent:
        stage = await staged(agent, mirror, manifest)
    for kind in ("symlink", "none"):
        async with rig.agent(exposure=kind) as agent:
            await at_rest(agent.stages.registry)
            document = agent.stages.document(agent.stages.registry.find(stage.id))
            assert (document.state, document.mounts[0].exposure) == ("READY", kind)
            assert Path(document.mounts[0].path).is_symlink() == (kind == "symlink")
            assert tree(Path(document.mounts[0].path)) == FILES


async def test_what_no_stage_needs_is_tidied_up_at_the_start(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent(exposure="symlink") as agent:
        stage = await staged(agent, mirror, manifest)
        root = agent.places.views
    shutil.copytree(root / stage.id, root / "stg_unknown")
    shutil.copytree(root / stage.id, root / f"{stage.id}.building")
    (rig.cache / "mounts/stg_unknown").mkdir()
    (rig.cache / "stages/stg_half.json.tmp").write_bytes(b"{")
    (rig.cache / "stages/stg_odd.json").write_bytes(b"{}")
    async with rig.agent(exposure="symlink") as agent:
        assert [path.name for path in root.iterdir()] == [stage.id]
        assert [path.name for path in (rig.cache / "mounts").iterdir()] == [stage.id]
        assert [path.name for path in (rig.cache / "stages").iterdir()] == [f"{stage.id}.json"]


async def test_making_room_for_one_manifest_evicts_none_of_its_stage(mirror: AgentMirror, tmp_path: Path) -> None:
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


# --- What an agent remembers of stages that have ended ---

three_are_kept = mock.patch.object(housekeeping, "KEPT", 3)


def _remembered(agent: Agent) -> tuple[set[str], int]:
    """The jobs in memory, and how many records are on disk."""
    return {stage.record.job_id for stage in agent.stages.registry.all()}, len(list(agent.places.stages.iterdir()))


@three_are_kept
async def test_the_newest_ended_stages_are_remembered_also_on_disk(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest, clock, rig = mirror.publish({"a": b"a"}), now(), Rig(mirror, tmp_path)
    async with rig.agent(clock) as agent:
        await staged(agent, mirror, manifest, job="stands")
        for number in range(6):
            clock.now += 1
            await agent.stages.release((await staged(agent, mirror, manifest, job=f"job-{number}")).id)
        await agent.housekeeping.reap()
        assert _remembered(agent) == ({"stands", "job-3", "job-4", "job-5"}, 4)
    async with rig.agent(clock) as agent:
        assert _remembered(agent) == ({"stands", "job-3", "job-4", "job-5"}, 4)


@three_are_kept
async def test_a_stage_asked_for_while_it_is_being_forgotten_stands(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest, clock = mirror.publish({"a": b"a"}), now()
    async with Rig(mirror, tmp_path).agent(clock) as agent:
        stages = []
        for number in range(4):
            clock.now += 1
            stages.append(await staged(agent, mirror, manifest, job=f"job-{number}"))
            await agent.stages.release(stages[-1].id)
        forget, asked = agent.housekeeping.lifecycle.records.forget, []

        def ask_meanwhile(stage_id: str) -> None:
            again = staged(agent, mirror, manifest, job="job-0")
            asked.append(asyncio.run_coroutine_threadsafe(again, loop))
            forget(stage_id)

        loop = asyncio.get_running_loop()
        with mock.patch.object(
            type(agent.housekeeping.lifecycle.records), "forget", lambda _, stage_id: ask_meanwhile(stage_id)
        ):
            await agent.housekeeping.reap()
        assert (await asyncio.wrap_future(asked[0])).state == "READY"
        assert agent.stages.registry.find(stages[0].id).record.state == "READY"
        assert agent.places.stage(stages[0].id).exists()
