"""Room for job volumes is kept in the agent's space: in one sum with the cache, and before it exists."""

import asyncio
import json
import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError, DiskFailedError, InvalidRequestError
from bdn.core.layout import Manifest
from bdn.core.source.uri import CheckpointUri
from bdn.disk.durable import remove_tree
from bdn.wire.grants import CacheGrant, PushGrant
from bdn.wire.heartbeat_schema import Heartbeat, HeartbeatReply
from bdn.wire.job_schema import LEAST_BYTES, JobVolumeRequest
from node_agent.app import Agent
from node_agent.job.syncing import Syncer
from node_agent.job.volume import Volume
from tests.support.agent.mirror import AgentMirror, fresh_mirror
from tests.support.agent.mounts import needs_images, needs_mounts, unmounting
from tests.support.agent.rig import Rig, staged
from tests.support.content.noise import MIB, noise
from tests.support.waiting import until

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
    idle, needed = published(mirror, 1, 10 * MIB), published(mirror, 2, 15 * MIB)
    async with rig.agent() as agent:
        await used(agent, mirror, idle)
        await staged(agent, mirror, needed)
        with pytest.raises(CacheFullError) as full:
            await a_volume(agent, 50 * MIB)
        assert full.value.details()["needed_bytes"] == 50 * MIB
        assert full.value.details()["leased_bytes"] == 15 * MIB
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
    model = published(mirror, 1, 5 * MIB)
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


STRANGER, JOB = 65534, 65533


def can_write(path: Path, uid: int) -> bool:
    """Whether a process of this user can replace a file there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            (path / "weights").write_bytes(str(uid).encode())
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def passable(tmp_path: Path) -> None:
    """Other users reach what lies below the test's folder, as they do below that of a service."""
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make directories of other users")
@pytest.mark.parametrize("exposure", ["symlink", pytest.param("bind", marks=needs_images)])
@pytest.mark.parametrize(
    ("uid", "caller"), [(JOB, 0), (JOB, None), (None, JOB)], ids=["root-names", "port-names", "own"]
)
async def test_volume__other_local_user_knows_the_path__cannot_read_or_replace_files(
    rig: Rig, mirror: AgentMirror, passable: None, exposure: str, uid: int | None, caller: int | None
) -> None:
    with unmounting(rig.cache):
        async with rig.agent(exposure=exposure) as agent:
            request = pushing(mirror, "run").model_copy(update={"uid": uid, "gid": JOB})
            volume = await agent.volumes.create(request, caller)
            assert volume.checkpoints is not None
            for folder in (volume.scratch, volume.checkpoints):
                found = folder.place.stat()
                assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (JOB, JOB, 0o700)
                assert can_write(folder.place, JOB)
                assert not can_write(folder.place, STRANGER)
                assert (folder.place / "weights").read_bytes() == str(JOB).encode()
            assert (volume.document().uid, volume.document().gid) == (JOB, JOB)
            assert await agent.volumes.create(request, caller) is volume
            assert await agent.volumes.create(pushing(mirror, "run"), 0) is volume
            with pytest.raises(InvalidRequestError, match=f"user {JOB}, not of user {STRANGER}"):
                await agent.volumes.create(pushing(mirror, "run"), STRANGER)
            await agent.volumes.end(volume)


async def test_volume__agent_is_not_root__is_refused_for_other_users(
    rig: Rig, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.agent() as agent:
        monkeypatch.setattr(os, "geteuid", lambda: JOB)
        for request, caller in ((pushing(mirror, "run"), STRANGER), (JobVolumeRequest(run_id="run", uid=0), JOB)):
            with pytest.raises(InvalidRequestError, match=f"this agent runs as user {JOB}"):
                await agent.volumes.create(request, caller)


def pushing(mirror: AgentMirror, run: str, expires_at: float = 4e9) -> JobVolumeRequest:
    grant = mirror.signer.sign(PushGrant("org", CheckpointUri("llama", "job"), expires_at))
    return JobVolumeRequest(run_id=run, scratch_bytes=LEAST_BYTES, checkpoint_bytes=LEAST_BYTES, push_grant=grant)


async def test_an_end_that_failed_is_said_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig.agent() as agent:
        volume = await a_volume(agent, LEAST_BYTES)
        with monkeypatch.context() as broken:
            broken.setattr(volume.scratch, "close", fails)
            with pytest.raises(DiskFailedError):
                await agent.volumes.end(volume)
        assert volume.folder.exists()
        await agent.volumes.end(volume)
        assert (agent.volumes.all(), volume.folder.exists()) == ([], False)


async def test_volume__removal_fails_after_its_push__is_removed_at_the_next_try(
    rig: Rig, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_agent.job.volumes.AGAIN_SECONDS", 0.01)
    async with rig.agent() as agent:
        volume = await agent.volumes.create(pushing(mirror, "job-1"))
        discard, failures = agent.volumes.trash.discard, [fails]

        def failing_once(path: Path) -> bool:
            if path == volume.folder and failures:
                failures.pop()()
            return discard(path)

        monkeypatch.setattr(agent.volumes.trash, "discard", failing_once)
        await agent.volumes.end(volume)
        await until(lambda: volume.is_gone)
        assert (failures, agent.volumes.all(), volume.folder.exists()) == ([], [], False)


async def test_create__with_a_later_grant_while_an_ended_run_is_removed__waits_for_the_removal(
    rig: Rig, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon, discarded, may_go_on = time.time() + 1000, asyncio.Event(), threading.Event()
    async with rig.agent() as agent:
        ended = await agent.volumes.create(pushing(mirror, "job-1", soon))
        discard, loop = agent.volumes.trash.discard, asyncio.get_running_loop()

        def discarding(path: Path) -> bool:
            is_found = discard(path)
            if path == ended.folder:
                loop.call_soon_threadsafe(discarded.set)
                may_go_on.wait()
            return is_found

        monkeypatch.setattr(agent.volumes.trash, "discard", discarding)
        await agent.volumes.end(ended)
        await discarded.wait()
        async with asyncio.TaskGroup() as group:
            creating = group.create_task(agent.volumes.create(pushing(mirror, "job-2", soon + 100)))
            try:
                await asyncio.wait({creating}, timeout=0.2)  # without the rule it fails here
            finally:
                may_go_on.set()
        assert agent.volumes.all() == [creating.result()]


def fails() -> None:
    raise DiskFailedError("scratch", "the disk says no")


async def test_scratch_that_cannot_be_opened_holds_up_no_checkpoints_of_an_earlier_boot(
    rig: Rig, mirror: AgentMirror
) -> None:
    async with rig.agent() as agent:
        volume = await agent.volumes.create(pushing(mirror, "job-1"))
    spoil(volume, "scratch")
    async with rig.agent() as agent:
        await until(lambda: not agent.volumes.all())  # nothing was left to push
        assert not volume.folder.exists()
        await a_volume(agent, 60 * MIB, "job-2")  # its room is free


async def test_checkpoints_that_cannot_be_opened_are_shown_and_kept_for_a_while(rig: Rig, mirror: AgentMirror) -> None:
    async with rig.agent() as agent:
        volume = await agent.volumes.create(pushing(mirror, "job-1"))
    spoil(volume, "checkpoints")
    async with rig.agent() as agent:
        (found,) = agent.volumes.all()
        assert (found.state, found.error is not None) == ("DRAINING", True)
        with pytest.raises(DiskFailedError):
            await agent.volumes.end(found)
        assert volume.folder.exists()
    async with replace(rig, given={**rig.given, "unsynced_seconds": 0.0}).agent() as agent:
        await until(lambda: not agent.volumes.all())
        assert not volume.folder.exists()


def spoil(volume: Volume, name: str) -> None:
    """The machine was started again, and a file stands where a folder was."""
    (volume.folder / name).rmdir()
    (volume.folder / name).touch()
    record = volume.folder / "volume.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"boot": "another"}))


async def test_volumes__a_grant_that_lasts_longer__is_used_by_all_volumes_of_its_job(
    rig: Rig, mirror: AgentMirror
) -> None:
    soon = time.time() + 1000
    async with rig.agent() as agent:
        for run in ("job-1", "job-2"):
            await agent.volumes.create(pushing(mirror, run, soon))
        kept = {one.record.push_grant for one in agent.volumes.all()}
        await agent.volumes.create(pushing(mirror, "job-2", soon - 100))
        assert {one.record.push_grant for one in agent.volumes.all()} == kept
        renewed = pushing(mirror, "job-2", soon + 100)
        await agent.volumes.create(renewed)
        assert {one.record.push_grant for one in agent.volumes.all()} == {renewed.push_grant}
        syncers = [one.syncer for one in agent.volumes.all()]
        assert {one.pusher.mirror.bearer for one in syncers if one is not None} == {renewed.push_grant}
    async with rig.agent() as agent:
        assert {one.record.push_grant for one in agent.volumes.all()} == {renewed.push_grant}


async def test_after_a_start_the_runs_of_a_job_push_in_the_order_in_which_they_began(
    rig: Rig, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.agent() as agent:
        older = await agent.volumes.create(pushing(mirror, "job-1"))
        newer = await agent.volumes.create(pushing(mirror, "job-2"))
    for volume, name in ((older, "jv_" + "f" * 24), (newer, "jv_" + "0" * 24)):
        place = volume.folder.rename(volume.folder.with_name(name)) / "volume.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | {"id": name}))
    begun: list[Syncer] = []

    async def note(syncer: Syncer, _: asyncio.Event) -> None:
        begun.append(syncer)
        await asyncio.Event().wait()

    monkeypatch.setattr(Syncer, "run", note)
    async with rig.agent() as agent:
        await until(lambda: bool(begun))
        await asyncio.sleep(0)
        assert len(begun) == 1  # the newer one waits
        assert begun[0] is agent.volumes.find("jv_" + "f" * 24).syncer


async def test_a_job_of_the_same_name_of_others_has_a_grant_and_a_volume_of_its_own(
    rig: Rig, mirror: AgentMirror
) -> None:
    async with rig.agent() as agent:
        first = pushing(mirror, "run", time.time() + 1000)
        made = await agent.volumes.create(first)
        for organisation, team in (("other", None), ("org", "research")):
            grant = PushGrant(organisation, CheckpointUri("llama", "job"), 4e9, team)
            theirs = first.model_copy(update={"push_grant": mirror.signer.sign(grant)})
            with pytest.raises(InvalidRequestError):
                await agent.volumes.create(theirs)
            own = await agent.volumes.create(theirs.model_copy(update={"run_id": "another"}))
            assert (made.record.push_grant, own.record.push_grant) == (first.push_grant, theirs.push_grant)
            await agent.volumes.end(own)
            await until(lambda own=own: own.is_gone)  # type: ignore[misc]
        assert agent.volumes.all() == [made]


async def test_a_volume_that_cannot_be_opened_holds_up_no_later_run(rig: Rig, mirror: AgentMirror) -> None:
    async with rig.agent() as agent:
        volume = await agent.volumes.create(pushing(mirror, "job-1"))
    spoil(volume, "checkpoints")
    async with rig.agent() as agent:
        assert agent.volumes.unsynced_bytes > 0  # as far as anybody can tell
        later = await agent.volumes.create(pushing(mirror, "job-2"))
        await agent.volumes.end(later)
        await until(lambda: later.is_gone)


@dataclass
class HoldingMirror(AgentMirror):
    """Answers a heartbeat with mounted caches once ``answering`` is set."""

    answering: threading.Event = field(default_factory=threading.Event)
    is_asked: bool = False

    def beat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        if heartbeat.caches:
            self.is_asked = True
            assert self.answering.wait(60), "the test never let the mirror answer"
        return super().beat(heartbeat)


async def with_a_cache(agent: Agent, mirror: AgentMirror) -> JobVolumeRequest:
    known = await agent.caches.document()
    await agent.heartbeats.beat()  # which brings the keys
    grant = CacheGrant("default", "p" * 10, "t" * 10, known.cluster, known.volume_id, time.time() + 900)
    return JobVolumeRequest(run_id="job-2", scratch_bytes=LEAST_BYTES, cache_grant=mirror.signer.sign(grant))


async def test_create__mirror_slow_to_record_the_mount__opens_no_cache_and_other_volumes_end(tmp_path: Path) -> None:
    with HoldingMirror().running() as mirror:
        assert isinstance(mirror, HoldingMirror)
        async with Rig(mirror, tmp_path, {"exposure": "symlink"}).agent() as agent:
            try:
                other = await a_volume(agent, LEAST_BYTES)
                creating = asyncio.create_task(agent.volumes.create(await with_a_cache(agent, mirror)))
                await until(lambda: mirror.is_asked)
                await agent.volumes.end(other)
                assert agent.volumes.all() == []
                assert [path.name for path in agent.caches.volume.root.iterdir()] == ["volume_id"]
                assert not creating.done()
            finally:
                mirror.answering.set()
            assert (await creating).record.caches is not None
            agent.caches.volume.project("p" * 10)  # raises where there is none


async def test_create__mirror_silent__refuses_a_volume_with_a_cache(rig: Rig, mirror: AgentMirror) -> None:
    async with rig.agent() as agent:
        request = await with_a_cache(agent, mirror)
        mirror.down = True
        with pytest.raises(BdnError) as refused:
            await agent.volumes.create(request)
        assert (refused.value.code, refused.value.transient) == ("STORE_UNAVAILABLE", True)
        assert (agent.caches.mounted(), agent.volumes.all()) == ([], [])
        assert [path.name for path in agent.caches.volume.root.iterdir()] == ["volume_id"]
        assert (await a_volume(agent, LEAST_BYTES)).state == "OPEN"  # without a cache
