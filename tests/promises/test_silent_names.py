"""A name whose resolver says neither yes nor no, and lets nobody go: it costs those who ask for it, and nobody else."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from bdn.core.egress import EgressPolicy
from bdn.core.errors import BdnError
from bdn.net import client
from bdn.net.client import MirrorClient
from bdn.net.host_lookups import NameSilentError, run_program
from bdn.net.http1.pool import Dialer
from bdn.wire.stage_schema import StageDocument
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.process import Program
from tests.support.agent.rig import MIB, Rig, noise, staged
from tests.support.content.trees import tree
from tests.support.mirror.scripted_names import Names
from tests.support.mirror.service import until
from tests.support.network.egress_streets import Doorbell
from tests.support.network.fault_proxy_ring import HASTY
from tests.support.network.silent_resolver import SILENT
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("network")
pytest_plugins = ("tests.support.agent.fixtures",)

LONGEST_SECONDS: Final = 20.0
THREADS: Final = 2  # of the default executor: as many attempts would hold them all
OTHER: Final = "the-other"


@pytest.fixture
def names() -> Names:
    return Names((SILENT, OTHER), silent=(SILENT,))


def seeking(name: str) -> int:
    """How many threads wait for this name."""
    return sum(thread.name.endswith(name) for thread in threading.enumerate())


@dataclass
class Story:
    """An agent that holds one manifest and loses the name of its mirror, on the loop of our programs."""

    rig: Rig
    names: Names
    mirror: AgentMirror
    monkeypatch: pytest.MonkeyPatch
    files: dict[str, bytes] = field(default_factory=lambda: {"large": noise(9 * MIB, 1)})

    def __post_init__(self) -> None:
        self.held, self.other = self.mirror.publish(self.files), self.mirror.publish({"other": noise(2 * MIB, 3)})

    async def hold(self) -> None:
        async with self.rig.agent(waits=HASTY, url=self.mirror.url) as agent:
            await staged(agent, self.mirror, self.held)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))

    async def miss(self, agent: Agent, beats: int) -> StageDocument:
        """Heartbeats fail, and all else goes on."""
        for _ in range(beats):
            with pytest.raises(BdnError, match=SILENT) as caught:
                await agent.heartbeats.beat()
            assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)
        stage = await staged(agent, self.mirror, self.held, job="again")
        self.monkeypatch.setattr(client, "_CONNECT_SECONDS", LONGEST_SECONDS)
        async with MirrorClient(self.mirror.url.replace("127.0.0.1", OTHER)) as elsewhere:
            await elsewhere.manifest(self.held.digest, self.mirror.grant(self.held))
        return stage

    async def recover(self, agent: Agent) -> StageDocument:
        """The name answers."""
        assert seeking(SILENT) == 1
        self.names.speak()
        beaten = len(self.mirror.heartbeats)
        stage = await staged(agent, self.mirror, self.other, job="after")
        await agent.heartbeats.beat()
        assert len(self.mirror.heartbeats) > beaten
        return stage


def test_an_agent_goes_on_while_the_name_of_its_mirror_hangs(
    server: AgentMirror, names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Scale, tally: Tally
) -> None:
    """What it holds is staged, other names are asked, and heartbeats go on when the name answers."""
    mirror = server.renewed(is_packed=True)
    rig = Rig(mirror, tmp_path / "node", {"url": mirror.url.replace("127.0.0.1", SILENT)})
    story, beats = Story(rig, names, mirror, monkeypatch), scale.of(4 * THREADS, 50 * THREADS)

    async def run() -> None:
        await story.hold()
        monkeypatch.setattr(client, "_CONNECT_SECONDS", 0.02)
        with names.resolving():
            asyncio.get_running_loop().call_later(
                LONGEST_SECONDS, names.speak
            )  # an agent without threads cannot even end
            async with rig.agent(waits=HASTY) as agent:
                stage = await story.miss(agent, beats)
                tally.add(wrong=tree(Path(stage.mounts[0].path)) != story.files)
                stage = await story.recover(agent)
                tally.add(wrong=tree(Path(stage.mounts[0].path)) != {"other": noise(2 * MIB, 3)})

    run_program(run())
    tally.add(scenarios=1, faults=beats, refused=beats)


@pytest.mark.parametrize("egress", [None, EgressPolicy.parse("127.0.0.1")], ids=["ours", "upstreams"])
def test_byte_threads_get_free_of_a_name_that_hangs_and_share_its_thread(
    names: Names, egress: EgressPolicy | None, scale: Scale, tally: Tally
) -> None:
    asking = scale.of(8, 64)
    hasty, patient = Dialer(0.2, egress), Dialer(LONGEST_SECONDS, egress)
    with Doorbell("127.0.0.1") as bell, ThreadPoolExecutor(asking) as threads, names.resolving():
        answers = [threads.submit(hasty.connect, ("http", SILENT, bell.port)) for _ in range(asking)]
        failures = [answer.exception(LONGEST_SECONDS) for answer in answers]
        waiting = seeking(SILENT)
        patient.connect(("http", OTHER, bell.port)).close()
        joins = threads.submit(patient.connect, ("http", SILENT, bell.port))
        names.speak()
        joins.result(LONGEST_SECONDS).close()
        patient.connect(("http", SILENT, bell.port)).close()

    tally.add(scenarios=1, faults=asking, refused=asking)
    assert {type(failure) for failure in failures} == {NameSilentError}
    assert all(f"{SILENT} does not resolve: no answer within 0.2 s" in str(failure) for failure in failures)
    assert waiting == 1


async def test_an_agent_ends_while_the_name_of_its_mirror_hangs(tmp_path: Path, tally: Tally) -> None:
    """Neither the loop's end nor the interpreter's waits for the thread."""
    asked = tmp_path / "asked"
    command = (sys.executable, "-m", "tests.support.network.silent_resolver", str(asked), "node_agent")
    program = Program(tmp_path / "node", f"http://{SILENT}:8460", command=command)
    async with program.daemon() as daemon:
        await until(asked.exists)
        async with asyncio.timeout(LONGEST_SECONDS):
            code = await daemon.stop()
    tally.add(scenarios=1, faults=1)
    assert code == 0
