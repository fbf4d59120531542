"""The power fails under an agent and under a mirror, at any step: work may be lost, truth is not."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.crash.forgetful_disk import ForgetfulDisk, Way, forgetful_disk, needs_forgetful_disks
from tests.support.crash.forgetful_mirror import Central, fill
from tests.support.crash.forgetful_node import Node
from tests.support.crash.killing_pairs import two_at_a_time
from tests.support.promises.tally import Scale, Tally

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [needs_forgetful_disks, pytest.mark.promise("power-loss")]
WAYS: Sequence[Way] = ("forgotten", "any", "any", "kept")
_START_STEPS = 550  # of an agent on an empty disk: its folders, and their syncs


@contextmanager
def a_node(root: Path) -> Iterator[tuple[Node, ForgetfulDisk]]:
    mirror = AgentMirror(is_packed=True)
    with mirror.running(), forgetful_disk(root) as disk:
        yield Node(mirror, disk.place, root / "logs"), disk


async def survive(root: Path, step: int, way: Way, tally: Tally) -> None:
    """An agent whose power fails at that step after its first start, and again at the end; below 0, during that start."""
    case = f"step {step}, {way}"
    with a_node(root) as (node, disk):
        is_done = False
        try:
            if step < 0:
                disk.fail_at(step + _START_STEPS, ())
            async with node.program.daemon() as daemon:
                if step > 0:
                    disk.fail_at(step, [daemon.process.pid])
                is_done = await node.until_killed(daemon)
                await node.kill(daemon)
        except AssertionError:  # it ended while it started, because its disk was gone
            assert disk.is_dark, case
        tally.add(scenarios=1, kills=1, faults=not is_done)
        disk.fail_at(0, ())
        for is_last in (False, True):
            trail = disk.trail(12)
            disk.lose_power("forgotten" if is_last else way, seed=abs(step))
            node.restart_machine()
            wrong = node.wrong_files()
            assert not wrong, f"{case}: {wrong}\n{trail}"
            node.mirror.forget()
            async with node.program.daemon() as daemon:
                lost = await node.lost_stages(daemon)
                assert not lost, f"{case}: {lost}\n{trail}"
                assert not node.fetched_again(), f"{case}: what was READY was fetched again\n{trail}"
                await node.live(daemon)
                assert not node.wrong_files(), case
                difference = await node.ledger_differs(daemon)
                assert difference is None, f"{case}: {difference}"
                await node.kill(daemon)


@pytest.mark.promise("whole-files", "commit-order")
async def test_an_agent_that_lost_power_at_any_step_has_whole_files_and_every_ready_stage(
    tmp_path: Path, scale: Scale, tally: Tally
) -> None:
    random = Random(20261122)
    steps = [random.randint(-_START_STEPS + 10, -1), *random.sample(range(1, 480), scale.of(1, 30))]

    async def one(number: int) -> None:
        (tmp_path / str(number)).mkdir()
        await survive(tmp_path / str(number), steps[number], WAYS[number % len(WAYS)], tally)

    await two_at_a_time(one, len(steps))


async def survive_as_mirror(root: Path, hub: Hub, step: int, way: Way, tally: Tally) -> None:
    """A mirror whose power fails at that step, its first start included, and again at the end."""
    case = f"step {step}, {way}"
    with forgetful_disk(root) as disk:
        central, is_done = Central(hub, disk.place), False
        disk.fail_at(step, ())
        try:
            process = await central.start()
        except AssertionError:  # it ended while it started, because its disk was gone
            assert disk.is_dark, case
        else:
            async with process:
                disk.fail_at(step - disk.step, [process.process.pid])
                is_done = await central.until_killed(process)
        tally.add(scenarios=1, kills=1, faults=not is_done)
        disk.fail_at(0, ())
        for is_last in (False, True):
            trail = disk.trail(12)
            disk.lose_power("forgotten" if is_last else way, seed=step)
            wrong = list(central.wrong_files())
            assert not wrong, f"{case}: {wrong}\n{trail}"
            async with await central.start() as process:
                lost = await central.lost(process)
                assert not lost, f"{case}: {lost}\n{trail}"
                await central.live(process)
                assert not list(central.wrong_files()), case


@pytest.mark.promise("commit-order")
async def test_a_mirror_that_lost_power_at_any_step_keeps_every_mirror_that_was_ready(
    tmp_path: Path, hub: Hub, scale: Scale, tally: Tally
) -> None:
    fill(hub)
    random = Random(20261123)
    steps = [random.randint(1, 240), *random.sample(range(240, 840), scale.of(1, 20))]
    for number, step in enumerate(steps):
        (tmp_path / str(number)).mkdir()
        await survive_as_mirror(tmp_path / str(number), hub, step, WAYS[number % len(WAYS)], tally)
