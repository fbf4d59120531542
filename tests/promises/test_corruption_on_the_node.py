"""Wrong bytes on an agent's own disk are found by the scrub or on demand, and only their chunks are fetched again."""

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import DiskFailedError, NotFoundError
from bdn.core.layout import Manifest
from bdn.disk.direct import UncachedFile
from bdn.disk.threads import in_thread
from bdn.wire.operation_schema import EvictCommand, PathVerificationRequest, VerifyCommand, VerifyReport
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import StageRequest
from node_agent.app import Agent
from node_agent.cache.records import Held
from node_agent.disk.places import Places
from node_agent.fetch.documents import Catalogue
from node_agent.scrub import repair, scrubber
from node_agent.scrub.reading import Findings
from node_agent.scrub.scrubber import Scrubber, ScrubRecord
from tests.support.agent.mirror import AgentMirror, in_both_forms, missing
from tests.support.agent.mounts import mounted_xfs, needs_xfs
from tests.support.agent.process import Program
from tests.support.agent.rig import Rig, staged
from tests.support.agent.ring import Ring
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.crash.rot import (
    DAMAGES,
    WEEK,
    StagedNode,
    cached,
    digest_of_path,
    flip,
    not_permitted,
    now,
    staged_node,
)
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("corruption")
FILES = {
    "weights": noise(17 * MIB + 3, 1),
    "one.bin": noise(2 * MIB + 17, 2),
    **{f"small/{number}": noise(20_000 + number, 10 + number) for number in range(5)},
}
SIZE = sum(map(len, FILES.values()))


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"scrub_rate": 10**12})


@pytest.fixture
def strict(rig: Rig) -> Rig:
    """Grants count, and a stage's own is good for an hour."""
    return Rig(rig.mirror, rig.root, {**rig.given, "auth": "token", "token": "t"})


@pytest.fixture
async def node(rig: Rig) -> AsyncIterator[StagedNode]:
    async with staged_node(rig, FILES) as node:
        yield node


# --- the node tier ---


@in_both_forms
async def test_the_scrub_finds_a_wrong_chunk_and_fetches_it_alone(node: StagedNode, tally: Tally) -> None:
    count = 0
    for path in ("weights", "one.bin", "small/3"):
        chunks, file = node.chunks(path), node.cached(path)
        for what, damage in DAMAGES.items():
            index = len(chunks) // 2
            before = file.stat()
            with (node.view / path).open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
            damage(file, index * CHUNK_SIZE + 12_345)

            await node.a_week_later()

            wrong = chunks[index:] if what == "truncated" else [chunks[index]]
            assert node.mirror.chunk_requests == dict.fromkeys(wrong, 1), (path, what)
            assert bytes(mapped) == FILES[path], (path, what)  # a job that has it mapped
            mapped.close()
            assert (file.stat().st_ino, file.stat().st_mode & 0o777) == (before.st_ino, 0o444)
            count += len(wrong)
            tally.add(scenarios=1, faults=1, repaired=len(wrong))
    assert tree(node.view) == FILES
    assert len(node.evidence()) == await node.counted() == count
    assert all(found["tier"] == "node" and found["found"] != found["expected"] for found in node.evidence())


async def test_what_cannot_be_obtained_is_not_served_or_staged_and_the_next_stage_fetches_its_chunk_alone(
    node: StagedNode, caplog: pytest.LogCaptureFixture
) -> None:
    agent, mirror, bad = node.agent, node.mirror, node.chunks("weights")[1]
    node.flip("weights", CHUNK_SIZE + 1)
    mirror.faults[bad] = [missing] * 20

    await node.a_week_later()

    assert not node.cached("weights").exists()
    assert not node.is_complete()
    assert (node.view / "weights").stat().st_size == len(FILES["weights"])  # the job's only copy stays
    assert "jobs that still see the damaged file: job" in caplog.text
    told = [vars(one) for one in caplog.records if one.getMessage() == "a chunk on this disk was wrong"]
    assert [(one["chunk"], one["path"], one["outcome"]) for one in told] == [(str(bad), "weights", "lost")]
    assert (await node.counted("lost"), (await node.figures())["bdn_agent_lost_files_total"]) == (1, 1)
    for digest in (bad, digest_of_path(node.manifest, "weights")):
        assert not agent.cache.chunks.holds(digest)
    assert agent.cache.index.ledger.used_bytes == SIZE  # its part is counted

    mirror.faults.clear()
    mirror.forget()
    node.clock.now = now().now  # or the grant of the next stage would have expired
    again = await staged(agent, mirror, node.manifest, job="next")

    assert mirror.chunk_requests == {bad: 1}
    assert tree(Path(again.mounts[0].path)) == tree(node.view) == FILES  # the running job's view healed with it


async def test_without_a_good_grant_damage_is_put_aside(strict: Rig) -> None:
    async with staged_node(strict, FILES) as node:
        await node.agent.scrub.catch_up()
        node.clock.now += 7200
        manifests = [str(node.manifest.digest)]
        node.flip("one.bin")
        lost = await node.verify(manifests=manifests, grants=[])

        assert [(item.outcome, item.path) for item in lost.items] == [("lost", "one.bin")]
        node.flip("weights")
        grant = node.mirror.grant(node.manifest, expires_in=86400)
        lent = await node.verify(manifests=manifests, grants=[grant])

        assert [(item.outcome, item.path) for item in lent.items] == [("repaired", "weights")]
        assert (node.view / "weights").read_bytes() == FILES["weights"]


async def test_a_file_that_vanished_or_grew_is_whole_again(node: StagedNode) -> None:
    with node.cached("weights").open("ab") as file:
        file.write(b"surplus")
    node.cached("one.bin").unlink()

    await node.a_week_later()

    assert node.mirror.chunk_requests == dict.fromkeys(node.chunks("one.bin"), 1)
    assert tree(node.view) == FILES
    assert node.cached("one.bin").read_bytes() == FILES["one.bin"]
    assert node.is_complete()
    assert sorted(path.read_bytes() for path in node.agent.places.quarantine.glob("*.bytes")) == [b"surplus"]


async def half_filled(agent: Agent, mirror: AgentMirror) -> Manifest:
    """A manifest that its job left before its largest file was there."""
    whole = mirror.publish(FILES)
    mirror.every = missing
    with suppress(NotFoundError, ReportedError):
        await staged(agent, mirror, whole, job=str(whole.digest))
    mirror.every = None
    for stage in agent.stages.registry.all():
        await agent.stages.release(stage.record.id)
    return whole


async def test_who_replaces_a_file_brings_nothing_else(rig: Rig) -> None:
    async with staged_node(rig, {path: FILES[path] for path in FILES if path != "weights"}) as node:
        agent, mirror, part = node.agent, node.mirror, node.manifest
        whole = await half_filled(agent, mirror)
        node.cached("one.bin").unlink()
        await node.a_week_later()

        assert mirror.chunk_requests == dict.fromkeys(node.chunks("one.bin"), 1)  # for the one that lacks only this
        assert node.is_complete()
        assert not agent.cache.index.is_complete(whole.digest)

        await agent.evictions.evict(EvictCommand(id="e", manifests=[str(part.digest)]))
        cached(agent, whole, "one.bin").unlink()
        await node.a_week_later()

        assert mirror.requests == 0
        assert await node.counted("lost") == 1
        assert cached(agent, whole, "small/1").exists()
        assert agent.cache.index.leases.leased() == ()
        node.clock.now = now().now  # or the grant of the next stage would have expired
        assert tree(Path((await staged(agent, mirror, whole, job="next")).mounts[0].path)) == FILES


async def test_a_manifest_stays_while_one_file_of_it_is_replaced(
    node: StagedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    obtain, refused = Catalogue.obtain, list[bool]()
    await node.agent.stages.release(node.stage)
    node.cached("one.bin").unlink()

    async def obtain_late(self: Catalogue, digest: Digest, grant: str, *, is_complete: bool) -> Held:
        report = await node.agent.evictions.evict(EvictCommand(id="e", manifests=[str(digest)]))
        refused.extend(item.refused for item in report)
        return await obtain(self, digest, grant, is_complete=is_complete)

    monkeypatch.setattr(Catalogue, "obtain", obtain_late)
    await node.a_week_later()

    assert refused == [True]
    assert node.mirror.chunk_requests == dict.fromkeys(node.chunks("one.bin"), 1)
    assert node.agent.cache.index.leases.leased() == ()


async def test_what_the_disk_cannot_read_is_written_again(node: StagedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    read, failures = UncachedFile.read, [2]

    def fail_at(self: UncachedFile, buffer: memoryview, offset: int, size: int) -> int:
        if failures[0] and offset == CHUNK_SIZE:
            failures[0] -= 1
            raise OSError(5, "Input/output error")
        return read(self, buffer, offset, size)

    await node.agent.scrub.catch_up()
    monkeypatch.setattr(UncachedFile, "read", fail_at)

    await node.a_week_later()

    assert node.mirror.chunk_requests == {node.chunks("weights")[1]: 1}
    assert [found["reason"] for found in node.evidence()] == ["it cannot be read: Input/output error"]
    assert tree(node.view) == FILES


async def test_a_file_on_a_place_that_does_not_keep_bytes_is_filled_anew_elsewhere(
    node: StagedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = node.cached("weights")
    before = file.stat().st_ino
    node.flip("weights", 7)
    with monkeypatch.context() as patch:
        patch.setattr(repair, "write_all", lambda *_: None)
        await node.a_week_later()

    assert file.read_bytes() == FILES["weights"]
    assert file.stat().st_ino != before
    assert (node.agent.places.quarantine / f"{file.name}.0").stat().st_ino == before
    assert await node.counted() == 1
    assert tree(node.view) == FILES  # who opens it from now on does not get what stands in the bad place


async def test_a_file_with_unknown_chunks_is_checked_whole(strict: Rig) -> None:
    async with staged_node(strict, FILES) as node:
        records = node.agent.cache.files.records
        records.recent.forget(node.manifest.digest)
        for page in node.mirror.trees[node.manifest.digest].root.pages:
            node.agent.places.document(node.manifest.digest, page.digest).unlink()
        node.clock.now += 7200  # and no grant to ask the mirror with
        right = await node.verify(all=True)
        node.flip("weights", 9)
        wrong = await node.verify(all=True)

        assert (right.items, right.bytes_read) == ([], SIZE)
        assert [(item.outcome, item.path) for item in wrong.items] == [("lost", None)]
        assert not node.cached("weights").exists()


@needs_xfs
async def test_rot_that_the_page_cache_hides_is_found(mirror: AgentMirror, tmp_path: Path) -> None:
    image, content = tmp_path / "image", FILES["weights"][CHUNK_SIZE + 4096 : CHUNK_SIZE + 4196]
    with mounted_xfs(tmp_path / "xfs", image) as disk:
        async with staged_node(Rig(mirror, disk, {"scrub_rate": 10**12}), FILES) as node:
            assert tree(node.view) == FILES  # now the page cache has it
            await in_thread(os.sync)
            with image.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as blocks:
                place = blocks.find(content)
            flip(image, place + 50)
            assert tree(node.view) == FILES  # and goes on telling so

            await node.a_week_later()

            assert mirror.chunk_requests == {node.chunks("weights")[1]: 1}
            assert await node.counted() == 1
            with image.open("rb") as file:
                file.seek(place)
                assert file.read(100) == content


# --- the cluster tier ---


async def test_a_wrong_chunk_of_the_cluster_tier_is_dropped(rig: Rig, tally: Tally) -> None:
    content = FILES["weights"][:CHUNK_SIZE]
    manifest, chunk = rig.mirror.publish(FILES), digest_of(content)
    async with staged_node(rig, {"another": b"file"}) as node:
        tier = node.agent.cache.chunks.tier
        for number, damage in enumerate(DAMAGES.values(), 1):
            assert tier.keep(manifest.digest, chunk, memoryview(content))
            damage(tier.files.path(manifest.digest, chunk), 99_999)

            await node.a_week_later()

            assert not tier.holds(chunk)
            assert tier.ledger.used_bytes == 0
            assert await node.counted("lost", "cluster") == number
            tally.add(scenarios=1, faults=1, refused=1)
        assert {found["tier"] for found in node.evidence()} == {"cluster"}
        assert all(len(path.read_bytes()) <= CHUNK_SIZE for path in node.agent.places.quarantine.glob("*.bytes"))


# --- staged files ---


@contextmanager
def copying() -> Iterator[None]:
    """Views are copies: no link may be made."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refuse)
        yield


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_staged_copy_is_repaired_from_the_cache_on_request(strict: Rig, tally: Tally, damage: str) -> None:
    async with staged_node(strict, {"another": b"file"}) as node:
        with copying():
            mount = (await staged(node.agent, node.mirror, node.mirror.publish(FILES), job="copy")).mounts[0]
        assert mount.view in {"copy", "reflink"}
        view = Path(mount.path)
        node.clock.now += 7200  # what is right here needs no grant
        DAMAGES[damage](view / "weights", CHUNK_SIZE + 3)
        DAMAGES[damage](view / "small/1", 5)
        node.mirror.forget()
        assert {item.outcome for item in (await node.look(view, repair=False)).items} == {"damaged"}

        report = await node.look(view)

        assert {item.outcome for item in report.items} == {"repaired"}
        assert {item.path for item in report.items} == {str(view / "weights"), str(view / "small/1")}
        assert node.mirror.requests == 0
        assert tree(view) == FILES
        tally.add(scenarios=1, faults=2, repaired=len(report.items))


async def test_a_link_to_itself_is_damage_alone(node: StagedNode, tmp_path: Path) -> None:
    view = node.view
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for elsewhere in (tmp_path / "loop", tmp_path / "loop/below", view / ("long" * 100)):
        with pytest.raises(NotFoundError):
            await node.look(elsewhere)
    for name in ("one.bin", "small"):
        (view / name).rename(tmp_path / name)
        (view / name).symlink_to(view / name)
    flip(view / "weights", 5)
    report = await node.look(view)

    found = {(str(item.path).removeprefix(f"{view}/"), item.outcome) for item in report.items}
    assert found == {
        ("weights", "repaired"),
        *((path, "damaged") for path in FILES if path == "one.bin" or path.startswith("small/")),
    }
    assert (view / "weights").read_bytes() == FILES["weights"]


async def test_nothing_is_written_through_a_link(node: StagedNode, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/1").write_bytes(b"somebody else's file")
    (node.view / "small").rename(tmp_path / "ours")
    (node.view / "small").symlink_to(tmp_path / "theirs")

    assert (await node.look(node.view)).items == []
    assert tree(tmp_path / "theirs") == {"1": b"somebody else's file"}


# --- who notices ---


async def test_a_fill_that_finds_damage_tells_the_scrub(rig: Rig) -> None:
    other = {"b": FILES["weights"][:CHUNK_SIZE] + b"another end"}
    async with staged_node(rig, {"a": FILES["weights"]}, scrub_seconds=0) as node:
        node.flip("a", 4711)
        stage = await staged(node.agent, node.mirror, node.mirror.publish(other), job="other")

        assert tree(Path(stage.mounts[0].path)) == other
        await node.until_repaired()
        assert node.cached("a").read_bytes() == FILES["weights"]


async def test_a_peer_that_gets_wrong_bytes_tells_the_holder(mirror: AgentMirror, tmp_path: Path) -> None:
    ring, manifest = Ring(mirror, tmp_path), mirror.publish(FILES)
    async with ring.agent("holder", scrub_seconds=0) as holder, ring.agent("asker", roles="node") as asker:
        view = Path((await staged(holder, mirror, manifest)).mounts[0].path)
        node = StagedNode(holder, mirror, manifest, now(), "", view)
        node.flip("one.bin", 100)
        mirror.forget()
        stage = await staged(asker, mirror, manifest)

        assert tree(Path(stage.mounts[0].path)) == FILES
        await node.until_repaired()
        assert node.cached("one.bin").read_bytes() == FILES["one.bin"]
        assert mirror.chunk_requests[node.chunks("one.bin")[0]] <= 2  # for the asker, and for the repair


async def test_a_wrong_file_is_not_served_while_it_is_repaired(node: StagedNode) -> None:
    (bad,) = node.chunks("one.bin")
    node.flip("one.bin", 0)
    gate, asked = node.mirror.hold(bad)
    async with asyncio.TaskGroup() as group:
        work = group.create_task(node.verify(all=True))
        async with asyncio.timeout(60):
            await asked.wait()
        assert not node.agent.cache.chunks.holds(bad)
        gate.set()
    assert [item.outcome for item in work.result().items] == ["repaired"]
    assert node.agent.cache.chunks.holds(bad)


async def test_the_mirror_commands_a_verification(node: StagedNode, mirror: AgentMirror) -> None:
    node.flip("one.bin", 0)
    mirror.ask(VerifyCommand(id="ver_look", manifests=[str(node.manifest.digest)], repair=False))
    look = await told(mirror, "ver_look")
    mirror.ask(VerifyCommand(id="ver_mend", all=True, tier="node"))
    mend = await told(mirror, "ver_mend")

    assert [(item.outcome, item.node, item.sources) for item in look.items] == [
        ("damaged", "node-1", ["hf://org/model-0"])
    ]
    assert [item.outcome for item in mend.items] == ["repaired"]
    assert mend.bytes_read == SIZE
    assert node.cached("one.bin").read_bytes() == FILES["one.bin"]


async def told(mirror: AgentMirror, verification: str) -> VerifyReport:
    async with asyncio.timeout(30):
        while True:
            for report in mirror.reports(verification):
                assert report.verify is not None
                return report.verify
            await asyncio.sleep(0.01)  # it comes from another thread


# --- kills and restarts ---


async def test_an_agent_that_is_killed_in_the_middle_of_a_repair_repairs_it_when_it_is_back(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    manifest = mirror.publish(FILES)
    program = Program(tmp_path, mirror.url, {"BDN_AGENT_SCRUB_SECONDS": "0"})
    bad = mirror.chunks(manifest, "weights")[1]
    async with program.daemon() as daemon:
        stage = await daemon.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest), wait=True))
    view = Path(stage.mounts[0].path)
    for _ in range(at_scale(1, 6)):
        mirror.forget()
        async with program.daemon() as daemon:
            flip(Places(tmp_path / "cache").file(digest_of_path(manifest, "weights")), CHUNK_SIZE + 5)
            gate, asked = mirror.hold(bad)
            async with asyncio.TaskGroup() as group:
                request = PathVerificationRequest(path=str(view))
                asking = group.create_task(_given_up(daemon.client._request("POST", "/verifications", body=request)))
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
async def test_a_round_goes_on_after_a_restart_where_it_was(rig: Rig, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    read: list[Digest] = []
    verify = Scrubber.file

    async def counted(self: Scrubber, manifest: Digest, content: Digest, findings: Findings) -> None:
        if len(read) == at:
            raise DiskFailedError("here", "the test ends the first run")
        await verify(self, manifest, content, findings)
        read.append(content)

    monkeypatch.setattr(scrubber, "_NOTE_SECONDS", 0)
    async with staged_node(rig, FILES) as node:
        await node.agent.scrub.catch_up()  # what was under way: the node held nothing then, or held all of it
        monkeypatch.setattr(Scrubber, "file", counted)
        node.clock.now += WEEK
        with pytest.raises(DiskFailedError):
            await node.agent.scrub.catch_up()
    at = -1
    async with rig.agent(node.clock) as node.agent:
        await node.agent.scrub.catch_up()

        assert sorted(read) == sorted(node.manifest.contents)
        assert (await node.figures())["bdn_agent_scrub_round_timestamp_seconds"] == node.clock.now


# --- a disk that takes no notes, or whose files may not be read, keeps nobody from finding and mending what is wrong ---


async def test_where_nothing_can_be_noted_every_wrong_file_is_mended_all_the_same(
    node: StagedNode, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    for path in FILES:
        node.flip(path, 7)

    def is_full(self: ScrubRecord) -> None:
        raise DiskFailedError(str(self), "No space left on device", is_full=True)

    monkeypatch.setattr(ScrubRecord, "save", is_full)
    for _ in range(2):  # that the round has ended cannot be noted, either
        with suppress(DiskFailedError):
            await node.a_week_later()

    for path, content in FILES.items():
        assert node.cached(path).read_bytes() == content
    assert await node.counted() == len(FILES)
    tally.add(scenarios=1, faults=len(FILES), repaired=len(FILES))


async def test_a_folder_made_a_file_stops_no_round(node: StagedNode, tmp_path: Path) -> None:
    folder = node.cached("one.bin").parent
    assert folder != node.cached("weights").parent
    node.flip("weights", 7)
    folder.rename(tmp_path / "folder")
    folder.touch()

    await node.a_week_later()

    assert node.cached("weights").read_bytes() == FILES["weights"]
    assert (await node.counted(), await node.counted("lost")) == (1, 1)
    assert not node.is_complete()


@pytest.mark.parametrize("names", [("weights",), tuple(FILES)], ids=["one", "all"])
async def test_what_may_not_be_read_any_more_is_told_and_replaced_in_one_round_and_the_agent_goes_on(
    node: StagedNode, tally: Tally, names: tuple[str, ...]
) -> None:
    """Such as after somebody changed the owner of files, or their mode."""
    await node.agent.scrub.catch_up()
    with not_permitted({node.cached(name) for name in names}):
        held = await staged(node.agent, node.mirror, node.manifest, job="other")  # links need no reading
        assert not node.mirror.requests
        await node.a_week_later()
        chunks = {chunk for name in names for chunk in node.chunks(name)}
        # Once, for a new file: where nothing may be written either, nothing is fetched to be written.
        assert node.mirror.chunk_requests == dict.fromkeys(chunks, 1)
        for shown in (node.view, Path(held.mounts[0].path)):  # a job that opens a file now gets the new one
            tally.add(wrong=tree(shown) != FILES)
        assert {found["reason"] for found in node.evidence()} == {"it cannot be read: Permission denied"}
        assert len(node.evidence()) == len(chunks)
        await node.a_week_later()  # there is nothing left to do
        assert not node.mirror.chunk_requests
        assert node.agent.stages.document(node.agent.stages.registry.find(held.id)).state == "READY"
        tally.add(scenarios=2, faults=len(chunks), repaired=len(chunks))
        tally.add(wrong=sum(node.cached(name).read_bytes() != FILES[name] for name in FILES))
    for shown in (node.view, Path(held.mounts[0].path)):
        tally.add(wrong=tree(shown) != FILES)


async def test_a_stage_that_still_shows_an_unreadable_file_is_mended_also_when_the_new_one_came_late(
    node: StagedNode, tally: Tally
) -> None:
    """No refill while nobody has it; then another job's stage brings the file, of which this stage heard nothing."""
    await node.agent.scrub.catch_up()
    with not_permitted({node.cached("weights")}):
        node.mirror.every = missing
        await node.verify(all=True)
        node.mirror.every = None
        await staged(node.agent, node.mirror, node.manifest, job="other")
        stage = node.agent.stages.registry.find(node.stage)
        assert node.agent.stages.lifecycle.is_lacking(stage)
        await node.agent.housekeeping.reap()
        await stage.wait(None)
        assert not node.agent.stages.lifecycle.is_lacking(stage)
        tally.add(scenarios=1, faults=1, repaired=1, wrong=tree(node.view) != FILES)
