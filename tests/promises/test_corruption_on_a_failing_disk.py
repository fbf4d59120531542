"""A disk that takes no notes, or files of the cache that may not be read, keep nobody from finding and mending what is wrong."""

from contextlib import suppress
from pathlib import Path

import pytest

from bdn.core.errors import DiskFailedError
from bdn.wire.operation_schema import VerifyCommand
from node_agent.scrub.scrubber import ScrubRecord
from tests.support.agent.mirror import AgentMirror, missing
from tests.support.agent.rig import MIB, Rig, noise, staged, verified
from tests.support.content.trees import tree
from tests.support.crash.rot import a_week_later, cached, evidence, figures, flip, not_permitted, now, repaired
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("corruption")
FILES = {f"{number}.bin": noise(20_000 + number, number) for number in range(4)}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"scrub_rate": 10**12})


async def test_where_nothing_can_be_noted_every_wrong_file_is_mended_all_the_same(
    rig: Rig, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    manifest, clock = mirror.publish(FILES), now()
    async with rig.agent(clock) as agent:
        await staged(agent, mirror, manifest)
        for path in FILES:
            flip(cached(agent, manifest, path), 7)

        def is_full(self: ScrubRecord) -> None:
            raise DiskFailedError(str(self), "No space left on device", is_full=True)

        monkeypatch.setattr(ScrubRecord, "save", is_full)
        for _ in range(2):  # that the round has ended cannot be noted, either
            with suppress(DiskFailedError):
                await a_week_later(agent, clock)

        for path, content in FILES.items():
            assert cached(agent, manifest, path).read_bytes() == content
        assert repaired(await figures(agent)) == len(FILES)
    tally.add(scenarios=1, faults=len(FILES), repaired=len(FILES))


async def test_a_folder_made_a_file_stops_no_round(rig: Rig, mirror: AgentMirror, tmp_path: Path, tally: Tally) -> None:
    manifest, clock = mirror.publish(FILES), now()
    async with rig.agent(clock) as agent:
        await staged(agent, mirror, manifest)
        broken, other = "0.bin", "1.bin"
        folder = cached(agent, manifest, broken).parent
        assert folder != cached(agent, manifest, other).parent
        flip(cached(agent, manifest, other), 7)
        folder.rename(tmp_path / "folder")
        folder.touch()

        await a_week_later(agent, clock)

        assert cached(agent, manifest, other).read_bytes() == FILES[other]
        found = await figures(agent)
        assert (repaired(found), repaired(found, outcome="lost")) == (1, 1)
        assert not agent.cache.index.is_complete(manifest.digest)
    tally.add(scenarios=1, faults=2, repaired=1)


# --- Files of the node's cache that the agent may not read, such as after somebody changed their owner or mode ---
THREE = {"weights": noise(17 * MIB, 1), "one.bin": noise(2 * MIB + 17, 2), "small": noise(20_000, 3)}


@pytest.mark.parametrize("names", [("weights",), tuple(THREE)], ids=["one", "all"])
async def test_what_may_not_be_read_any_more_is_told_and_replaced_in_one_round_and_the_agent_goes_on(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, names: tuple[str, ...]
) -> None:
    manifest, clock = mirror.publish(THREE), now()
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
                tally.add(wrong=tree(shown) != THREE)
            assert {found["reason"] for found in evidence(agent)} == {"it cannot be read: Permission denied"}
            assert len(evidence(agent)) == len(chunks)
            mirror.forget()
            await a_week_later(agent, clock)  # there is nothing left to do
            assert not mirror.chunk_requests
            assert agent.stages.document(agent.stages.registry.find(held.id)).state == "READY"
            tally.add(scenarios=2, faults=len(chunks), repaired=len(chunks))
            tally.add(wrong=sum(cached(agent, manifest, name).read_bytes() != THREE[name] for name in THREE))
        for shown in (view, Path(held.mounts[0].path)):
            tally.add(wrong=tree(shown) != THREE)


async def test_a_stage_that_still_shows_an_unreadable_file_is_mended_also_when_the_new_one_came_late(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    """No refill while nobody has it; then another job's stage brings the file, of which this stage heard nothing."""
    manifest, clock = mirror.publish(THREE), now()
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
            tally.add(scenarios=1, faults=1, repaired=1, wrong=tree(view) != THREE)
