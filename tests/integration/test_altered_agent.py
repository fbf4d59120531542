"""What the benchmarks take out of an agent is what they say: nothing else is missing, and that is."""

# ruff: noqa: ASYNC240 - a test's loop serves no other clients

from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.core.errors import BdnError
from bdn.transfer import chunk_readers
from bench.altered_agent import believing, discarding
from tests.support.agent.mirror import AgentMirror, flipped
from tests.support.agent.rig import Rig, staged
from tests.support.content.noise import MIB, noise

CONTENT = noise(9 * MIB + 1, 2)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with AgentMirror().running() as mirror:
        mirror.every = flipped
        yield Rig(mirror, tmp_path)


async def test_an_agent_that_believes_takes_wrong_bytes_and_hashes_none(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = rig.mirror.publish({"model.bin": CONTENT})
    async with rig.agent() as agent:
        with pytest.raises(BdnError):
            await staged(agent, rig.mirror, manifest)
        monkeypatch.setattr(chunk_readers, "blake3", None)
        with believing():
            stage = await staged(agent, rig.mirror, manifest, job="another")
        taken = Path(stage.mounts[0].path, "model.bin").read_bytes()
    assert sum(one != other for one, other in zip(taken, CONTENT, strict=True)) == 2  # one bit of each chunk


async def test_an_agent_that_discards_verifies_and_writes_nothing(rig: Rig) -> None:
    manifest = rig.mirror.publish({"model.bin": CONTENT})
    async with rig.agent() as agent:
        with discarding():
            with pytest.raises(BdnError):
                await staged(agent, rig.mirror, manifest)
            rig.mirror.every = None
            stage = await staged(agent, rig.mirror, manifest, job="another")
            assert Path(stage.mounts[0].path, "model.bin").read_bytes() == bytes(len(CONTENT))
