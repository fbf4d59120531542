"""Files of the node's cache that the agent may not read, such as after somebody changed their owner or mode."""

from pathlib import Path

import pytest

from bdn.wire.operation_schema import VerifyCommand
from tests.support.agent.mirror import AgentMirror, missing
from tests.support.agent.rig import MIB, Rig, noise, staged, verified
from tests.support.content.trees import tree
from tests.support.crash.not_permitted import not_permitted
from tests.support.crash.rot import a_week_later, cached, evidence, now
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("corruption")

FILES = {"weights": noise(17 * MIB, 1), "one.bin": noise(2 * MIB + 17, 2), "small": noise(20_000, 3)}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


@pytest.mark.parametrize("names", [("weights",), tuple(FILES)], ids=["one", "all"])
async def test_what_may_not_be_read_any_more_is_told_and_replaced_in_one_round_and_the_agent_goes_on(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, names: tuple[str, ...]
) -> None:
    manifest, clock = mirror.publish(FILES), now()
    rig = Rig(mirror, tmp_path, {"scrub_rate": 10**12})
    async with rig.agent(clock) as agent:
        view = Path((await staged(agent, mirror, manifest)).mounts[0].path)
        await agent.scrub.catch_up()
        mirror.forget()
        with not_permitted({cached(agent, manifest, name) for name in names}):
            held = await staged(agent, mirror, manifest, job="other")  # links need no reading
            await a_week_later(agent, clock)
            chunks = {chunk for name in names for chunk in mirror.chunks(manifest, name)}
            # Once, for a new file: where nothing may be written either, nothing is fetched to be written.
            assert mirror.chunk_requests == dict.fromkeys(chunks, 1)
            for shown in (view, Path(held.mounts[0].path)):  # a job that opens a file now gets the new one
                tally.add(wrong=tree(shown) != FILES)
            assert {found["reason"] for found in evidence(agent)} == {"it cannot be read: Permission denied"}
            assert len(evidence(agent)) == len(chunks)
            mirror.forget()
            await a_week_later(agent, clock)  # there is nothing left to do
            assert not mirror.chunk_requests
            assert agent.stages.document(agent.stages.registry.find(held.id)).state == "READY"
            tally.add(scenarios=2, faults=len(chunks), repaired=len(chunks))
            tally.add(wrong=sum(cached(agent, manifest, name).read_bytes() != FILES[name] for name in FILES))
        for shown in (view, Path(held.mounts[0].path)):
            tally.add(wrong=tree(shown) != FILES)


async def test_a_stage_that_still_shows_an_unreadable_file_is_mended_also_when_the_new_one_came_late(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    """No refill while nobody has it; then another job's stage brings the file, of which this stage heard nothing."""
    manifest, clock = mirror.publish(FILES), now()
    rig = Rig(mirror, tmp_path, {"scrub_rate": 10**12})
    async with rig.agent(clock) as agent:
        held = await staged(agent, mirror, manifest)
        view = Path(held.mounts[0].path)
        await agent.scrub.catch_up()
        with not_permitted({cached(agent, manifest, "weights")}):
            mirror.every = missing
            await verified(agent, VerifyCommand(id="1", all=True))
            mirror.every = None
            await staged(agent, mirror, manifest, job="other")
            stage = agent.stages.registry.find(held.id)
            assert agent.stages.lifecycle.is_lacking(stage)
            await agent.housekeeping.reap()
            await stage.wait(None)
            assert not agent.stages.lifecycle.is_lacking(stage)
            tally.add(scenarios=1, faults=1, repaired=1, wrong=tree(view) != FILES)
