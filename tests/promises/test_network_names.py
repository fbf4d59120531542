"""Names that do not resolve, or whose resolver never answers."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from bdn.core.egress import EgressPolicy
from bdn.core.errors import BdnError
from bdn.net import client
from bdn.net.api_clients import MirrorClient
from bdn.net.host_lookups import NameSilentError, run_program
from bdn.net.http1.pool import Dialer
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.process import Program
from tests.support.agent.rig import Rig, staged
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.mirror.service import until
from tests.support.network.egress_streets import Doorbell, Names
from tests.support.network.fault_proxy_ring import HASTY
from tests.support.network.silent_resolver import SILENT
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("network")

MIRROR: Final = "the-mirror"
HELD: Final = {"large": noise(9 * MIB + 1, 2), "small": noise(30_000, 2)}
NEW: Final = {"other": noise(2 * MIB, 3)}


async def test_a_command_that_cannot_resolve_its_mirror_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch)
    async with MirrorClient(f"http://{MIRROR}:8460") as client:
        with pytest.raises(BdnError, match=f"http://{MIRROR}:8460") as caught:
            await client.projects()
    assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)


# --- A name whose resolver says neither yes nor no, and lets nobody go: it costs those who ask for it, and nobody else ---
SILENT_SECONDS: Final = 20.0
THREADS: Final = 2  # of the default executor: as many attempts would hold them all
OTHER: Final = "the-other"


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names(monkeypatch, (SILENT, OTHER), silent=[SILENT])
    yield names
    names.speak()


def seeking(name: str) -> int:
    """How many threads wait for this name."""
    return sum(thread.name.endswith(name) for thread in threading.enumerate())


def test_an_agent_goes_on_while_the_name_of_its_mirror_hangs(
    server: AgentMirror, silence: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """What it holds is staged, other names are asked, and heartbeats go on when the name answers."""
    mirror, beats = server.renewed(is_packed=True), at_scale(4 * THREADS, 50 * THREADS)
    held, other = mirror.publish(HELD), mirror.publish(NEW)
    rig = Rig(mirror, tmp_path / "node", {"url": mirror.url.replace("127.0.0.1", SILENT)})

    async def run() -> None:
        async with rig.agent(waits=HASTY, url=mirror.url) as agent:
            await staged(agent, mirror, held)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS))
        monkeypatch.setattr(client, "_CONNECT_SECONDS", 0.02)
        loop.call_later(SILENT_SECONDS, silence.speak)  # an agent without threads cannot even end
        async with rig.agent(waits=HASTY) as agent:
            for _ in range(beats):
                with pytest.raises(BdnError, match=SILENT) as caught:
                    await agent.heartbeats.beat()
                assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)
            stage = await staged(agent, mirror, held, job="again")
            monkeypatch.setattr(client, "_CONNECT_SECONDS", SILENT_SECONDS)
            async with MirrorClient(mirror.url.replace("127.0.0.1", OTHER)) as elsewhere:
                await elsewhere.root(held.digest, mirror.grant(held))
            assert seeking(SILENT) == 1
            silence.speak()
            beaten = len(mirror.heartbeats)
            after = await staged(agent, mirror, other, job="after")
            await agent.heartbeats.beat()
            assert len(mirror.heartbeats) > beaten
            tally.add(wrong=tree(Path(stage.mounts[0].path)) != HELD)
            tally.add(wrong=tree(Path(after.mounts[0].path)) != NEW)

    run_program(run())
    tally.add(scenarios=1, faults=beats, refused=beats)


@pytest.mark.parametrize("egress", [None, EgressPolicy.parse("127.0.0.1")], ids=["ours", "upstreams"])
def test_byte_threads_get_free_of_a_name_that_hangs_and_share_its_thread(
    silence: Names, egress: EgressPolicy | None, tally: Tally
) -> None:
    asking = at_scale(8, 64)
    hasty, patient = Dialer(0.2, egress), Dialer(SILENT_SECONDS, egress)
    with Doorbell("127.0.0.1") as bell, ThreadPoolExecutor(asking) as threads:
        answers = [threads.submit(hasty.connect, ("http", SILENT, bell.port)) for _ in range(asking)]
        failures = [answer.exception(SILENT_SECONDS) for answer in answers]
        waiting = seeking(SILENT)
        patient.connect(("http", OTHER, bell.port)).close()
        joins = threads.submit(patient.connect, ("http", SILENT, bell.port))
        silence.speak()
        joins.result(SILENT_SECONDS).close()
        patient.connect(("http", SILENT, bell.port)).close()

    tally.add(scenarios=1, faults=asking, refused=asking)
    assert {type(failure) for failure in failures} == {NameSilentError}
    assert all(f"{SILENT} does not resolve: no answer within 0.2 s" in str(failure) for failure in failures)
    assert waiting == 1


async def test_an_agent_ends_while_the_name_of_its_mirror_hangs(tmp_path: Path) -> None:
    """Neither the loop's end nor the interpreter's waits for the thread."""
    asked = tmp_path / "asked"
    command = (sys.executable, "-m", "tests.support.network.silent_resolver", str(asked), "node_agent")
    program = Program(tmp_path / "node", f"http://{SILENT}:8460", command=command)
    async with program.daemon() as daemon:
        await until(asked.exists)
        async with asyncio.timeout(SILENT_SECONDS):
            code = await daemon.stop()
    assert code == 0
