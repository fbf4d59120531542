"""Whatever the way to the mirror does to a chunk: it is fetched again, or the stage says what is wrong."""

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from bdn.core.errors import BdnError, StoreUnavailableError
from bdn.net.http1.pool import ConnectionPool, dial
from tests.support.agent.mirror import FORMS, AgentMirror, Fault, failing, flipped, held_by, missing, refused, truncated
from tests.support.agent.rig import MIB, Rig, metrics, noise, staged
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)

FILES = {"large": noise(9 * MIB, 1), "small": b"small"}
busy = failing(StoreUnavailableError("it is busy"))


@pytest.fixture(params=FORMS)
def mirror(server: AgentMirror, request: pytest.FixtureRequest) -> AgentMirror:
    return server.renewed(is_packed=request.param == "packed")


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path)


@pytest.mark.promise("corruption")
@pytest.mark.parametrize("fault", [flipped, truncated, refused, busy], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("path", ["large", "small"])
async def test_a_fault_that_passes_is_not_noticed(rig: Rig, mirror: AgentMirror, fault: Fault, path: str) -> None:
    manifest = mirror.publish(FILES)
    chunk = mirror.chunks(manifest, path)[-1]
    mirror.faults[chunk] = [fault]
    async with rig.agent() as agent:
        stage = await staged(agent, mirror, manifest)

        assert tree(Path(stage.mounts[0].path)) == FILES
        assert mirror.chunk_requests[chunk] == 2


@pytest.mark.parametrize(
    ("fault", "code", "requests"),
    [(flipped, "CHECKSUM_MISMATCH", 2), (missing, "NOT_FOUND", 1), (truncated, "STORE_UNAVAILABLE", 3)],
    ids=["flipped", "missing", "truncated"],
)
async def test_a_fault_that_stays_fails_the_stage_and_shows_nothing(
    rig: Rig, mirror: AgentMirror, fault: Fault, code: str, requests: int
) -> None:
    manifest = mirror.publish(FILES)
    chunk = mirror.chunks(manifest, "large")[0]
    mirror.faults[chunk] = [fault] * 10
    async with rig.agent() as agent:
        with pytest.raises(BdnError) as caught:
            await staged(agent, mirror, manifest)

        assert caught.value.code == code
        assert mirror.chunk_requests[chunk] == requests
        assert not any((rig.cache / "mounts").iterdir())
        assert agent.cache.index.leases.leased() == ()
        figures = metrics(agent.metrics.render(await agent.holdings.tiers()).decode())
        assert figures["bdn_agent_verification_failures_total"] == (2 if fault is flipped else 0)
        assert figures['bdn_agent_stages{state="FAILED"}'] == 1

        mirror.faults.clear()
        stage = await staged(agent, mirror, manifest)  # asking again begins anew, with what is there
        assert tree(Path(stage.mounts[0].path)) == FILES


@pytest.mark.promise("corruption")
async def test_a_layout_that_does_not_make_up_the_file_is_refused(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    for file in mirror.layouts[manifest.digest].files:
        file.chunks.reverse()
    async with rig.agent() as agent:
        with pytest.raises(BdnError, match="the layout of"):
            await staged(agent, mirror, manifest)
        assert mirror.requests == 0


async def test_an_agent_that_ends_does_not_wait_for_a_silent_mirror(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    gate, asked, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    mirror.every = held_by(gate)
    mirror.on_request = lambda _: loop.call_soon_threadsafe(asked.set)
    async with asyncio.timeout(10):  # far less than the time after which a read gives up
        async with rig.agent() as agent:
            stage = await agent.stages.start("job", mirror.grant(manifest))
            await asked.wait()
    gate.set()

    assert stage.record.state == "STAGING"


def test_a_connection_that_is_being_made_when_the_agent_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = ConnectionPool(timeout_seconds=30)
        real = dial

        def connect(*arguments: Any, **options: Any) -> socket.socket:
            made = real(*arguments, **options)
            pool.close()  # it cannot see this socket yet
            return made

        monkeypatch.setattr("bdn.net.http1.pool.dial", connect)
        with (
            pytest.raises(ConnectionAbortedError, match="this program is ending"),
            pool.get(f"http://127.0.0.1:{silent.getsockname()[1]}/", {}),
        ):
            pass
