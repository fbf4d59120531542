"""What a READY stage shows stays, also where files are lost that cannot be brought again now."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import BdnError
from bdn.core.events import Event
from bdn.wire.operation_schema import VerifyCommand
from node_agent.app import Agent
from node_agent.journal import Journal
from node_agent.stage.stage import NodeStage
from tests.support.agent.mirror import AgentMirror, missing
from tests.support.agent.rig import Clock, Rig, noise, staged, verified
from tests.support.content.trees import tree
from tests.support.crash.rot import cached, flip
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("leases")
FILES = {"weights": noise(40_000), "config.json": b"{}"}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


async def looked_through(agent: Agent) -> NodeStage:
    """The only stage, when nothing works on it any more."""
    (stage,) = agent.stages.registry.all()
    while stage.task and stage.is_working:
        await asyncio.wait([stage.task])
    return stage


async def lose_a_file(rig: Rig, mirror: AgentMirror) -> Path:
    """A READY stage's largest file is gone from the cache while no agent is there; returns where its job looks."""
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        stage = await staged(agent, mirror, manifest)
    max((rig.cache / "files").glob("??/*"), key=lambda path: path.stat().st_size).unlink()
    return Path(stage.mounts[0].path)


async def test_a_stage_whose_lost_file_does_not_fit_any_more_shows_what_it_showed_and_says_so(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, elapsed = Rig(mirror, tmp_path), Clock(0.0)
    told: list[Event] = []
    place = await lose_a_file(rig, mirror)
    record = Journal.record

    def listen(journal: Journal, events: Sequence[Event]) -> None:
        told.extend(events)
        record(journal, events)

    monkeypatch.setattr(Journal, "record", listen)
    async with rig.agent(elapsed=elapsed, cache_bytes=20_000) as agent:
        stage = await looked_through(agent)
        assert stage.record.state == "READY"
        assert tree(place) == FILES
        assert all(map(agent.cache.index.leases.is_leased, stage.record.manifests))
        document = agent.stages.document(stage)
        assert (document.state, document.error and document.error.code) == ("READY", "CACHE_TOO_SMALL")
        assert [one.facts["code"] for one in told if one.kind == "not_mended"] == ["CACHE_TOO_SMALL"]
        assert agent.cache.index.ledger.reserved_bytes == 0
        elapsed.now += 1000
        await agent.housekeeping.reap()
        assert stage.is_mending  # it is tried again
        await looked_through(agent)
    async with rig.agent() as agent:
        stage = await looked_through(agent)
        assert agent.stages.document(stage).error is None
        assert all(map(agent.cache.index.is_complete, stage.record.manifests))
        assert tree(place) == FILES
    tally.add(scenarios=2, faults=1, refused=2, repaired=1)


def inode(path: Path) -> int:
    return path.stat().st_ino


async def test_nobody_is_told_that_a_stage_is_ready_which_is_known_to_show_a_torn_file(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    rig, manifest = Rig(mirror, tmp_path), mirror.publish(FILES)
    async with rig.agent() as agent:
        place = Path((await staged(agent, mirror, manifest)).mounts[0].path)
    torn = max((rig.cache / "files").glob("??/*"), key=lambda path: path.stat().st_size)
    torn.chmod(0o600)
    os.truncate(torn, 100)
    mirror.faults[mirror.chunks(manifest, "weights")[0]] = [missing] * 50
    async with rig.agent() as agent:
        stage = await looked_through(agent)
        assert (stage.record.state, len((place / "weights").read_bytes())) == ("READY", 100)  # a job may be reading it
        for job in ("job", "another"):  # whoever begins now is told
            with pytest.raises(BdnError) as caught:
                await staged(agent, mirror, manifest, job=job)
            assert caught.value.code == "NOT_FOUND"
        assert agent.stages.document(stage).error
        assert sorted(tree(place)) == sorted(FILES)
        mirror.faults.clear()
        again = await staged(agent, mirror, manifest)
        assert (again.state, again.error) == ("READY", None)
        assert tree(Path(again.mounts[0].path)) == FILES
    tally.add(scenarios=2, faults=1, refused=2, repaired=1)


async def test_a_ready_stage_says_what_the_scrub_had_to_put_aside_and_heals_where_it_stands(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    files = {**FILES, "weights": noise(CHUNK_SIZE + 100)}
    manifest, elapsed = mirror.publish(files), Clock(0.0)
    async with Rig(mirror, tmp_path, {"scrub_rate": 10**12}).agent(elapsed=elapsed) as agent:
        place = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        folder = inode(place)
        flip(cached(agent, manifest, "weights"), CHUNK_SIZE + 5)  # the right size and wrong bytes
        mirror.faults[mirror.chunks(manifest, "weights")[1]] = [missing] * 50
        command = VerifyCommand(id="ver_1", manifests=[str(manifest.digest)], grants=[])
        assert [item.outcome for item in (await verified(agent, command)).items] == ["lost"]
        await agent.housekeeping.reap()
        stage = await looked_through(agent)
        document = agent.stages.document(stage)
        assert (document.state, document.error and document.error.code) == ("READY", "NOT_FOUND")
        with pytest.raises(BdnError):
            await staged(agent, mirror, manifest)
        assert sorted(tree(place)) == sorted(files)
        mirror.faults.clear()
        elapsed.now += 1000
        await agent.housekeeping.reap()
        stage = await looked_through(agent)
        assert agent.stages.document(stage).error is None
        assert tree(place) == files
        assert inode(place) == folder, "a running job's folder is not exchanged"
    tally.add(scenarios=1, faults=1, refused=1, repaired=1)


async def test_a_stage_renewed_while_it_was_about_to_expire_stays(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    elapsed = Clock(0.0)
    async with Rig(mirror, tmp_path).agent(elapsed=elapsed) as agent:
        stage = await agent.stages.start("job", mirror.grant(mirror.publish(FILES)), 100)
        await agent.stages.finish(stage.record.id)
        elapsed.now += 101
        async with stage.lock:
            reaping = asyncio.create_task(agent.housekeeping.reap())
            await asyncio.sleep(0)  # it sees that the time is over, and waits for the lock
            await agent.stages.lifecycle.renew(stage, 100)
        await reaping
        assert stage.record.state == "READY"
    tally.add(scenarios=1)
