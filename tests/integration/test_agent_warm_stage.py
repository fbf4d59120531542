"""What a stage costs when its node holds everything already."""

import os
from pathlib import Path

import pytest

from node_agent.disk.places import Places
from node_agent.stage.record import StageRecord
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, staged

FILES = {f"{number}.txt": str(number).encode() for number in range(50)}


async def test_a_warm_stage_waits_for_the_disk_twice_whatever_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its record once it is READY, and for the folder of the records: only that must survive a power cut."""
    synced: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    with AgentMirror().running() as mirror:
        manifest = mirror.publish(FILES)
        rig = Rig(mirror, tmp_path)
        async with rig.agent() as agent:
            await staged(agent, mirror, manifest, job="first")
            monkeypatch.setattr(os, "fsync", note)
            stage = await staged(agent, mirror, manifest, job="second")

    places = Places(rig.cache)
    written = places.stage(stage.id)
    assert synced == [str(written.with_name(f"{written.name}.tmp")), str(places.stages)]


async def test_the_record_of_a_stage_that_is_ready_is_durable_before_anybody_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if "/stages/stg_" in path:
            record = StageRecord.model_validate_json(Path(path).read_bytes())
            stage = agent.stages.registry.find(record.id)
            states.append(f"{record.state} while it is {stage.record.state}")
        real(descriptor)

    with AgentMirror().running() as mirror:
        manifest = mirror.publish(FILES)
        async with Rig(mirror, tmp_path).agent() as agent:
            monkeypatch.setattr(os, "fsync", note)
            stage = await staged(agent, mirror, manifest)
            await agent.stages.release(stage.id)
    assert states == ["READY while it is STAGING", "RELEASED while it is READY"]
