"""What data planes send is charged to their limits, byte for byte."""

from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from bdn.transfer.pacing import Pacer
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, noise, staged
from tests.support.mirror.service import mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)

CHUNK = noise(CHUNK_SIZE, 1)


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that a pacer was asked for; none of them waits."""
    sizes: list[int] = []

    def charge(_: Pacer, size: int) -> float:
        sizes.append(size)
        return 0.0

    monkeypatch.setattr(Pacer, "__call__", charge)
    return sizes


async def fetch(port: int) -> bytes:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        return (await client.get(f"/chunks/{digest_of(CHUNK)}")).content


@pytest.mark.parametrize(("rate", "share"), [("1GB", 1), (None, 0)])
async def test_a_mirror_charges_what_it_sends(
    hub: Hub, upstreams: None, tmp_path: Path, charged: list[int], rate: str | None, share: int
) -> None:
    hub.repo("org/model").commit({"a.bin": CHUNK})
    async with mirror_under_test(tmp_path / "mirror", serve=True, upload_rate=rate) as mirror:
        await mirror.ready(source("hf://org/model"))
        assert mirror.service.data_port is not None
        assert await fetch(mirror.service.data_port) == CHUNK
    assert sum(charged) == share * CHUNK_SIZE


@pytest.mark.parametrize(("rate", "share"), [("1GB", 1), (None, 0)])
async def test_an_agent_charges_what_it_sends_to_peers(
    tmp_path: Path, charged: list[int], rate: str | None, share: int
) -> None:
    with AgentMirror().running() as mirror:
        manifest = mirror.publish({"a.bin": CHUNK})
        async with Rig(mirror, tmp_path).agent(upload_rate=rate) as agent:
            await staged(agent, mirror, manifest)
            assert await fetch(agent.data_port) == CHUNK
    assert sum(charged) == share * CHUNK_SIZE
