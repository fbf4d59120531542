"""A disk that takes no notes, or does not even say how large a file is, keeps nobody from finding and mending what is wrong."""

from contextlib import suppress
from pathlib import Path

import pytest

from bdn.core.errors import DiskFailedError
from node_agent.scrub.findings import ScrubRecord
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, noise, staged
from tests.support.crash.rot import a_week_later, cached, figures, flip, now, repaired
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


async def test_a_folder_that_the_disk_has_made_a_file_of_costs_what_was_in_it_and_the_round_goes_on(
    rig: Rig, mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
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
