"""Wrong bytes on an agent's own disk are found by the scrub or on demand, and only their chunks are fetched again."""

import asyncio
import mmap
import os
import random
from contextlib import suppress
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, Manifest, digest_of
from bdn.core.errors import DiskFailedError, NotFoundError
from bdn.disk.direct import UncachedFile
from bdn.wire.operation_schema import EvictCommand, PathVerificationRequest, VerifyCommand, VerifyReport
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import StageRequest
from node_agent.app import Agent
from node_agent.background_tasks import in_thread
from node_agent.cache.records import Held
from node_agent.disk.places import Places
from node_agent.fetch.documents import Catalogue
from node_agent.scrub import repair, scrubber
from node_agent.scrub.reading import Findings
from node_agent.scrub.scrubber import Scrubber
from tests.support.agent.mirror import FORMS, AgentMirror, missing
from tests.support.agent.mounts import mounted_xfs, needs_xfs
from tests.support.agent.process import Program
from tests.support.agent.rig import Rig, noise, staged, verified
from tests.support.agent.ring import Ring
from tests.support.content.trees import tree
from tests.support.crash.rot import (
    DAMAGES,
    WEEK,
    a_week_later,
    cached,
    digest_of_path,
    evidence,
    figures,
    flip,
    now,
    repaired,
)
from tests.support.promises.tally import Scale, Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("corruption")
MIB = 1024 * 1024
FILES = {
    "weights": noise(2 * CHUNK_SIZE + 300_001, 1),
    "one.bin": noise(2 * MIB + 17, 2),
    **{f"small/{number}": noise(20_000 + number, 10 + number) for number in range(5)},
}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"scrub_rate": 10**12})


# --- the node tier ---


@pytest.mark.parametrize("form", FORMS)
async def test_the_scrub_finds_a_wrong_chunk_and_fetches_it_alone(
    server: AgentMirror, tmp_path: Path, form: str, tally: Tally
) -> None:
    mirror = server.renewed(is_packed=form == "packed")
    manifest, clock = mirror.publish(FILES), now()
    async with Rig(mirror, tmp_path, {"scrub_rate": 10**12}).agent(clock) as agent:
        view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        count = 0
        for path in ("weights", "one.bin", "small/3"):
            chunks, file = mirror.chunks(manifest, path), cached(agent, manifest, path)
            for what, damage in DAMAGES.items():
                index = len(chunks) // 2
                before = file.stat()
                with (view / path).open("rb") as opened:
                    mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
                damage(file, index * CHUNK_SIZE + 12_345)
                mirror.forget()

                await a_week_later(agent, clock)

                wrong = chunks[index:] if what == "truncated" else [chunks[index]]
                assert mirror.chunk_requests == dict.fromkeys(wrong, 1), (path, what)
                assert bytes(mapped) == FILES[path], (path, what)  # a job that has it mapped
                mapped.close()
                assert (file.stat().st_ino, file.stat().st_mode & 0o777) == (before.st_ino, 0o444)
                count += len(wrong)
                tally.add(scenarios=1, faults=1, repaired=len(wrong))
        assert tree(view) == FILES
        assert len(evidence(agent)) == repaired(await figures(agent)) == count
        assert all(found["tier"] == "node" and found["found"] != found["expected"] for found in evidence(agent))


async def test_one_round_repairs_whatever_is_damaged(rig: Rig, mirror: AgentMirror, scale: Scale, tally: Tally) -> None:
    files = {**FILES, "other": noise(CHUNK_SIZE + 5, 3), "third": noise(3 * CHUNK_SIZE, 4)}
    manifest, clock = mirror.publish(files), now()
    places = [(path, index) for path in files for index in range(len(mirror.chunks(manifest, path)))]
    async with rig.agent(clock) as agent:
        view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        for seed in range(scale.of(4, 60)):
            rng = random.Random(seed)
            chosen = rng.sample(places, rng.randint(0, len(places)))
            for path, index in chosen:
                size = min(CHUNK_SIZE, len(files[path]) - index * CHUNK_SIZE)
                flip(cached(agent, manifest, path), index * CHUNK_SIZE + rng.randrange(size))
            mirror.forget()

            await a_week_later(agent, clock)

            wanted = {mirror.chunks(manifest, path)[index]: 1 for path, index in chosen}
            assert mirror.chunk_requests == wanted, f"seed {seed}"
            tally.add(scenarios=1, faults=len(chosen), repaired=len(chosen), wrong=int(tree(view) != files))


async def test_what_cannot_be_obtained_is_not_served_or_staged_and_the_next_stage_fetches_its_chunk_alone(
    rig: Rig, mirror: AgentMirror, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, clock = mirror.publish(FILES), now()
    bad = mirror.chunks(manifest, "weights")[1]
    async with rig.agent(clock) as agent:
        view = Path((await staged(agent, mirror, manifest, job="running")).mounts[0].path)
        flip(cached(agent, manifest, "weights"), CHUNK_SIZE + 1)
        mirror.faults[bad] = [missing] * 20

        await a_week_later(agent, clock)

        assert not cached(agent, manifest, "weights").exists()
        assert not agent.cache.index.is_complete(manifest.digest)
        assert (view / "weights").stat().st_size == len(FILES["weights"])  # the job's only copy stays
        assert "these jobs see it as it is: running" in caplog.text
        found = await figures(agent)
        assert (repaired(found, outcome="lost"), found["bdn_agent_lost_files_total"]) == (1, 1)
        for digest in (bad, digest_of_path(manifest, "weights")):
            assert not agent.cache.chunks.holds(digest)
        ledger = agent.cache.index.ledger
        assert ledger.used_bytes == manifest.bytes_total  # its part is counted

        mirror.faults.clear()
        mirror.forget()
        clock.now = now().now  # or the grant of the next stage would have expired
        again = await staged(agent, mirror, manifest, job="next")

        assert mirror.chunk_requests == {bad: 1}
        assert tree(Path(again.mounts[0].path)) == tree(view) == FILES  # the running job's view healed with it
        tally.add(scenarios=1, faults=1, repaired=1)


async def test_without_a_good_grant_damage_is_put_aside(rig: Rig, mirror: AgentMirror, tally: Tally) -> None:
    manifest, clock = mirror.publish(FILES), now()
    async with rig.agent(clock, auth="token", token="t") as agent:
        stage = await staged(agent, mirror, manifest)
        await agent.scrub.catch_up()
        clock.now += 7200  # the grant is good for an hour
        command = VerifyCommand(id="ver_1", manifests=[str(manifest.digest)], grants=[])
        flip(cached(agent, manifest, "one.bin"), 5)
        lost = await verified(agent, command)

        assert [(item.outcome, item.path) for item in lost.items] == [("lost", "one.bin")]
        flip(cached(agent, manifest, "weights"), 5)
        grant = mirror.grant(manifest, expires_in=86400)
        lent = await verified(agent, command.model_copy(update={"grants": [grant]}))

        assert [(item.outcome, item.path) for item in lent.items] == [("repaired", "weights")]
        assert (Path(stage.mounts[0].path) / "weights").read_bytes() == FILES["weights"]
        tally.add(scenarios=2, faults=2, repaired=1, refused=1)


async def test_a_file_that_vanished_or_grew_is_whole_again(rig: Rig, mirror: AgentMirror, tally: Tally) -> None:
    manifest, clock = mirror.publish(FILES), now()
    async with rig.agent(clock) as agent:
        view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        with cached(agent, manifest, "weights").open("ab") as file:
            file.write(b"surplus")
        cached(agent, manifest, "one.bin").unlink()
        mirror.forget()

        await a_week_later(agent, clock)

        assert mirror.chunk_requests == dict.fromkeys(mirror.chunks(manifest, "one.bin"), 1)
        assert tree(view) == FILES
        assert cached(agent, manifest, "one.bin").read_bytes() == FILES["one.bin"]
        assert agent.cache.index.is_complete(manifest.digest)
        assert sorted(path.read_bytes() for path in agent.places.quarantine.glob("*.bytes")) == [b"surplus"]
        tally.add(scenarios=2, faults=2, repaired=2)


async def half_filled(agent: Agent, mirror: AgentMirror, part: Manifest) -> Manifest:
    """A manifest that its job left before its largest file was there; what ``part`` names is whole."""
    whole = mirror.publish(FILES)
    for manifest in (part, whole):
        mirror.every = missing if manifest is whole else None
        with suppress(NotFoundError, ReportedError):
            await staged(agent, mirror, manifest, job=str(manifest.digest))
    mirror.every = None
    for stage in agent.stages.registry.all():
        await agent.stages.release(stage.record.id)
    mirror.forget()
    return whole


async def test_who_replaces_a_file_brings_nothing_else(rig: Rig, mirror: AgentMirror, tally: Tally) -> None:
    part, clock = mirror.publish({path: FILES[path] for path in FILES if path != "weights"}), now()
    async with rig.agent(clock) as agent:
        whole = await half_filled(agent, mirror, part)
        cached(agent, part, "one.bin").unlink()
        await a_week_later(agent, clock)

        assert mirror.chunk_requests == dict.fromkeys(
            mirror.chunks(part, "one.bin"), 1
        )  # for the one that lacks only this
        assert agent.cache.index.is_complete(part.digest)
        assert not agent.cache.index.is_complete(whole.digest)

        await agent.evictions.evict(EvictCommand(id="e", manifests=[str(part.digest)]))
        mirror.forget()
        cached(agent, whole, "one.bin").unlink()
        await a_week_later(agent, clock)

        assert mirror.requests == 0
        assert repaired(await figures(agent), outcome="lost") == 1
        assert cached(agent, whole, "small/1").exists()
        assert agent.cache.index.leases.leased() == ()
        clock.now = now().now  # or the grant of the next stage would have expired
        assert tree(Path((await staged(agent, mirror, whole, job="next")).mounts[0].path)) == FILES
        tally.add(scenarios=2, faults=2, repaired=1, refused=1)


async def test_a_manifest_stays_while_one_file_of_it_is_replaced(
    rig: Rig, mirror: AgentMirror, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, clock = mirror.publish(FILES), now()
    obtain, refused = Catalogue.obtain, list[bool]()
    async with rig.agent(clock) as agent:
        stage = await staged(agent, mirror, manifest)
        await agent.stages.release(stage.id)
        mirror.forget()
        cached(agent, manifest, "one.bin").unlink()

        async def obtain_late(self: Catalogue, digest: Digest, grant: str, *, is_complete: bool) -> Held:
            report = await agent.evictions.evict(EvictCommand(id="e", manifests=[str(digest)]))
            refused.extend(item.refused for item in report)
            return await obtain(self, digest, grant, is_complete=is_complete)

        monkeypatch.setattr(Catalogue, "obtain", obtain_late)
        await a_week_later(agent, clock)

        assert refused == [True]
        assert mirror.chunk_requests == dict.fromkeys(mirror.chunks(manifest, "one.bin"), 1)
        assert agent.cache.index.leases.leased() == ()
        tally.add(scenarios=1, faults=1, repaired=1, refused=1)


async def test_what_the_disk_cannot_read_is_written_again(
    rig: Rig, mirror: AgentMirror, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, clock = mirror.publish(FILES), now()
    read, failures = UncachedFile.read, [2]

    def fail_at(self: UncachedFile, buffer: memoryview, offset: int, size: int) -> int:
        if failures[0] and offset == CHUNK_SIZE:
            failures[0] -= 1
            raise OSError(5, "Input/output error")
        return read(self, buffer, offset, size)

    async with rig.agent(clock) as agent:
        view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        mirror.forget()
        await agent.scrub.catch_up()
        monkeypatch.setattr(UncachedFile, "read", fail_at)

        await a_week_later(agent, clock)

        assert mirror.chunk_requests == {mirror.chunks(manifest, "weights")[1]: 1}
        assert [found["reason"] for found in evidence(agent)] == ["it cannot be read: Input/output error"]
        assert tree(view) == FILES
        tally.add(scenarios=1, faults=1, repaired=1)


async def test_a_file_on_a_place_that_does_not_keep_bytes_is_filled_anew_elsewhere(
    rig: Rig, mirror: AgentMirror, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, clock = mirror.publish(FILES), now()
    async with rig.agent(clock) as agent:
        view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        file = cached(agent, manifest, "weights")
        before = file.stat().st_ino
        flip(file, 7)
        with monkeypatch.context() as patch:
            patch.setattr(repair, "write_all", lambda *_: None)
            await a_week_later(agent, clock)

        assert file.read_bytes() == FILES["weights"]
        assert file.stat().st_ino != before
        assert (agent.places.quarantine / f"{file.name}.0").stat().st_ino == before
        assert repaired(await figures(agent)) == 1
        assert tree(view) == FILES  # who opens it from now on does not get what stands in the bad place
        tally.add(scenarios=1, faults=1, repaired=1)


async def test_a_file_with_unknown_chunks_is_checked_whole(rig: Rig, mirror: AgentMirror, tally: Tally) -> None:
    manifest, clock = mirror.publish(FILES), now()
    async with rig.agent(clock, auth="token", token="t") as agent:
        await staged(agent, mirror, manifest)
        agent.places.layout(manifest.digest).unlink()
        clock.now += 7200  # and no grant to ask the mirror with
        right = await verified(agent, VerifyCommand(id="1", all=True))
        flip(cached(agent, manifest, "weights"), 9)
        wrong = await verified(agent, VerifyCommand(id="2", all=True))

        assert (right.items, right.bytes_read) == ([], manifest.bytes_total)
        assert [(item.outcome, item.path) for item in wrong.items] == [("lost", "weights")]
        assert not cached(agent, manifest, "weights").exists()
        tally.add(scenarios=2, faults=1, refused=1)


@needs_xfs
async def test_rot_that_the_page_cache_hides_is_found(mirror: AgentMirror, tmp_path: Path, tally: Tally) -> None:
    manifest, clock, image = mirror.publish(FILES), now(), tmp_path / "image"
    content = FILES["weights"]
    with mounted_xfs(tmp_path / "xfs", image) as disk:
        async with Rig(mirror, disk, {"scrub_rate": 10**12}).agent(clock) as agent:
            view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
            assert tree(view) == FILES  # now the page cache has it
            await in_thread(os.sync)
            with image.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as blocks:
                place = blocks.find(content[CHUNK_SIZE + 4096 : CHUNK_SIZE + 4196])
            flip(image, place + 50)
            assert tree(view) == FILES  # and goes on telling so
            mirror.forget()

            await a_week_later(agent, clock)

            assert mirror.chunk_requests == {mirror.chunks(manifest, "weights")[1]: 1}
            assert repaired(await figures(agent)) == 1
            with image.open("rb") as file:
                file.seek(place)
                assert file.read(100) == content[CHUNK_SIZE + 4096 : CHUNK_SIZE + 4196]
    tally.add(scenarios=1, faults=1, repaired=1)


# --- the cluster tier ---


async def test_a_wrong_chunk_of_the_cluster_tier_is_dropped(rig: Rig, mirror: AgentMirror, tally: Tally) -> None:
    manifest, clock = mirror.publish(FILES), now()
    content = FILES["weights"][:CHUNK_SIZE]
    chunk = digest_of(content)
    async with rig.agent(clock) as agent:
        tier = agent.scrub.scrubber.tier
        for number, damage in enumerate(DAMAGES.values(), 1):
            assert tier.keep(manifest.digest, chunk, memoryview(content))
            damage(tier.files.path(manifest.digest, chunk), 99_999)

            await a_week_later(agent, clock)

            assert not tier.holds(chunk)
            assert tier.index.ledger.used_bytes == 0
            assert repaired(await figures(agent), "cluster", "lost") == number
            tally.add(scenarios=1, faults=1, refused=1)
        assert {found["tier"] for found in evidence(agent)} == {"cluster"}
        assert all(len(path.read_bytes()) <= CHUNK_SIZE for path in agent.places.quarantine.glob("*.bytes"))


# --- staged files ---


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_staged_copy_is_repaired_from_the_cache_on_request(
    rig: Rig, mirror: AgentMirror, tally: Tally, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    manifest, clock = mirror.publish(FILES), now()
    async with rig.agent(clock, auth="token", token="t") as agent:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", refuse)
            mount = (await staged(agent, mirror, manifest)).mounts[0]
        assert mount.view in {"copy", "reflink"}
        view = Path(mount.path)
        clock.now += 7200  # what is right here needs no grant
        DAMAGES[damage](view / "weights", CHUNK_SIZE + 3)
        DAMAGES[damage](view / "small/1", 5)
        mirror.forget()
        looked = await agent.verifications.look_at(PathVerificationRequest(path=str(view), repair=False))
        assert {item.outcome for item in looked.items} == {"damaged"}

        report = await agent.verifications.look_at(PathVerificationRequest(path=str(view)))

        assert {item.outcome for item in report.items} == {"repaired"}
        assert {item.path for item in report.items} == {str(view / "weights"), str(view / "small/1")}
        assert mirror.requests == 0
        assert tree(view) == FILES
        tally.add(scenarios=1, faults=2, repaired=len(report.items))


async def test_a_linked_file_that_somebody_edited_is_itself_again(rig: Rig, mirror: AgentMirror, tally: Tally) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        (view / "small/2").chmod(0o644)
        with (view / "small/2").open("r+b") as file:
            file.write(b"edited")
        report = await agent.verifications.look_at(PathVerificationRequest(path=str(view / "small")))

        assert [(item.outcome, item.path) for item in report.items] == [("repaired", "small/2")]
        assert report.chunks_read == 5
        assert tree(view) == FILES
        for elsewhere in ("/etc/hosts", str(view / "nothing"), "relative"):
            with pytest.raises(NotFoundError, match="READY stage"):
                await agent.verifications.look_at(PathVerificationRequest(path=elsewhere))
        tally.add(scenarios=1, faults=1, repaired=1)


async def test_a_link_to_itself_is_damage_alone(rig: Rig, mirror: AgentMirror, tmp_path: Path, tally: Tally) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        for elsewhere in (tmp_path / "loop", tmp_path / "loop/below", view / ("long" * 100)):
            with pytest.raises(NotFoundError):
                await agent.verifications.look_at(PathVerificationRequest(path=str(elsewhere)))
        for name in ("one.bin", "small"):
            (view / name).rename(tmp_path / name)
            (view / name).symlink_to(view / name)
        flip(view / "weights", 5)
        report = await agent.verifications.look_at(PathVerificationRequest(path=str(view)))

        found = {(str(item.path).removeprefix(f"{view}/"), item.outcome) for item in report.items}
        assert found == {
            ("weights", "repaired"),
            *((path, "damaged") for path in FILES if path == "one.bin" or path.startswith("small/")),
        }
        assert (view / "weights").read_bytes() == FILES["weights"]
        tally.add(scenarios=1, faults=3, repaired=1, refused=3)


async def test_nothing_is_written_through_a_link(rig: Rig, mirror: AgentMirror, tmp_path: Path, tally: Tally) -> None:
    manifest = mirror.publish(FILES)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/1").write_bytes(b"somebody else's file")
    async with rig.agent() as agent:
        view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        (view / "small").rename(tmp_path / "ours")
        (view / "small").symlink_to(tmp_path / "theirs")
        report = await agent.verifications.look_at(PathVerificationRequest(path=str(view)))

        assert report.items == []
        assert tree(tmp_path / "theirs") == {"1": b"somebody else's file"}
        tally.add(scenarios=1, refused=1)


# --- who notices ---


async def test_a_fill_that_finds_damage_tells_the_scrub(rig: Rig, mirror: AgentMirror, tally: Tally) -> None:
    first = mirror.publish({"a": FILES["weights"]})
    second = mirror.publish({"b": FILES["weights"][:CHUNK_SIZE] + b"another end"})
    async with rig.agent(scrub_seconds=0) as agent:
        await staged(agent, mirror, first)
        flip(cached(agent, first, "a"), 4711)
        stage = await staged(agent, mirror, second)

        assert tree(Path(stage.mounts[0].path)) == {"b": FILES["weights"][:CHUNK_SIZE] + b"another end"}
        async with asyncio.timeout(20):
            while repaired(await figures(agent)) < 1:  # noqa: ASYNC110 - it is told to the loop that runs in the agent
                await asyncio.sleep(0.01)
        assert cached(agent, first, "a").read_bytes() == FILES["weights"]
        tally.add(scenarios=1, faults=1, repaired=1)


async def test_a_peer_that_gets_wrong_bytes_tells_the_holder(mirror: AgentMirror, tmp_path: Path, tally: Tally) -> None:
    ring = Ring(mirror, tmp_path)
    manifest = mirror.publish(FILES)
    async with ring.agent("holder", scrub_seconds=0) as holder, ring.agent("asker", roles="node") as asker:
        await staged(holder, mirror, manifest)
        flip(cached(holder, manifest, "one.bin"), 100)
        mirror.forget()
        stage = await staged(asker, mirror, manifest)

        assert tree(Path(stage.mounts[0].path)) == FILES
        async with asyncio.timeout(20):
            while repaired(await figures(holder)) < 1:  # noqa: ASYNC110 - it is told to the loop of the agent
                await asyncio.sleep(0.01)
        assert cached(holder, manifest, "one.bin").read_bytes() == FILES["one.bin"]
        assert mirror.chunk_requests[mirror.chunks(manifest, "one.bin")[0]] <= 2  # for the asker, and for the repair
        tally.add(scenarios=1, faults=1, repaired=1)


async def test_a_wrong_file_is_not_served_while_it_is_repaired(rig: Rig, mirror: AgentMirror, tally: Tally) -> None:
    manifest = mirror.publish(FILES)
    bad = mirror.chunks(manifest, "one.bin")[0]
    async with rig.agent() as agent:
        await staged(agent, mirror, manifest)
        flip(cached(agent, manifest, "one.bin"), 0)
        gate, asked = mirror.hold(bad)
        async with asyncio.TaskGroup() as group:
            work = group.create_task(verified(agent, VerifyCommand(id="1", all=True)))
            async with asyncio.timeout(20):
                await asked.wait()
            assert not agent.cache.chunks.holds(bad)
            gate.set()
        assert [item.outcome for item in work.result().items] == ["repaired"]
        assert agent.cache.chunks.holds(bad)
        tally.add(scenarios=1, faults=1, repaired=1)


async def test_the_mirror_commands_a_verification(rig: Rig, mirror: AgentMirror, tally: Tally) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        await staged(agent, mirror, manifest)
        flip(cached(agent, manifest, "one.bin"), 0)
        mirror.ask(VerifyCommand(id="ver_look", manifests=[str(manifest.digest)], repair=False))
        look = await told(mirror, "ver_look")
        mirror.ask(VerifyCommand(id="ver_mend", all=True, tier="node"))
        mend = await told(mirror, "ver_mend")

        assert [(item.outcome, item.node, item.sources) for item in look.items] == [
            ("damaged", "node-1", ["hf://org/model-0"])
        ]
        assert [item.outcome for item in mend.items] == ["repaired"]
        assert mend.bytes_read == manifest.bytes_total
        assert cached(agent, manifest, "one.bin").read_bytes() == FILES["one.bin"]
        tally.add(scenarios=2, faults=1, repaired=1)


async def told(mirror: AgentMirror, verification: str) -> VerifyReport:
    async with asyncio.timeout(30):
        while True:
            for report in mirror.reports(verification):
                assert report.verify is not None
                return report.verify
            await asyncio.sleep(0.01)  # it comes from another thread


# --- kills and restarts ---


async def test_an_agent_that_is_killed_in_the_middle_of_a_repair_repairs_it_when_it_is_back(
    mirror: AgentMirror, tmp_path: Path, scale: Scale, tally: Tally
) -> None:
    manifest = mirror.publish(FILES)
    program = Program(tmp_path, mirror.url, {"BDN_AGENT_SCRUB_SECONDS": "0"})
    bad = mirror.chunks(manifest, "weights")[1]
    async with program.daemon() as daemon:
        stage = await daemon.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest), wait=True))
    view = Path(stage.mounts[0].path)
    for _ in range(scale.of(1, 6)):
        mirror.forget()
        async with program.daemon() as daemon:
            flip(Places(tmp_path / "cache").file(digest_of_path(manifest, "weights")), CHUNK_SIZE + 5)
            gate, asked = mirror.hold(bad)
            async with asyncio.TaskGroup() as group:
                request = PathVerificationRequest(path=str(view))
                asking = group.create_task(_given_up(daemon.client._send("POST", "/verifications", body=request)))
                async with asyncio.timeout(30):
                    await asked.wait()
                await daemon.kill()
                gate.set()
                await asking
        async with program.daemon(), asyncio.timeout(30):
            while (view / "weights").read_bytes() != FILES["weights"]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        assert mirror.chunk_requests == {bad: 2}
        assert tree(view) == FILES
        tally.add(scenarios=1, faults=1, kills=1, repaired=1)


async def _given_up(request: object) -> None:
    with pytest.raises(Exception):  # noqa: B017 - the process is gone
        await request  # type: ignore[misc]


@pytest.mark.parametrize("at", [1, 4])
async def test_a_round_goes_on_after_a_restart_where_it_was(
    rig: Rig, mirror: AgentMirror, tally: Tally, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    manifest, clock = mirror.publish(FILES), now()
    read: list[Digest] = []
    verify = Scrubber.file

    async def counted(self: Scrubber, manifest: Digest, content: Digest, findings: Findings) -> None:
        if len(read) == at:
            raise DiskFailedError("here", "the test ends the first run")
        await verify(self, manifest, content, findings)
        read.append(content)

    monkeypatch.setattr(scrubber, "_NOTE_SECONDS", 0)
    async with rig.agent(clock) as agent:
        await staged(agent, mirror, manifest)
        await agent.scrub.catch_up()  # what was under way: the node held nothing then, or held all of it
        monkeypatch.setattr(Scrubber, "file", counted)
        clock.now += WEEK
        with pytest.raises(DiskFailedError):
            await agent.scrub.catch_up()
    before, at = read[:], -1
    async with rig.agent(clock) as agent:
        await agent.scrub.catch_up()

        assert (len(before), sorted(read)) == (len(before), sorted(manifest.contents))
        assert (await figures(agent))["bdn_agent_scrub_round_ended"] == clock.now
    tally.add(scenarios=1)
