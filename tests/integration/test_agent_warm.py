"""Warm stages: files come into the page cache behind the job's back, and what is held already costs little."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from node_agent.app import Agent
from node_agent.background_tasks import BackgroundTasks
from node_agent.disk.places import Places
from node_agent.stage.stage import NodeStage, StageRecord
from node_agent.stage.warm import STEP, StagesFirst, Warmer
from tests.support.agent.mirror import fresh_mirror
from tests.support.agent.rig import Rig, staged
from tests.support.content.noise import MIB, noise
from tests.support.services.processes import drop_from_memory, resident_bytes

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror
FILES = {"weights/model.bin": noise(17 * MIB + 3, 1), "config.json": b"{}", "empty": b""}
TOTAL = sum(map(len, FILES.values()))


def place_of(agent: Agent, stage: NodeStage) -> Path:
    return Path(agent.stages.document(stage).mounts[0].path)


async def warmed(stage: NodeStage) -> tuple[str, int, str | None]:
    """Wait for the end of the warming: its state, its bytes, and why."""
    assert stage.warming is not None
    assert stage.warming.task is not None
    async with asyncio.timeout(30):
        await asyncio.wait([stage.warming.task])
    return stage.warming.state, stage.warming.bytes_read, stage.warming.reason


async def is_cold(agent: Agent, rig: Rig, job: str = "job") -> NodeStage:
    """A READY stage none of whose bytes is in memory."""
    manifest = rig.mirror.publish(FILES)
    document = await staged(agent, rig.mirror, manifest, job=job)
    stage = agent.stages.registry.find(document.id)
    for path in FILES:
        drop_from_memory(place_of(agent, stage) / path)
    return stage


def resident(place: Path) -> int:
    return sum(resident_bytes(place / path) for path in FILES)


async def test_a_ready_stage_that_is_asked_for_again_with_warm_comes_into_memory(rig: Rig) -> None:
    async with rig.agent() as agent:
        stage = await is_cold(agent, rig)
        await agent.stages.start("job", stage.record.grant)
        assert (resident(place_of(agent, stage)), agent.stages.document(stage).warm) == (0, None)  # who did not ask

        again = await agent.stages.start("job", stage.record.grant, warm=True)

        assert again is stage
        assert await warmed(stage) == ("WARM", TOTAL, None)
        assert resident(place_of(agent, stage)) == TOTAL
        shown = agent.stages.document(stage).warm
        assert shown is not None
        assert (shown.state, shown.bytes, shown.bytes_total, shown.reason) == ("WARM", TOTAL, TOTAL, None)


@pytest.mark.parametrize("exposure", ["none", "symlink"])
async def test_a_new_stage_is_warmed_once_it_is_ready(rig: Rig, exposure: str) -> None:
    async with rig.agent(exposure=exposure) as agent:
        stage = await agent.stages.start("job", rig.mirror.grant(rig.mirror.publish(FILES)), warm=True)
        assert stage.warming is None
        await agent.stages.finish(stage.record.id)
        assert stage.task is not None
        await asyncio.wait([stage.task])

        assert await warmed(stage) == ("WARM", TOTAL, None)
        assert resident(place_of(agent, stage)) == TOTAL


async def test_a_stage_that_is_to_be_warm_is_so_again_after_a_restart(rig: Rig) -> None:
    async with rig.agent() as agent:
        stage = await is_cold(agent, rig)
        await agent.stages.start("job", stage.record.grant, warm=True)
        await warmed(stage)
        place = place_of(agent, stage)
    for path in FILES:
        drop_from_memory(place / path)

    async with rig.agent() as agent:
        stage = agent.stages.registry.find(stage.record.id)
        assert stage.task is not None
        await asyncio.wait([stage.task])  # the look at whether the view is intact

        assert await warmed(stage) == ("WARM", TOTAL, None)
        assert resident(place) == TOTAL


# --- with a memory, a clock and other stages of the test's own ---
@asynccontextmanager
async def cold_stage(
    rig: Rig, rate: int = 10**12, *, memory: Callable[[], int], **given: Any
) -> AsyncIterator[tuple[Agent, NodeStage, Warmer]]:
    """A stage that is to be warm and is not, and who warms it with what the test gives."""
    async with rig.agent() as agent, BackgroundTasks() as background:
        stage = await is_cold(agent, rig)
        stage.record.warm = True
        pace = StagesFirst(agent.stages.registry, rate, **given)
        yield agent, stage, Warmer(background, agent.stages.lifecycle.views, pace, memory)


async def instantly(_: float) -> None:
    """No time passes."""


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (TOTAL, ("WARM", TOTAL)),
        (TOTAL - 1, ("STOPPED", STEP)),
        (STEP, ("STOPPED", STEP)),
        (STEP - 1, ("SKIPPED", 0)),
        (-1, ("SKIPPED", 0)),
    ],
)
async def test_no_more_is_read_than_memory_allows(rig: Rig, memory: int, expected: tuple[str, int]) -> None:
    async with cold_stage(rig, memory=lambda: memory, sleep=instantly) as (agent, stage, warm):
        warm.begin(stage)
        state, count, reason = await warmed(stage)

        assert state == expected[0]
        assert expected[1] <= count <= max(0, memory)
        assert (reason is None) is (state == "WARM")
        assert resident(place_of(agent, stage)) >= count


async def test_a_release_ends_it_before_the_view_goes(rig: Rig) -> None:
    asleep = asyncio.Event()

    async def forever(_: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    async with cold_stage(rig, memory=lambda: TOTAL, sleep=forever) as (agent, stage, warm):
        warm.begin(stage)
        begun = stage.warming
        warm.begin(stage)
        assert stage.warming is begun  # not twice at the same time
        await asyncio.wait_for(asleep.wait(), 30)
        await agent.stages.release(stage.record.id)
        state, count, reason = await warmed(stage)

        assert (state, reason) == ("STOPPED", "the stage was released")
        assert STEP <= count < TOTAL
        assert not place_of(agent, stage).exists()


async def test_a_file_that_cannot_be_read_ends_it_and_nothing_else(rig: Rig) -> None:
    async with rig.agent() as agent:
        stage = await is_cold(agent, rig)
        place = place_of(agent, stage)
        (place / "config.json").unlink()
        (place / "config.json").symlink_to("nowhere")
        stage.record.warm = True  # whoever asks for the stage again has it mended first
        agent.stages.lifecycle.warmer.begin(stage)

        state, _, reason = await warmed(stage)
        assert (state, stage.record.state) == ("STOPPED", "READY")
        assert "config.json" in (reason or "")


# --- What a stage costs when its node holds everything already ---
MANY = {f"{number}.txt": str(number).encode() for number in range(50)}


async def test_a_warm_stage_waits_for_the_disk_twice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its record once it is READY, and for the folder of the records: only that must survive a power cut."""
    synced: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    manifest = rig.mirror.publish(MANY)
    async with rig.agent() as agent:
        await staged(agent, rig.mirror, manifest, job="first")
        monkeypatch.setattr(os, "fsync", note)
        stage = await staged(agent, rig.mirror, manifest, job="second")

    places = Places(rig.cache)
    written = places.stage(stage.id)
    assert synced == [str(written.with_name(f"{written.name}.tmp")), str(places.stages)]


async def test_a_ready_stage_is_durable_before_it_is_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if "/stages/stg_" in path:
            record = StageRecord.model_validate_json(Path(path).read_bytes())
            stage = agent.stages.registry.find(record.id)
            states.append(f"{record.state} while it is {stage.record.state}")
        real(descriptor)

    async with rig.agent() as agent:
        monkeypatch.setattr(os, "fsync", note)
        stage = await staged(agent, rig.mirror, rig.mirror.publish(MANY))
        await agent.stages.release(stage.id)
    assert states == ["READY while it is STAGING", "RELEASED while it is READY"]
