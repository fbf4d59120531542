"""Training jobs run alike on agents and as pods: the same requests, states, logs and checkpoints, and the same after failures.

Agents, the mirror and ``bdn-rank`` are real processes, and the jobs' commands run in real sandboxes.
"""

import hashlib
import signal
from collections.abc import Iterator
from typing import Final

import pytest

from tests.doubles.hub import Hub
from tests.support.agent.mounts import needs_mounts
from tests.support.agent.runs import needs_bwrap
from tests.support.services.commands import wait_until
from tests.support.services.runner_worlds import NODES, Jobs, OfAgents, OfPods, World
from tests.support.services.training import CLIENTS, User

pytestmark = [needs_bwrap, needs_mounts]
PAGE: Final = 1000  # of the hub's listings
SECRET: Final = "hunter2-" * 5
CHECKPOINTED: Final = "mkdir $BT_CHECKPOINT_DIR/step-1; echo state >$BT_CHECKPOINT_DIR/step-1/state.bin"


@pytest.fixture(scope="module", params=[OfAgents, OfPods], ids=lambda kind: kind.name)
def world_and_jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_hub: Hub
) -> Iterator[tuple[World, Jobs]]:
    shared_hub.repo("org/model").commit({"weights.txt": b"what is in the weights"})
    world: World = request.param(tmp_path_factory.mktemp(request.param.name), shared_hub)
    with world.running() as jobs:
        yield world, jobs


@pytest.fixture
def world(world_and_jobs: tuple[World, Jobs]) -> World:
    return world_and_jobs[0]


@pytest.fixture
def jobs(world_and_jobs: tuple[World, Jobs]) -> Jobs:
    return world_and_jobs[1]


def test_a_job__completes_with_its_weights_and_its_lines_are_in_the_log(jobs: Jobs) -> None:
    weights = [{"source": "hf://org/model", "mount_location": "/app/model"}]
    job = jobs.create(
        "cat /app/model/weights.txt; echo; touch /app/model/x 2>/dev/null || echo read-only; pwd",
        "echo $PLAIN $BT_NODE_RANK of $BT_GROUP_SIZE; touch $BT_SCRATCH_DIR/f /tmp/f && echo last",
        weights=weights,
        environment_variables={"PLAIN": 'it\'s "plain"'},
    )
    jobs.reached(job, "COMPLETED")
    assert jobs.lines(job) == ["what is in the weights", "read-only", "/b10/workspace", 'it\'s "plain" 0 of 1', "last"]
    assert jobs.states(job) == ["ENDED"]


@pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it")
def test_a_job_of_truss__finds_its_folder_as_working_directory(world: World, jobs: Jobs) -> None:
    user = User(world.cluster, world.cluster.shell("operator"))
    script = "import os, pathlib; print('in', pathlib.Path(__file__).parent.absolute(), os.getcwd())"
    job = user.start("llama", "python3 sub/script.py", files={"sub/script.py": script})
    jobs.reached(job, "COMPLETED")
    assert jobs.lines(job) == ["in /b10/workspace/sub /b10/workspace"]


def test_a_command_that_fails__fails_the_job_with_rank_node_and_code(jobs: Jobs) -> None:
    job = jobs.create("echo before; sleep 86399 & exit 3", "echo never")
    failed = jobs.reached(job, "FAILED")
    node = failed["bdn"]["ranks"][0]["node"]
    assert failed["error_message"] == f"rank 0 on node {node} ended with exit code 3 [COMMAND_FAILED]"
    assert jobs.lines(job) == ["before"]


def test_ranks__start_together_and_not_before_all_are_staged(world: World, jobs: Jobs) -> None:
    with world.held(NODES[1]):
        job = jobs.create("echo rank $BT_NODE_RANK began", nodes=2)
        wait_until(lambda: "STAGED" in jobs.states(job), what="the first rank")
        assert (jobs.status(job), sorted(jobs.states(job)), jobs.lines(job)) == ("DEPLOYING", ["STAGED", "STAGING"], [])
    jobs.reached(job, "COMPLETED")
    assert sorted(jobs.lines(job)) == ["rank 0 began", "rank 1 began"]


def test_a_rank_that_fails__ends_the_other_ranks(jobs: Jobs) -> None:
    job = jobs.create("[ $BT_NODE_RANK = 0 ] && exit 5; sleep 86399", nodes=2)
    failed = jobs.reached(job, "FAILED")
    assert failed["error_message"].startswith("rank 0 on node ")
    assert failed["error_message"].endswith(" ended with exit code 5 [COMMAND_FAILED]")
    assert jobs.states(job) == ["ENDED", "ENDED"]


@pytest.mark.parametrize("status", ["PENDING", "DEPLOYING", "RUNNING"])
def test_a_stop__ends_the_job_in_each_state(world: World, jobs: Jobs, status: str) -> None:
    if status == "PENDING":
        first = jobs.create("sleep 86399", nodes=2)  # it has both nodes
        jobs.reached(first, "RUNNING")
        job = jobs.create("echo never")
        jobs.reached(job, "PENDING")
        jobs.stop(job)
        jobs.reached(job, "STOPPED")
        jobs.stop(first)
        jobs.reached(first, "STOPPED")
        return
    if status == "DEPLOYING":
        with world.held(*NODES):
            job = jobs.create("echo never")
            jobs.reached(job, "DEPLOYING")
            jobs.stop(job)
        jobs.reached(job, "STOPPED")
        assert jobs.lines(job) == []
        return
    job = jobs.create("trap 'echo saw it; exit 5' TERM; sleep 86399 & echo up; wait", "echo never")
    jobs.printed(job, "up")
    jobs.stop(job)
    jobs.reached(job, "STOPPED")
    assert jobs.lines(job) == ["up", "saw it"]


def test_a_secret__reaches_the_commands_and_is_written_nowhere(world: World, jobs: Jobs) -> None:
    world.store_secret("wandb", SECRET)
    job = jobs.create(
        "printf %s $KEY | sha256sum | cut -c-64; sleep 86399", environment_variables={"KEY": {"name": "wandb"}}
    )
    jobs.printed(job, hashlib.sha256(SECRET.encode()).hexdigest())
    jobs.stop(job)
    jobs.reached(job, "STOPPED")
    assert not [one for one in world.written() if SECRET.encode() in one]
    assert SECRET not in str(jobs.get(job))


def test_a_checkpoint__is_listed_also_if_it_was_written_last(jobs: Jobs) -> None:
    job = jobs.create(CHECKPOINTED, checkpointing_config={"enabled": True})
    assert jobs.reached(job, "COMPLETED")["checkpoint_sync_status"] == "COMPLETED"
    assert jobs.checkpoints(job) == ["step-1"]


def test_a_runner_that_is_away__loses_no_rank_and_no_line(world: World, jobs: Jobs) -> None:
    job = jobs.create("echo begins; for i in 1 2 3 4 5 6 7 8; do sleep 0.2; echo line $i; done")
    jobs.printed(job, "begins")
    with world.away():
        assert jobs.status(job) == "RUNNING"
    jobs.reached(job, "COMPLETED")
    assert jobs.lines(job) == ["begins", *(f"line {number}" for number in range(1, 9))]


def test_a_mirror_that_is_killed__goes_on_with_the_job_after_its_restart(world: World, jobs: Jobs) -> None:
    running = jobs.create("echo up; for i in 1 2 3 4 5 6 7 8; do sleep 0.2; echo line $i; done")
    jobs.printed(running, "up")
    with world.held(*NODES):
        deploying = jobs.create("echo began")
        jobs.reached(deploying, "DEPLOYING")
        world.end_mirror(signal.SIGKILL)
        world.start_mirror()
        assert jobs.status(deploying) == "DEPLOYING"
    for job in (running, deploying):
        jobs.reached(job, "COMPLETED")
    assert jobs.lines(running) == ["up", *(f"line {number}" for number in range(1, 9))]
    assert jobs.lines(deploying) == ["began"]


def test_a_node_that_is_lost__fails_the_job_and_ends_its_other_ranks(world: World, jobs: Jobs) -> None:
    """The last of this world: the node does not come back."""
    job = jobs.create("echo up; sleep 86399", nodes=2)
    wait_until(lambda: jobs.lines(job) == ["up", "up"], what="both ranks")
    world.lose(NODES[1])
    failed = jobs.reached(job, "FAILED")
    assert "[NODE_LOST]" in failed["error_message"]
    assert sorted(jobs.states(job)) == ["ENDED", "LOST"]
