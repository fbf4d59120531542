"""Small files that come in slabs: one fetch for many, the same tree, and every lie about them found out."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from bdn.core.chunk import Digest, FileLayout, digest_of
from bdn.core.errors import BdnError
from bdn.core.layout import Manifest
from node_agent.fill import provision
from tests.support.agent.mirror import AgentMirror, fresh_mirror, held_by, missing
from tests.support.agent.rig import Rig, disk_bytes, staged
from tests.support.content.noise import noise
from tests.support.content.trees import tree
from tests.support.waiting import until

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror

THOUSAND = {f"part-{number % 7}/{number:04}.bin": noise(300, number) for number in range(1000)}
SMALL = dict(list(THOUSAND.items())[:100])


def files_of(rig: Rig) -> dict[str, bytes]:
    """What the cache holds by name, each checked against it."""
    found = {path.name: path.read_bytes() for path in (rig.cache / "files").rglob("*") if path.is_file()}
    assert all(digest_of(content).hex == name for name, content in found.items())
    return found


def slabs_of(mirror: AgentMirror, manifest: Manifest) -> set[Digest]:
    return mirror.chunks_of[manifest.digest]


async def test_a_thousand_small_files_come_with_one_fetch(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest = mirror.publish({**THOUSAND, "empty": b""})
    rig = Rig(mirror, tmp_path)
    async with rig.agent() as agent:
        stage = await staged(agent, mirror, manifest)
        assert mirror.requests == 1
        (mount,) = stage.mounts
        assert tree(Path(mount.path)) == {**THOUSAND, "empty": b""}
        assert (mount.bytes_from.mirror, mount.bytes_from.node) == (300_000, 0)
        assert mount.bytes_done == mount.bytes_total == manifest.bytes_total
        ledger = agent.cache.index.ledger
        assert (ledger.committed_bytes, ledger.reserved_bytes) == (manifest.bytes_total, 0)
        assert disk_bytes(rig.cache) == manifest.bytes_total
    assert list((rig.cache / "filling").iterdir()) == []
    async with rig.agent() as agent:
        assert agent.cache.index.is_complete(manifest.digest)


async def test_what_the_node_has_is_not_written_again(mirror: AgentMirror, tmp_path: Path) -> None:
    half = dict(list(SMALL.items())[:50])
    first, second = mirror.publish(half), mirror.publish(SMALL)
    rig = Rig(mirror, tmp_path)
    async with rig.agent() as agent:
        await staged(agent, mirror, first, job="first")
        before = {path: path.stat().st_ino for path in (rig.cache / "files").rglob("*") if path.is_file()}
        stage = await staged(agent, mirror, second, job="second")
        assert {path: path.stat().st_ino for path in before} == before
    assert stage.mounts[0].bytes_from.mirror == 50 * 300
    assert stage.mounts[0].bytes_from.node == 50 * 300
    assert tree(Path(stage.mounts[0].path)) == SMALL


def moved(layout: FileLayout, offset: int) -> FileLayout:
    """The file lies somewhere else in its slab, it says."""
    assert layout.slice is not None
    return replace(layout, slice=replace(layout.slice, offset=offset))


@pytest.mark.parametrize(
    ("code", "said"),
    [("NOT_FOUND", "does not exist"), ("INTERNAL", "does not contain it")],
    ids=["it is lost", "another place"],
)
async def test_a_slab_that_is_not_what_its_manifest_says_fails_the_stage_alone(
    mirror: AgentMirror, tmp_path: Path, code: str, said: str
) -> None:
    right, rig = mirror.publish(SMALL), Rig(mirror, tmp_path)
    layouts = mirror.trees[right.digest].layout
    files = {entry.path: layouts[entry.digest] for entry in right.files}
    if code == "INTERNAL":
        path = right.files[50].path
        manifest = mirror.publish_as(files | {path: moved(files[path], 7)})
    else:
        manifest, mirror.every = right, missing
    async with rig.agent() as agent:
        with pytest.raises(BdnError, match=said) as caught:
            await staged(agent, mirror, manifest)
        assert caught.value.code == code
        assert mirror.requests
        assert files_of(rig) == {}
        assert disk_bytes(rig.cache) == agent.cache.index.ledger.used_bytes == 0
        assert not any((rig.cache / "views").rglob("*.bin"))
        mirror.every = None
        assert (await staged(agent, mirror, right)).state == "READY"


async def test_a_file_that_comes_whole_and_packed_is_filled_once(mirror: AgentMirror, tmp_path: Path) -> None:
    content = noise(300, 1)
    packed = mirror.publish({"a": content, "b": noise(300, 2)})
    mirror.is_packed = False
    whole = mirror.publish({"a": content})
    gate = threading.Event()
    mirror.faults[digest_of(content)] = [held_by(gate)]
    async with Rig(mirror, tmp_path).agent() as agent:
        one = await agent.stages.start("one", mirror.grant(whole))
        await until(lambda: mirror.requests)
        other = await agent.stages.start("other", mirror.grant(packed))
        await until(lambda: mirror.requests == 2)
        gate.set()
        done = [await agent.stages.finish(stage.record.id) for stage in (one, other)]
    assert [stage.mounts[0].bytes_from.mirror for stage in done] == [300, 300]
    assert tree(Path(done[1].mounts[0].path)) == {"a": content, "b": noise(300, 2)}


async def test_a_slab_that_another_stage_brought_meanwhile_is_not_fetched_again(
    mirror: AgentMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "_UNITS_AT_ONCE", 1)
    mirror.slab_size = 3000
    names = list(SMALL)[:20]
    both = mirror.publish({name: SMALL[name] for name in names})
    halves = [mirror.publish({name: SMALL[name] for name in half}) for half in (names[:10], names[10:])]
    slabs = {slab: half for half in halves for slab in mirror.chunks(half, half.files[0].path)}
    assert {slab for name in names for slab in mirror.chunks(both, name)} == set(slabs)
    gate = threading.Event()
    mirror.faults.update({slab: [held_by(gate)] for slab in slabs})
    async with Rig(mirror, tmp_path).agent() as agent:
        slow = await agent.stages.start("slow", mirror.grant(both))
        await until(lambda: mirror.requests)
        (other,) = slabs.keys() - mirror.chunk_requests.keys()
        mirror.faults[other] = []
        await staged(agent, mirror, slabs[other], job="quick")
        gate.set()
        done = await agent.stages.finish(slow.record.id)
    assert mirror.chunk_requests[other] == 1
    assert (done.mounts[0].bytes_from.mirror, done.mounts[0].bytes_from.node) == (3000, 3000)
