"""A disk that takes nothing new is told of, to whoever asks and with each heartbeat: the agent stays where it is."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.agent.mirror import AgentMirror
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.agent.rig import MIB, Rig, metrics, noise, staged
from tests.support.agent.site import Site, serving_agent
from tests.support.content.trees import tree
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("space")

FILES = {"f": noise(MIB, 1)}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


async def problems(site: Site, mirror: AgentMirror) -> dict[str, str | None]:
    """What both tiers say in a heartbeat, which has to come, and in the cache's document."""
    await site.agent.heartbeats.beat()
    told = mirror.heartbeats[-1].tiers
    document = (await site.http.get("/cache")).raise_for_status().json()["tiers"]
    assert {tier: use["problem"] for tier, use in document.items()} == {tier: use.problem for tier, use in told.items()}
    return {tier: use.problem for tier, use in told.items()}


async def readiness(site: Site) -> tuple[int, str | None, str]:
    answer = await site.http.get("/readyz")
    error = answer.json().get("error", {})
    return answer.status_code, error.get("code"), error.get("message", "")


async def test_while_a_disk_does_not_say_how_full_it_is_heartbeats_go_on_and_tell_why_nothing_new_comes_in(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with serving_agent(Rig(mirror, tmp_path)) as site:
        stage = await staged(site.agent, mirror, mirror.publish(FILES))
        assert await problems(site, mirror) == {"node": None, "cluster": None}
        with monkeypatch.context() as patched:
            patched.setattr(os, "statvfs", broken)
            told = f"the disk failed at {tmp_path / 'cache'}: Input/output error"
            assert await problems(site, mirror) == {"node": told, "cluster": told}
            use = mirror.heartbeats[-1].tiers["node"]
            assert (use.budget, use.committed, use.leased) == (MIB, MIB, MIB)
            figures = metrics((await site.http.get("/metrics")).raise_for_status().text)
            assert figures['bdn_agent_cache_budget_bytes{tier="node"}'] == MIB
            assert await readiness(site) == (503, "DISK_FAILED", told)
            assert (await site.http.get("/healthz")).status_code == 200
        assert await problems(site, mirror) == {"node": None, "cluster": None}
        assert await readiness(site) == (200, None, "")
        assert tree(Path(stage.mounts[0].path)) == FILES
    tally.add(scenarios=1, faults=1)


@needs_mounts
@pytest.mark.parametrize(("options", "taken"), [("16m", bytes(4096)), ("16m,nr_inodes=400", b"")])
async def test_a_full_disk_is_alive_and_not_ready_until_there_is_room_again(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, options: str, taken: bytes
) -> None:
    """Full of bytes, or of files."""
    with mounted_tmpfs(tmp_path / "disk", options) as disk:
        async with serving_agent(Rig(mirror, disk)) as site:
            await site.agent.heartbeats.beat()
            stage = await staged(site.agent, mirror, mirror.publish(FILES))
            assert await readiness(site) == (200, None, "")
            foreign = disk / "foreign"
            foreign.mkdir()
            with suppress(OSError):
                for number in range(10_000):
                    (foreign / f"{number}").write_bytes(taken)
            told = f"the disk failed at {disk / 'cache'}: No space left on device"
            assert await readiness(site) == (503, "DISK_FAILED", told)
            assert await problems(site, mirror) == {"node": told, "cluster": told}
            assert (await site.http.get("/healthz")).status_code == 200
            assert tree(Path(stage.mounts[0].path)) == FILES
            for one in foreign.iterdir():
                one.unlink()
            assert await readiness(site) == (200, None, "")
            again = await staged(site.agent, mirror, mirror.publish({"g": b"g"}), job="other")
            assert again.state == "READY"
    tally.add(scenarios=1, faults=1)
