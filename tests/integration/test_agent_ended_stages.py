"""What an agent remembers of stages that have ended."""

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from node_agent.app import Agent
from node_agent.stage import housekeeping
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, staged
from tests.support.crash.rot import now

pytest_plugins = ("tests.support.agent.fixtures",)


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


@pytest.fixture
def three_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "KEPT", 3)


def _remembered(agent: Agent) -> tuple[set[str], int]:
    """The jobs in memory, and how many records are on disk."""
    return {stage.record.job_id for stage in agent.stages.registry.all()}, len(list(agent.places.stages.iterdir()))


@pytest.mark.usefixtures("three_are_kept")
async def test_the_newest_ended_stages_are_remembered_in_memory_and_on_disk_beside_all_that_stand(
    mirror: AgentMirror, tmp_path: Path
) -> None:
    manifest, clock, rig = mirror.publish({"a": b"a"}), now(), Rig(mirror, tmp_path)
    async with rig.agent(clock) as agent:
        await staged(agent, mirror, manifest, job="stands")
        for number in range(6):
            clock.now += 1
            await agent.stages.release((await staged(agent, mirror, manifest, job=f"job-{number}")).id)
        await agent.housekeeping.reap()
        assert _remembered(agent) == ({"stands", "job-3", "job-4", "job-5"}, 4)
    async with rig.agent(clock) as agent:
        assert _remembered(agent) == ({"stands", "job-3", "job-4", "job-5"}, 4)


@pytest.mark.usefixtures("three_are_kept")
async def test_a_stage_that_its_job_asks_for_while_it_is_being_forgotten_stands_on_disk_and_in_the_book(
    mirror: AgentMirror, tmp_path: Path
) -> None:
    manifest, clock = mirror.publish({"a": b"a"}), now()
    async with Rig(mirror, tmp_path).agent(clock) as agent:
        stages = []
        for number in range(4):
            clock.now += 1
            stages.append(await staged(agent, mirror, manifest, job=f"job-{number}"))
            await agent.stages.release(stages[-1].id)
        forget, asked = agent.housekeeping.lifecycle.records.forget, []

        def ask_meanwhile(stage_id: str) -> None:
            again = staged(agent, mirror, manifest, job="job-0")
            asked.append(asyncio.run_coroutine_threadsafe(again, loop))
            forget(stage_id)

        loop = asyncio.get_running_loop()
        with mock.patch.object(
            type(agent.housekeeping.lifecycle.records), "forget", lambda _, stage_id: ask_meanwhile(stage_id)
        ):
            await agent.housekeeping.reap()
        assert (await asyncio.wrap_future(asked[0])).state == "READY"
        assert agent.stages.registry.find(stages[0].id).record.state == "READY"
        assert agent.places.stage(stages[0].id).exists()
