"""The power fails at any step: work may be lost, truth is not; what each sync is for; and the disk that forgets."""

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from bdn.core.chunk import CHUNK_SIZE, FileLayout, digest_of
from bdn.disk.direct import DirectWrites
from bdn.disk.durable import sync_folder, write_at_once, write_durably
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.fill import part as filling
from node_agent.fill.part import PartialFile
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, staged
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.crash.agent_scenario import AgentScenario
from tests.support.crash.forgetful_disk import ForgetfulDisk, Way, forgetful_disk, needs_forgetful_disks
from tests.support.crash.mirror_scenario import MirrorScenario, fill
from tests.support.crash.scenario import at_each, survive_power_loss
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [needs_forgetful_disks, pytest.mark.promise("power-loss")]
WAYS: Sequence[Way] = ("forgotten", "any", "any", "kept")
_AGENT_STARTS = 550  # steps of an agent on an empty disk: its folders, and their syncs


@pytest.mark.promise("whole-files", "commit-order")
async def test_an_agent_that_lost_power_has_all_that_was_ready(tmp_path: Path, tally: Tally) -> None:
    random = Random(20261122)
    later = random.sample(range(_AGENT_STARTS + 1, _AGENT_STARTS + 480), at_scale(1, 30))

    async def one(root: Path, number: int, step: int) -> None:
        with AgentMirror(is_packed=True).running() as mirror, forgetful_disk(root) as disk:
            scenario = AgentScenario(mirror, disk.place, root / "logs")
            is_done = await survive_power_loss(scenario, disk, step, WAYS[number % len(WAYS)])
        tally.add(scenarios=1, kills=1, faults=not is_done)

    await at_each(tmp_path, [random.randint(10, _AGENT_STARTS - 1), *later], one)


@pytest.mark.promise("commit-order")
async def test_a_mirror_that_lost_power_at_any_step_keeps_every_mirror_that_was_ready(
    tmp_path: Path, hub: Hub, tally: Tally
) -> None:
    """Its first start included."""
    fill(hub)
    random = Random(20261123)

    async def one(root: Path, number: int, step: int) -> None:
        with forgetful_disk(root) as disk:
            scenario = MirrorScenario(hub, disk.place)
            is_done = await survive_power_loss(scenario, disk, step, WAYS[number % len(WAYS)])
        tally.add(scenarios=1, kills=1, faults=not is_done)

    await at_each(tmp_path, [random.randint(1, 240), *random.sample(range(240, 840), at_scale(1, 20))], one)


# --- Single steps of the commit order on a disk that forgets: what each sync is for ---
LARGE = noise(CHUNK_SIZE + 5000, 21)
SMALL = {f"folder/{number}": noise(20_000, number) for number in range(12)}


def test_after_a_power_loss_a_fill_goes_on_from_the_last_batch(
    disk: ForgetfulDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "SYNC_CHUNKS", 2)
    pieces = [noise(CHUNK_SIZE, seed) for seed in (1, 2, 3, 4)]
    layout = FileLayout.of(4 * CHUNK_SIZE, tuple(map(digest_of, pieces)))
    places = Places(disk.place / "cache")
    places.make()
    part = PartialFile(WholeFiles(places), layout, DirectWrites())
    part.open()
    for chunk, piece in list(zip(layout.placed(), pieces, strict=True))[:3]:
        part.write(chunk, memoryview(bytearray(piece)))
    disk.lose_power("forgotten")
    part.close()
    part = PartialFile(WholeFiles(places), layout, DirectWrites())
    part.open()
    held = [part.holds(chunk, memoryview(bytearray(CHUNK_SIZE))) for chunk in layout.placed()]
    part.close()
    assert held == [True, True, False, False]


@pytest.mark.parametrize("way", ["forgotten", "any"])
async def test_a_pulled_directory_stands_once_the_pull_has_ended(disk: ForgetfulDisk, way: Way) -> None:
    files = {"large": LARGE, **SMALL}
    with AgentMirror(is_packed=True).running() as mirror:
        manifest = mirror.publish(files)
        async with Rig(mirror, disk.place).agent() as agent:
            stage = await agent.pulls.begin(mirror.grant(manifest), disk.place / "model")
            await agent.stages.finish(stage.record.id)
        disk.lose_power(way, 7)
        assert tree(disk.place / "model") == files


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


# --- the disk itself: it really forgets, and it keeps what it should ---
SEEDS = range(50)


def write(path: Path, content: bytes, *, is_synced: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, content, 0)
        if is_synced:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def test_a_program_that_does_not_sync_loses_what_it_wrote(disk: ForgetfulDisk) -> None:
    """Without this, every test on such a disk would be vacuous."""
    write(disk.place / "unsynced", b"content", is_synced=False)
    write(disk.place / "synced", b"content", is_synced=True)
    sync_folder(disk.place)
    write(disk.place / "nameless", b"content", is_synced=True)
    disk.lose_power("forgotten")
    assert tree(disk.place) == {"unsynced": b"", "synced": b"content"}


def test_a_rename_may_outlive_the_bytes_that_it_was_to_publish(disk: ForgetfulDisk) -> None:
    found: set[bytes | None] = set()
    for seed in SEEDS:
        path = disk.place / f"record-{seed}"
        write_at_once(path, b"x" * 8192)
        disk.lose_power("any", seed)
        found.add(path.read_bytes() if path.exists() else None)
    assert {None, b"", b"x" * 8192, bytes(8192)} <= found
    assert {b"x" * 4096 + bytes(4096), bytes(4096) + b"x" * 4096} & found


def test_what_was_written_durably_survives_every_power_loss(disk: ForgetfulDisk) -> None:
    path = disk.place / "record"
    for seed in SEEDS:
        write_durably(path, str(seed).encode() * 5000)
        write_at_once(path.with_name("other"), b"y" * 9999)
        disk.lose_power("any", seed)
        assert path.read_bytes() == str(seed).encode() * 5000
