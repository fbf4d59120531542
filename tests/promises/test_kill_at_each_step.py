"""An agent and a mirror are killed at every step of their work on the disk, and go on; a job that reads all the while notices nothing."""

from pathlib import Path
from random import Random

import pytest

from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.crash.forgetful_mirror import Central, fill
from tests.support.crash.forgetful_node import JOBS, Node, trees
from tests.support.crash.killing_reader import Watched, reading
from tests.support.crash.killing_steps import Fuse, two_at_a_time
from tests.support.promises.tally import Scale, Tally

pytest_plugins = ("tests.support.mirror.fixtures",)
AGENT_STEPS, MIRROR_STEPS = 400, 120  # of a whole run, after the start


def watched(node: Node) -> list[Watched]:
    """The views of all jobs. One that is released may vanish file by file; the others, once seen, stay whole."""
    return [
        Watched.of(node.view(job), trees()[name], stays=job not in ("job-b", "job-d")) for job, name in JOBS.items()
    ]


async def survive(root: Path, step: int, tally: Tally) -> None:
    """An agent that is killed that many steps after its start."""
    fuse, case = Fuse.at(root / "fuse"), f"step {step}"
    with AgentMirror(is_packed=True).running() as mirror:
        node = Node(mirror, root, root / "logs", command=fuse.command("node_agent.__main__"))
        async with reading(watched(node)) as seen:
            async with node.program.daemon() as daemon:
                fuse.light(step, after=step % 2 == 0)
                is_done = await node.until_killed(daemon)
                await node.kill(daemon)
            mirror.forget()
            async with node.unharmed.daemon() as daemon:
                lost = await node.lost_stages(daemon)
                assert not lost, f"{case}: {lost}"
                assert not node.fetched_again(), f"{case}: what was READY was fetched again"
                await node.live(daemon)
                assert not node.wrong_files(), case
                difference = await node.ledger_differs(daemon)
                assert difference is None, f"{case}: {difference}"
        assert not seen.wrong, f"{case}: {seen.wrong[:5]}"
        assert seen.whole_views, case
    tally.add(scenarios=1, kills=not is_done)


@pytest.mark.promise("whole-files", "commit-order")
async def test_an_agent_killed_at_any_step_goes_on_and_readers_see_whole_files_alone(
    tmp_path: Path, scale: Scale, tally: Tally
) -> None:
    steps = even_sample(AGENT_STEPS, scale.of(3, 60))

    async def one(number: int) -> None:
        (tmp_path / str(number)).mkdir()
        await survive(tmp_path / str(number), steps[number], tally)

    await two_at_a_time(one, len(steps))
    assert tally.counts["kills"] > len(steps) // 2


@pytest.mark.promise("commit-order")
async def test_a_mirror_killed_at_any_step_goes_on_and_keeps_what_it_said(
    tmp_path: Path, hub: Hub, scale: Scale, tally: Tally
) -> None:
    fill(hub)
    steps = even_sample(MIRROR_STEPS, scale.of(2, 40))
    for step in steps:
        root, case = tmp_path / str(step), f"step {step}"
        root.mkdir()
        fuse, central = Fuse.at(root / "fuse"), Central(hub, root)
        async with await central.start(fuse.command("bdn.cli.main", "serve", "--json")) as process:
            fuse.light(step, after=step % 2 == 0)
            is_done = await central.until_killed(process)
        async with await central.start() as process:
            lost = await central.lost(process)
            assert not lost, f"{case}: {lost}"
            await central.live(process)
            assert not list(central.wrong_files()), case
            assert not central.stray(), case
        tally.add(scenarios=1, kills=not is_done)
    assert tally.counts["kills"] > len(steps) // 2


def even_sample(total: int, count: int) -> list[int]:
    """One step out of each of ``count`` equal parts of all steps."""
    random = Random(20261122)
    return [random.randint(number * total // count + 1, (number + 1) * total // count) for number in range(count)]
