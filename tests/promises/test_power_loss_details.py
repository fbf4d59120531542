"""Single steps of the commit order on a disk that forgets: what each sync is for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from bdn.core.store import FileLayout
from bdn.disk.direct import DirectWrites
from node_agent.disk.places import Places
from node_agent.fill import part as filling
from node_agent.fill.part import PartialFile
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Rig, noise, staged
from tests.support.content.trees import tree
from tests.support.crash.forgetful_disk import ForgetfulDisk, Way, forgetful_disk, needs_forgetful_disks
from tests.support.promises.tally import Tally

pytestmark = [needs_forgetful_disks, pytest.mark.promise("power-loss")]
LARGE = noise(CHUNK_SIZE + 5000, 21)
SMALL = {f"folder/{number}": noise(20_000, number) for number in range(12)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ForgetfulDisk]:
    with forgetful_disk(tmp_path) as disk:
        yield disk


def test_after_a_power_loss_a_fill_goes_on_from_the_last_batch(
    disk: ForgetfulDisk, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(filling, "SYNC_CHUNKS", 2)
    pieces = [noise(CHUNK_SIZE, seed) for seed in (1, 2, 3, 4)]
    layout = FileLayout.of(4 * CHUNK_SIZE, tuple(map(digest_of, pieces)))
    places = Places(disk.place / "cache")
    places.make()
    part = PartialFile(places, layout, DirectWrites())
    part.open()
    for chunk, piece in list(zip(layout.placed(), pieces, strict=True))[:3]:
        part.write(chunk, memoryview(bytearray(piece)))
    disk.lose_power("forgotten")
    part.close()
    part = PartialFile(places, layout, DirectWrites())
    part.open()
    held = [part.holds(chunk, memoryview(bytearray(CHUNK_SIZE))) for chunk in layout.placed()]
    part.close()
    assert held == [True, True, False, False]
    tally.add(scenarios=1, faults=1)


async def test_a_sync_that_failed_is_not_made_good_by_one_that_succeeds_afterwards(
    disk: ForgetfulDisk, tally: Tally
) -> None:
    """Linux tells a failed write once, and takes the pages for clean from then on: they have to be written again."""
    with AgentMirror().running() as mirror:
        manifest, rig = mirror.publish({"large": LARGE}), Rig(mirror, disk.place)
        async with rig.agent() as agent:
            disk.refuse("fsync", "*.part", times=1)
            with pytest.raises(Exception, match="Input/output"):
                await staged(agent, mirror, manifest)
            assert disk.faults_met == 1
            disk.mend()
            await staged(agent, mirror, manifest)
        disk.lose_power("forgotten")
        (file,) = rig.cache.glob("files/*/*")
        assert file.read_bytes() == LARGE
    tally.add(scenarios=1, faults=2)


@pytest.mark.parametrize("way", ["forgotten", "any"])
async def test_a_pulled_directory_stands_once_the_pull_has_ended(disk: ForgetfulDisk, way: Way, tally: Tally) -> None:
    files = {"large": LARGE, **SMALL}
    with AgentMirror(is_packed=True).running() as mirror:
        manifest = mirror.publish(files)
        async with Rig(mirror, disk.place).agent() as agent:
            stage = await agent.stages.pull(mirror.grant(manifest), disk.place / "model")
            await agent.stages.finish(stage.record.id)
        disk.lose_power(way, 7)
        assert tree(disk.place / "model") == files
    tally.add(scenarios=1, faults=1)


async def test_many_small_files_are_durable_by_one_sync_of_the_file_system(
    disk: ForgetfulDisk, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """As on file systems whose syncfs is trusted; FUSE is not told of it, so the disk is told another way."""
    calls = 0

    def sync_file_system(_: int) -> None:
        nonlocal calls
        calls += 1
        disk.sync()

    monkeypatch.setattr("node_agent.disk.group_sync.sync_file_system", sync_file_system)
    monkeypatch.setattr("node_agent.disk.group_sync.file_system_magic", lambda _: 0xEF53)
    with AgentMirror(is_packed=True).running() as mirror:
        manifest, rig = mirror.publish(SMALL), Rig(mirror, disk.place)
        async with rig.agent() as agent:
            await staged(agent, mirror, manifest)
        disk.lose_power("forgotten")
        assert calls
        assert {path.read_bytes() for path in rig.cache.glob("files/*/*")} == set(SMALL.values())
    tally.add(scenarios=1, faults=1)


async def test_a_file_system_that_could_not_write_back_fails_whoever_asked(
    disk: ForgetfulDisk, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    disk.refuse("fsync", "*/.*", times=1)
    with AgentMirror(is_packed=True).running() as mirror:
        manifest, rig = mirror.publish(SMALL), Rig(mirror, disk.place)
        async with rig.agent() as agent:
            with pytest.raises(Exception, match="Input/output"):
                await staged(agent, mirror, manifest)
            assert not list(rig.cache.glob("files/*/*"))
            disk.mend()
            await staged(agent, mirror, manifest)
        disk.lose_power("forgotten")
        assert {path.read_bytes() for path in rig.cache.glob("files/*/*")} == set(SMALL.values())
    tally.add(scenarios=1, faults=2)


@pytest.mark.promise("whole-files")
async def test_writes_that_are_cut_short_are_gone_on_with(disk: ForgetfulDisk, tally: Tally) -> None:
    files = {"large": LARGE, "one": noise(MIB + 3, 5), **SMALL}
    disk.shorten("*.part", size=7 * 4096)
    disk.shorten("*/.*", size=7000)
    with AgentMirror(is_packed=True).running() as mirror:
        manifest = mirror.publish(files)
        async with Rig(mirror, disk.place).agent() as agent:
            stage = await staged(agent, mirror, manifest)
            assert tree(Path(stage.mounts[0].path)) == files
    tally.add(scenarios=1, faults=disk.faults_met)
