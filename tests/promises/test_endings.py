"""Stages that end while something else is at work on them, or that end half-way: no lease without a view, and no view without one."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import BdnError, DiskFailedError, InvalidRequestError
from bdn.core.manifest import Manifest
from bdn.wire.operation_schema import EvictCommand
from node_agent.app import Agent
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.record import StageRecord, StageRecords
from node_agent.stage.stage import NodeStage
from tests.support.agent.mirror import AgentMirror, held_by, missing
from tests.support.agent.rig import Rig, noise, staged
from tests.support.content.trees import tree
from tests.support.crash.rot import cached, digest_of_path
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("leases")
FILES = {"weights": noise(CHUNK_SIZE + 100), "config.json": b"{}"}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


@asynccontextmanager
async def lacking(mirror: AgentMirror, root: Path) -> AsyncIterator[tuple[Agent, NodeStage, Manifest]]:
    """An agent with a READY stage whose largest file was lost."""
    manifest = mirror.publish(FILES)
    async with Rig(mirror, root).agent() as agent:
        stage = agent.stages.registry.find((await staged(agent, mirror, manifest)).id)
        cached(agent, manifest, "weights").unlink()
        await agent.cache.withdraw(digest_of_path(manifest, "weights"), lambda: False)
        mirror.forget()
        yield agent, stage, manifest


def is_shown(view: str) -> bool:
    return Path(view).exists()


def is_gone(agent: Agent, stage: NodeStage) -> bool:
    """Released, with nothing shown and nothing leased."""
    view = agent.stages.document(stage).mounts[0].path
    return stage.record.state == "RELEASED" and not is_shown(view) and agent.cache.index.leases.leased() == ()


async def test_a_stage_that_is_just_being_released_is_not_mended(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_stopped, may_go_on, stop = asyncio.Event(), asyncio.Event(), Lifecycle.stop

    async def stop_slowly(lifecycle: Lifecycle, stage: NodeStage) -> None:
        await stop(lifecycle, stage)
        has_stopped.set()
        await may_go_on.wait()

    async with lacking(mirror, tmp_path) as (agent, stage, _):
        monkeypatch.setattr(Lifecycle, "stop", stop_slowly)
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.stages.release(stage.record.id))
            await has_stopped.wait()
            await agent.housekeeping.reap()
            is_mended = stage.is_working
            may_go_on.set()

        assert not is_mended
        assert is_gone(agent, stage)
        assert mirror.requests == 0
    tally.add(scenarios=1)


async def test_a_mend_that_has_begun_ends_with_the_release(mirror: AgentMirror, tmp_path: Path, tally: Tally) -> None:
    gate, asked, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    async with lacking(mirror, tmp_path) as (agent, stage, manifest):
        mirror.every = held_by(gate)
        mirror.on_request = lambda _: loop.call_soon_threadsafe(asked.set)
        await agent.housekeeping.reap()
        await asked.wait()
        assert stage.is_mending
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.stages.release(stage.record.id))
            await asyncio.sleep(0)  # it cancels the mend, and waits for it
            gate.set()
        assert stage.task
        await asyncio.wait([stage.task])

        assert is_gone(agent, stage)
        assert not agent.cache.index.is_complete(manifest.digest)
    tally.add(scenarios=1)


def keep_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is read-only when the folder of a view shall go: what exposed it is gone by then."""
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if str(target).endswith(".dropping"):
            raise OSError(errno.EROFS, "Read-only file system")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)


def keep_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the end of a stage shall be recorded: view and leases are gone by then."""
    save = StageRecords.save

    def refuse(records: StageRecords, record: StageRecord) -> None:
        if record.state == "RELEASED":
            raise DiskFailedError("stages", "No space left on device", is_full=True)
        save(records, record)

    monkeypatch.setattr(StageRecords, "save", refuse)


@pytest.mark.parametrize("fault", [keep_views, keep_records])
async def test_a_stage_that_was_released_half_way_is_built_anew_for_who_asks_again_and_for_nobody_else(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    manifest = mirror.publish(FILES)
    async with Rig(mirror, tmp_path, {"exposure": "symlink"}).agent() as agent:
        stage = await staged(agent, mirror, manifest)
        view = stage.mounts[0].path
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            with pytest.raises(DiskFailedError):
                await agent.stages.release(stage.id)
        assert not is_shown(view)
        with pytest.raises(InvalidRequestError, match="taken down"):
            await agent.stages.renew(stage.id, 60)
        await agent.evictions.evict(EvictCommand(id="e", lru_bytes=10**9, tier="node"))
        mirror.forget()
        await agent.housekeeping.reap()
        assert (mirror.requests, is_shown(view)) == (0, False)

        again = await staged(agent, mirror, manifest)

        assert (again.id, again.state, again.error) == (stage.id, "READY", None)
        assert tree(Path(again.mounts[0].path)) == FILES
        assert agent.cache.index.leases.is_leased(manifest.digest)
        await agent.stages.renew(stage.id, 60)
        await agent.stages.release(stage.id)
        assert is_gone(agent, agent.stages.registry.find(stage.id))
    tally.add(scenarios=1, faults=1, repaired=1)


async def test_a_pull_whose_release_was_not_recorded_is_leased_again_by_the_next_pull(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    manifest, place = mirror.publish(FILES), tmp_path / "mine"
    async with Rig(mirror, tmp_path / "data").agent() as agent:
        stage = await agent.stages.pull(mirror.grant(manifest), place)
        await agent.stages.finish(stage.record.id)
        with pytest.MonkeyPatch.context() as patch:
            keep_records(patch)
            with pytest.raises(DiskFailedError):
                await agent.stages.release(stage.record.id)
        assert agent.cache.index.leases.leased() == ()

        await agent.stages.pull(mirror.grant(manifest), place)
        await agent.stages.finish(stage.record.id)

        assert agent.cache.index.leases.leased() == (manifest.digest,)
        assert tree(place) == FILES
    tally.add(scenarios=1, faults=1, repaired=1)


async def test_a_stage_that_is_asked_for_while_it_fails_leases_nothing(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, gate, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    save = StageRecords.save

    def save_slowly(records: StageRecords, record: StageRecord) -> None:
        if record.state == "FAILED":
            loop.call_soon_threadsafe(failing.set)
            assert gate.wait(60), "the test never opened the gate"
        save(records, record)

    monkeypatch.setattr(StageRecords, "save", save_slowly)
    async with lacking(mirror, tmp_path) as (agent, first, manifest):
        await agent.stages.release(first.record.id)  # a part of the manifest is held, so that it can be leased
        mirror.every = missing
        async with asyncio.TaskGroup() as group:
            stage = await agent.stages.start("fails", mirror.grant(manifest))
            await failing.wait()
            again = group.create_task(agent.stages.start("fails", mirror.grant(manifest)))
            await asyncio.sleep(0)  # it saves that it was asked for again, once the failure is saved
            gate.set()

        assert again.result() is stage
        assert not stage.is_working
        with pytest.raises(BdnError) as caught:
            await agent.stages.finish(stage.record.id)
        assert (caught.value.code, stage.record.state) == ("NOT_FOUND", "FAILED")
        assert manifest.digest in agent.cache.index.manifests()
        assert agent.cache.index.leases.leased() == ()
        mirror.every = None
        await staged(agent, mirror, manifest, job="fails")
        assert agent.cache.index.leases.leased() == (manifest.digest,)
    tally.add(scenarios=1, faults=1, refused=1)
