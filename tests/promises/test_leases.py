"""Leases and views: one is there exactly as long as the other, through clocks that jump, kills, losses and ends half-way."""

import asyncio
import errno
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import BdnError, DiskFailedError, InvalidRequestError
from bdn.core.events import Event
from bdn.core.layout import Manifest
from bdn.wire.operation_schema import EvictCommand, VerifyCommand
from node_agent.app import Agent
from node_agent.journal import Journal
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.records import StageRecords
from node_agent.stage.stage import NodeStage, StageRecord
from tests.fakes.clock import Clock
from tests.support.agent.mirror import AgentMirror, missing
from tests.support.agent.rig import Rig, at_rest, staged, verified
from tests.support.content.noise import noise
from tests.support.content.trees import tree
from tests.support.crash.rot import cached, digest_of_path, flip
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("leases")
DAY = 86400.0
FILES = [{"weights": noise(4000, number), "config.json": bytes([number])} for number in range(3)]


async def ready(
    agent: Agent, mirror: AgentMirror, number: int, ttl: float | None, *, job: str | None = None
) -> NodeStage:
    manifest = mirror.publish(FILES[number])
    await agent.heartbeats.beat()
    stage = await agent.stages.start(job or f"job-{number}", mirror.grant(manifest, expires_in=1e9), ttl)
    await agent.stages.finish(stage.record.id)
    return stage


def is_whole(agent: Agent, stage: NodeStage, number: int) -> bool:
    place = agent.stages.document(stage).mounts[0].path
    leased = all(map(agent.cache.index.leases.is_leased, stage.record.manifests))
    return leased and tree(Path(place)) == FILES[number]


@pytest.mark.parametrize("jump", [DAY, -DAY, 400 * DAY])
async def test_a_clock_that_is_set_neither_ends_a_lease_nor_prolongs_it(
    mirror: AgentMirror, tmp_path: Path, jump: float
) -> None:
    wall, elapsed = Clock(), Clock(50.0)
    async with Rig(mirror, tmp_path).agent(wall, elapsed) as agent:
        stage = await ready(agent, mirror, 0, 100)
        wall.now += jump
        elapsed.now += 99
        await agent.housekeeping.reap()
        assert is_whole(agent, stage, 0)
        told = agent.stages.document(stage).expires_at
        assert told is not None
        assert abs(told.timestamp() - (wall.now + 1)) < 1e-3  # people are told by the clock that they see
        report = await agent.evictions.evict(EvictCommand(id="e", all=True))
        assert [item.refused for item in report] == [True]
        elapsed.now += 1
        await agent.housekeeping.reap()
        assert stage.record.state == "RELEASED"


async def test_whatever_clocks_restarts_and_renewals_do_a_stage_has_its_whole_time(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    for seed in range(at_scale(2, 25)):
        await live(mirror, tmp_path / str(seed), seed, tally)


async def live(mirror: AgentMirror, root: Path, seed: int, tally: Tally) -> None:
    """One history against the plainest account of it: seconds with an agent since somebody last asked for the stage."""
    chance, wall, elapsed = random.Random(seed), Clock(), Clock(0.0)
    ttls: dict[int, float | None] = {}
    left: dict[int, float] = {}
    for _ in range(4):
        async with Rig(mirror, root).agent(wall, elapsed) as agent:
            left.update({number: ttl for number, ttl in ttls.items() if ttl is not None and number in left})
            for _ in range(8):
                what = chance.choice(["stage", "renew", "jump", "pass", "pass"])
                number, ttl = chance.randrange(3), chance.choice([None, 1.0, 60.0, 10 * DAY])
                if what == "jump":
                    wall.now += chance.choice([DAY, -DAY, 30 * DAY, -3600])
                elif what == "pass":
                    seconds = chance.choice([0.5, 30.0, 59.5, 2 * DAY])
                    wall.now, elapsed.now = wall.now + seconds, elapsed.now + seconds
                    left = {number: time - seconds for number, time in left.items()}
                elif what == "stage" and number not in ttls:
                    await ready(agent, mirror, number, ttl)
                    ttls[number] = ttl
                    left.update({} if ttl is None else {number: ttl})
                elif what == "renew" and number in ttls:
                    await agent.stages.renew(stage_of(agent, number).record.id, ttl)
                    ttls[number] = ttl
                    left.pop(number, None)
                    left.update({} if ttl is None else {number: ttl})
                await agent.housekeeping.reap()
                for over in [number for number, time in left.items() if time <= 0]:
                    assert stage_of(agent, over).record.state == "RELEASED", (seed, over)
                    del left[over], ttls[over]
                for number in ttls:
                    assert is_whole(agent, stage_of(agent, number), number), (seed, number)
                tally.add(scenarios=1, faults=what == "jump")
        elapsed.now = chance.choice([0.0, elapsed.now + 5 * DAY])  # down for long, or the machine was started anew


def stage_of(agent: Agent, number: int) -> NodeStage:
    return next(stage for stage in agent.stages.registry.all() if stage.record.job_id == f"job-{number}")


# --- Stages that end while something else is at work on them, or that end half-way: no lease without a view, and no view without one ---
MODEL = {"weights": noise(CHUNK_SIZE + 100), "config.json": b"{}"}


@asynccontextmanager
async def lacking(mirror: AgentMirror, root: Path) -> AsyncIterator[tuple[Agent, NodeStage, Manifest]]:
    """An agent with a READY stage whose largest file was lost."""
    manifest = mirror.publish(MODEL)
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
    mirror: AgentMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


async def test_a_mend_that_has_begun_ends_with_the_release(mirror: AgentMirror, tmp_path: Path) -> None:
    async with lacking(mirror, tmp_path) as (agent, stage, manifest):
        gate, asked = mirror.hold()
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
    mirror: AgentMirror, tmp_path: Path, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    manifest = mirror.publish(MODEL)
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
        assert tree(Path(again.mounts[0].path)) == MODEL
        assert agent.cache.index.leases.is_leased(manifest.digest)
        await agent.stages.renew(stage.id, 60)
        await agent.stages.release(stage.id)
        assert is_gone(agent, agent.stages.registry.find(stage.id))


async def test_a_pull_whose_release_was_lost_leases_again(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest, place = mirror.publish(MODEL), tmp_path / "mine"
    async with Rig(mirror, tmp_path / "data").agent() as agent:
        stage = await agent.pulls.begin(mirror.grant(manifest), place)
        await agent.stages.finish(stage.record.id)
        with pytest.MonkeyPatch.context() as patch:
            keep_records(patch)
            with pytest.raises(DiskFailedError):
                await agent.stages.release(stage.record.id)
        assert agent.cache.index.leases.leased() == ()

        await agent.pulls.begin(mirror.grant(manifest), place)
        await agent.stages.finish(stage.record.id)

        assert agent.cache.index.leases.leased() == (manifest.digest,)
        assert tree(place) == MODEL


async def test_a_stage_that_is_asked_for_while_it_fails_leases_nothing(
    mirror: AgentMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# --- What a READY stage shows stays, also where files are lost that cannot be brought again now ---
LOST_MODEL = {"weights": noise(40_000), "config.json": b"{}"}


async def looked_through(agent: Agent) -> NodeStage:
    """The only stage, when nothing works on it any more."""
    (stage,) = agent.stages.registry.all()
    await at_rest(agent.stages.registry)
    return stage


async def lose_a_file(rig: Rig, mirror: AgentMirror) -> Path:
    """A READY stage's largest file is gone from the cache while no agent is there; returns where its job looks."""
    manifest = mirror.publish(LOST_MODEL)
    async with rig.agent() as agent:
        stage = await staged(agent, mirror, manifest)
    max((rig.cache / "files").glob("??/*"), key=lambda path: path.stat().st_size).unlink()
    return Path(stage.mounts[0].path)


async def test_a_stage_whose_lost_file_does_not_fit_any_more_shows_what_it_showed_and_says_so(
    mirror: AgentMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        assert tree(place) == LOST_MODEL
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
        assert tree(place) == LOST_MODEL


def inode(path: Path) -> int:
    return path.stat().st_ino


async def test_a_stage_that_shows_a_torn_file_is_not_ready(mirror: AgentMirror, tmp_path: Path) -> None:
    rig, manifest = Rig(mirror, tmp_path), mirror.publish(LOST_MODEL)
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
        assert sorted(tree(place)) == sorted(LOST_MODEL)
        mirror.faults.clear()
        again = await staged(agent, mirror, manifest)
        assert (again.state, again.error) == ("READY", None)
        assert tree(Path(again.mounts[0].path)) == LOST_MODEL


async def test_a_ready_stage_says_what_it_lost_and_heals(mirror: AgentMirror, tmp_path: Path) -> None:
    files = {**LOST_MODEL, "weights": noise(CHUNK_SIZE + 100)}
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


async def test_a_stage_renewed_while_it_was_about_to_expire_stays(mirror: AgentMirror, tmp_path: Path) -> None:
    elapsed = Clock(0.0)
    async with Rig(mirror, tmp_path).agent(elapsed=elapsed) as agent:
        stage = await agent.stages.start("job", mirror.grant(mirror.publish(LOST_MODEL)), 100)
        await agent.stages.finish(stage.record.id)
        elapsed.now += 101
        async with stage.lock:
            reaping = asyncio.create_task(agent.housekeeping.reap())
            await asyncio.sleep(0)  # it sees that the time is over, and waits for the lock
            await agent.stages.lifecycle.renew(stage, 100)
        await reaping
        assert stage.record.state == "READY"
