"""The CSI driver or the agent is killed at any step: the kubelet's next call ends right, and nothing is leaked."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from grpc import StatusCode

from tests.doubles.hub import Hub
from tests.support.agent.csi_node import CsiNode, node_folder
from tests.support.agent.kubelet import OK, Answer, Pod
from tests.support.agent.mounts import needs_mounts
from tests.support.content.trees import tree
from tests.support.crash.killing_steps import Fuse
from tests.support.crash.scenario import at_each
from tests.support.mirror.process import ServingProcess
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.promises.tally import Tally, at_scale

MODEL = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 8_000}
SOURCE = {"source": "hf://org/model@main"}
DRIVER_STEPS = 17  # of publishing, unpublishing and publishing
AGENT_STEPS = 60  # of staging and releasing

pytestmark = needs_mounts


@asynccontextmanager
async def serving_mirror(folder: Path) -> AsyncIterator[ServingProcess]:
    with Hub() as hub:
        hub.repo("org/model").commit(MODEL)
        given = {"HF_ENDPOINT": hub.url, "BDN_EGRESS_ALLOW": ALLOW_LOOPBACK}
        async with await ServingProcess.start(folder / "mirror", **given) as mirror:
            yield mirror


async def called(pod: Pod, *, is_publish: bool) -> Answer:
    return await (pod.publish(SOURCE) if is_publish else pod.unpublish())


async def repeated(pod: Pod, *, is_publish: bool) -> None:
    """As a kubelet does it: after each failure again."""
    async with asyncio.timeout(240):
        while (answer := await called(pod, is_publish=is_publish)) != OK:
            assert answer.status is StatusCode.UNAVAILABLE, answer


async def driver_survives(node: CsiNode, fuse: Fuse, step: int) -> bool:
    """Returns whether the driver was killed."""
    pod, calls = node.pod(), [True, False, True]  # publish, or unpublish
    async with node.agent.daemon() as agent:
        async with node.driver(fuse.command("node_agent.csi.__main__")):
            fuse.light(step, after=step % 2 == 0)
            while calls and await called(pod, is_publish=calls[0]) == OK:
                calls.pop(0)
        async with node.driver():
            if calls:
                await repeated(pod, is_publish=calls[0])
            if not calls or calls[0]:
                assert tree(pod.target) == MODEL, step
            await repeated(pod, is_publish=False)
            await node.assert_nothing_is_left(agent, pod)
    return bool(calls)


async def agent_survives(node: CsiNode, fuse: Fuse, step: int) -> bool:
    """The driver lives, and waits within its call until the agent is back."""
    pod, program = node.pod(), replace(node.agent, command=fuse.command("node_agent.__main__"))

    async def whole_life() -> None:
        await repeated(pod, is_publish=True)
        assert tree(pod.target) == MODEL, step
        await repeated(pod, is_publish=False)

    async with node.driver(), asyncio.TaskGroup() as group:
        async with program.daemon() as daemon:
            fuse.light(step, after=step % 2 == 0)
            life, end = group.create_task(whole_life()), group.create_task(daemon.process.wait())
            await asyncio.wait([life, end], return_when=asyncio.FIRST_COMPLETED)
            is_killed = end.done()
            fuse.spare()
        async with node.agent.daemon() as agent:
            await life
            await node.assert_nothing_is_left(agent, pod)
    return is_killed


@pytest.mark.promise("whole-files")
@pytest.mark.parametrize(
    ("survives", "steps", "fewest"), [(driver_survives, DRIVER_STEPS, 4), (agent_survives, AGENT_STEPS, 3)]
)
async def test_volume__whose_driver_or_agent_is_killed_at_any_step__is_right_or_gone_after_the_next_call(
    survives: Callable[[CsiNode, Fuse, int], Awaitable[bool]], steps: int, fewest: int, tmp_path: Path, tally: Tally
) -> None:
    count = at_scale(fewest, 50)

    async def one(_: Path, __: int, step: int) -> None:
        with node_folder() as root:
            is_killed = await survives(CsiNode(root, mirror.url), Fuse.at(root / "fuse"), step)
        tally.add(scenarios=1, kills=is_killed)

    async with serving_mirror(tmp_path) as mirror:
        (tmp_path / "each").mkdir()
        await at_each(tmp_path / "each", [1 + steps * number // count for number in range(count)], one)
    assert tally.counts["kills"] > count // 2
