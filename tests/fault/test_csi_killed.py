"""Driver, agent or both are killed while a pod's volume is published, read or unpublished: the kubelet's next call ends right."""

# ruff: noqa: ASYNC110 - other processes: there is nothing to be notified by

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import pytest
from grpc import StatusCode

from tests.doubles.hub import Hub
from tests.support.agent.csi_node import CsiNode, node_folder
from tests.support.agent.kubelet import OK, Answer, Pod
from tests.support.agent.mounts import needs_mounts
from tests.support.agent.process import Daemon
from tests.support.content.trees import tree
from tests.support.crash.killing_steps import Fuse
from tests.support.crash.scenario import at_each
from tests.support.mirror.process import ServingProcess
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.promises.tally import Tally, at_scale
from tests.support.services.forked import Process

MODEL: Final = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 8_000}
SOURCE: Final = {"source": "hf://org/model@main"}
MODULES: Final = {"driver": "node_agent.csi.__main__", "agent": "node_agent.__main__"}
PHASES: Final = ("publish", "run", "unpublish")

pytestmark = needs_mounts


@dataclass
class Life:
    """A pod's volume on a node whose programs count their steps.

    ``kills`` are of processes. ``aimed`` are deaths at a step of the victim's own, and ``hits`` those that were not late.
    """

    node: CsiNode
    pod: Pod = field(init=False)
    fuses: dict[str, Fuse] = field(init=False)
    kills: int = 0
    aimed: int = 0
    hits: int = 0
    reads: int = 0
    _programs: dict[str, tuple[AsyncExitStack, Process]] = field(default_factory=dict)
    _agent: Daemon | None = None

    def __post_init__(self) -> None:
        self.pod = self.node.pod()
        self.fuses = {name: Fuse.at(self.node.root / f"{name}.fuse") for name in MODULES}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            await self.start("agent", "driver")
            yield
        finally:
            for stack, _ in self._programs.values():
                await stack.aclose()

    async def start(self, *names: str) -> None:
        """The programs, each of which lives until its fuse is lit."""
        for name in names:
            self.fuses[name].spare()
            stack, command = AsyncExitStack(), self.fuses[name].command(MODULES[name])
            if name == "driver":
                process = await stack.enter_async_context(self.node.driver(command))
            else:
                self._agent = await stack.enter_async_context(replace(self.node.agent, command=command).daemon())
                process = self._agent.process
            self._programs[name] = stack, process

    async def call(self, phase: str) -> Answer:
        """What the kubelet does in this phase. While the pod runs it reads all files, again and again."""
        if phase == "run":
            while (content := tree(self.pod.target)) == MODEL:
                self.reads += 1
                await asyncio.sleep(0.001)
            return Answer(StatusCode.DATA_LOSS, str(content.keys()))
        return await (self.pod.publish(SOURCE) if phase == "publish" else self.pod.unpublish())

    async def die(self, phase: str, victims: tuple[str, ...], step: int, *, of: str) -> None:
        """Kill the victims once the program ``of`` has made so many steps of the phase, or at the phase's end.

        A victim dies at a step of its own before it or right after it; at a step of the other program, while that works.
        While the pod runs, there are no steps: they die between two of its reads.
        """
        fuse, processes = self.fuses[of], [self._programs[name][1] for name in victims]
        last = fuse.steps + step
        if of in victims and phase != "run":
            self.aimed += 1
            fuse.light(step, after=step % 2 == 0)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(self.call(phase))
            while not call.done() and (not self.reads if phase == "run" else fuse.steps < last):
                await asyncio.sleep(0.001)
            if phase != "run" and of in victims and fuse.steps >= last:
                await self._programs[of][1].wait()
                self.hits += 1
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            self.kills += len(victims)
            if phase == "run":
                assert tree(self.pod.target) == MODEL
            elif "driver" in victims:  # else it may be mounting or unmounting
                assert tree(self.pod.target) in (MODEL, {}), "a part of the volume"
            await self.start(*victims)
            if phase == "run":
                await self._reads_on(call)
        assert phase == "run" or call.result().status in (None, StatusCode.UNAVAILABLE), call.result()

    async def _reads_on(self, call: asyncio.Task[Answer]) -> None:
        before = self.reads
        while self.reads < before + 2:
            assert not call.done(), call.result()
            await asyncio.sleep(0.001)
        call.cancel()

    async def end(self, calls: tuple[str, ...]) -> None:
        """The kubelet's next calls are all right at once, and nothing is left."""
        for name in calls:
            assert await self.call(name) == OK, self.node.log
            if name == "publish":
                assert tree(self.pod.target) == MODEL
        assert self._agent is not None
        await self.node.assert_nothing_is_left(self._agent, self.pod)


async def steps_of_each(root: Path, url: str) -> Mapping[tuple[str, str], int]:
    """How many steps each program makes in each phase. While the pod runs it makes none."""
    life = Life(CsiNode(root, url))
    found: dict[tuple[str, str], int] = {}
    async with life.running():
        for phase in ("publish", "unpublish"):
            before = {name: fuse.steps for name, fuse in life.fuses.items()}
            assert await life.call(phase) == OK
            found |= {(name, phase): fuse.steps - before[name] for name, fuse in life.fuses.items()}
    return found


async def survives(
    life: Life, victims: tuple[str, ...], number: int, count: int, steps: Mapping[tuple[str, str], int]
) -> None:
    """Kills are spread over the phases, and over the steps of each."""
    phase, turn, turns = PHASES[number % 3], number // 3, -(-count // 3)
    of = "agent" if turn % 2 else victims[0]  # the driver waits while the agent works
    step = 1 if phase == "run" else 1 + steps[of, phase] * turn // turns
    is_deleted = turn % 4 > 1  # the pod, while its program was away
    calls = ("unpublish",) if phase == "unpublish" or is_deleted else ("publish", "unpublish")
    async with life.running():
        if phase != "publish":
            assert await life.call("publish") == OK
        await life.die(phase, victims, step, of=of)
        await life.end(calls)


@pytest.fixture
async def mirror(tmp_path: Path) -> AsyncIterator[ServingProcess]:
    with Hub() as hub:
        hub.repo("org/model").commit(MODEL)
        given = {"HF_ENDPOINT": hub.url, "BDN_EGRESS_ALLOW": ALLOW_LOOPBACK}
        async with await ServingProcess.start(tmp_path / "mirror", **given) as serving:
            yield serving


@pytest.mark.promise("whole-files")
@pytest.mark.parametrize("victims", [("driver",), ("agent",), ("driver", "agent")])
async def test_volume__whose_driver_or_agent_is_killed_at_any_time__is_right_or_gone_after_the_next_call(
    victims: tuple[str, ...], mirror: ServingProcess, tmp_path: Path, tally: Tally
) -> None:
    count, lives = at_scale(3, 42), list[Life]()
    with node_folder() as root:
        steps = await steps_of_each(root, mirror.url)

    async def one(_: Path, number: int, __: int) -> None:
        with node_folder() as root:
            lives.append(life := Life(CsiNode(root, mirror.url)))
            await survives(life, victims, number, count, steps)
        tally.add(scenarios=1, kills=life.kills)

    (tmp_path / "each").mkdir()
    await at_each(tmp_path / "each", range(count), one)
    aimed, hits = (sum(getattr(life, name) for life in lives) for name in ("aimed", "hits"))
    print(f"{tally.counts['kills']} kills, {hits} at one of the steps {steps}")
    assert tally.counts["kills"] == count * len(victims)
    assert aimed / 2 < hits
