"""``bdn jobs`` against a mirror that listens, about jobs whose agents report what a test tells them to."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

from bdn.cli import output
from bdn.cli.main import main
from tests.fakes.clock import Clock
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test
from tests.support.mirror.training_jobs import JobAgent, JobClient, spec
from tests.support.network.service import listening
from tests.support.waiting import until

pytest_plugins = ("tests.support.mirror.fixtures",)

MILLI: Final = 10**6  # nanoseconds
ERROR: Final = {"code": "CACHE_FULL", "message": "1 GB is in use", "retryable": True}


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["jobs", *arguments])


async def lines(*arguments: str) -> list[str]:
    done = await run(*arguments)
    assert done.exit_code == 0, done.output
    return [" ".join(line.split()) for line in done.output.splitlines()]


@dataclass
class User:
    """Has the project ``llama`` on a mirror that lives by the clock, and whose controller looks when the test says so."""

    mirror: MirrorUnderTest
    client: JobClient
    clock: Clock

    async def created(self, nodes: int = 1, name: str | None = None) -> str:
        self.clock.now += 1
        return await self.client.create(spec(nodes=nodes, name=name))

    async def looked(self, times: int = 2) -> None:
        for _ in range(times):
            await self.mirror.service.controller.look()

    async def agents(self, count: int) -> list[JobAgent]:
        agents = [JobAgent(self.mirror, f"n{number}") for number in range(count)]
        for agent in agents:
            await agent.beat()
        return agents

    async def running(self, ranks: int) -> "Running":
        agents = await self.agents(ranks)
        job = await self.created(ranks)
        await self.looked()
        for rank, agent in enumerate(agents):
            await agent.report(f"run:{job}:{rank}:stage", "STAGED")
        for rank, agent in enumerate(agents):
            await agent.report(f"run:{job}:{rank}:go", "RUNNING", running=True)
        return Running(self, job, agents)

    def at(self, seconds: float = 0.0) -> int:
        return round((self.clock.now + seconds) * 1000) * MILLI


@dataclass
class Running:
    """A job whose commands run on all its nodes."""

    user: User
    job: str
    agents: list[JobAgent]

    async def print(self, rank: int, seq: int, *printed: tuple[int, str]) -> None:
        await self.agents[rank].print(f"run:{self.job}:{rank}:go", seq, *printed)

    async def end(self, exit_code: int, want: str = "go") -> None:
        for rank, agent in enumerate(self.agents):
            await agent.report(f"run:{self.job}:{rank}:{want}", "ENDED", exit_code=exit_code)


@pytest.fixture
async def user(upstreams: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[User]:
    clock = Clock()
    async with (
        mirror_under_test(tmp_path / "mirror", clock=clock, work=False) as mirror,
        listening(mirror.service.api) as url,
    ):
        monkeypatch.setenv("BDN_URL", url)
        yield User(mirror, await JobClient.of(mirror), clock)


async def test_ls__has_the_active_jobs_newest_first_and_with_all_those_that_ended(user: User) -> None:
    assert await lines("ls") == ["no active training jobs; --all lists those that have ended"]
    assert await lines("ls", "--all") == ["no training jobs"]
    await user.agents(1)
    deploying = await user.created()
    await user.looked()
    pending = await user.created(name="tune")
    failed = await user.created(nodes=2)
    await user.looked()
    created = await user.created()

    header, *rows = await lines("ls")
    assert header == "ID NAME PROJECT STATUS NODES CREATED REASON"
    assert [row.split()[0] for row in rows] == [created, pending, deploying]
    assert [row.split()[3] for row in rows] == ["CREATED", "PENDING", "DEPLOYING"]
    assert rows[1].startswith(f"{pending} tune llama PENDING 1 ")
    assert rows[1].endswith("Z needs 1 node with a free slot in cluster c, which has 0 such nodes now")
    assert await lines("ls", "-q") == [created, pending, deploying]
    assert await lines("ls", "--all", "-q") == [created, failed, pending, deploying]
    (row,) = [row for row in await lines("ls", "--all") if row.startswith(failed)]
    assert " DEPLOY_FAILED 2 " in row
    assert row.endswith("[NO_SUCH_CAPACITY]")
    found = json.loads((await run("ls", "--json")).output)["items"]
    assert [job["current_status"] for job in found] == [f"TRAINING_JOB_{row.split()[3]}" for row in rows]


async def test_show__has_the_error_of_a_job_and_its_ranks_with_the_slowest_first(user: User) -> None:
    agents = await user.agents(4)
    job = await user.created(4)
    await user.looked()
    reports: tuple[tuple[str, Json], ...] = (
        ("STAGED", {"bytes_done": 4000, "bytes_total": 4000}),
        ("STAGING", {"bytes_done": 1999, "bytes_total": 2000, "eta_seconds": 1}),
        ("STAGING", {"bytes_done": 500, "bytes_total": 2000, "eta_seconds": 90, "error": ERROR}),
        ("STAGING", {"bytes_done": 3}),
    )
    for rank, (agent, (state, fields)) in enumerate(zip(agents, reports, strict=True)):
        await agent.report(f"run:{job}:{rank}:stage", state, running=state == "STAGING", **fields)

    header, row, *ranks = await lines("show", job)
    assert header == "ID NAME PROJECT STATUS NODES CREATED NEEDS CLUSTER MIRROR"
    assert row.startswith(f"{job} job-1 llama DEPLOYING 4 ")
    assert " CPU:1 c mir_" in row
    assert ranks == [
        "RANK NODE STATE BYTES PERCENT TIME LEFT",
        "3 n3 STAGING 3 B - -",
        "2 n2 STAGING 500 B of 2 KB 25 % 1m 30s",
        "1 n1 STAGING 2 KB of 2 KB 99 % 1s",
        "0 n0 STAGED 4 KB of 4 KB 100 % -",
        "rank 2 on node n2: 1 GB is in use [CACHE_FULL]",
    ]
    assert json.loads((await run("show", job, "--json")).output)["bdn"]["slowest_rank"] == 3

    await agents[1].report(f"run:{job}:1:stage", "ENDED", exit_code=3)
    _, row, reason, header, *ranks = await lines("show", job)
    assert reason == "rank 1 on node n1 ended with exit code 3 [COMMAND_FAILED]"
    assert header == "RANK NODE STATE BYTES PERCENT TIME LEFT EXIT CODE"
    assert "1 n1 ENDED 0 B - - 3" in ranks
    for command in ("show", "logs", "stop"):
        unknown = await run(command, "0000000000")
        assert (unknown.exit_code, unknown.output) == (
            4,
            "error: training job 0000000000 does not exist, or is not yours [NOT_FOUND]\n",
        )


async def test_show__of_a_job_that_starts_has_the_rate_of_each_rank_from_its_stage(user: User) -> None:
    agents = await user.agents(3)
    job = await user.created(3)
    await user.looked()
    for rank, agent in enumerate(agents[:2]):  # the third one's stage is not known yet
        await agent.report(f"run:{job}:{rank}:stage", "STAGING", running=True, bytes_done=1, bytes_total=2000)
    figures = ((500, 2000, 300), (1999, 2000, None))
    for agent, (done, total, rate) in zip(agents, figures, strict=False):
        stage: Json = {"id": "stg_1", "job": job, "mirror_id": None, "manifests": [], "state": "STAGING", "since": 0}
        stage |= {"bytes_done": done, "bytes_total": total, "bytes_per_second": rate, "error": None}
        await agent.beat(stages=[stage, {**stage, "job": "another", "bytes_per_second": 7}])

    *_, header, first, second, third = await lines("show", job)
    assert header == "RANK NODE STATE BYTES PERCENT RATE TIME LEFT"
    assert first == "2 n2 STAGING 0 B - - -"
    assert second == "0 n0 STAGING 500 B of 2 KB 25 % 300 B/s 5s"
    assert third == "1 n1 STAGING 2 KB of 2 KB 99 % - -"

    for rank, agent in enumerate(agents):
        await agent.report(f"run:{job}:{rank}:stage", "STAGED", bytes_done=2000, bytes_total=2000)
        await agent.report(f"run:{job}:{rank}:go", "RUNNING", running=True)
    *_, header, _, _, _ = await lines("show", job)
    assert header == "RANK NODE STATE BYTES"


async def test_logs__print_each_line_once_and_in_order_over_all_pages(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await user.running(2)
    own = await lines("logs", job.job)
    assert own[0] == "the job is created; mirroring 0 sources"
    monkeypatch.setattr("bdn.cli.jobs.LINES_AT_ONCE", 3)
    began = user.at()
    user.clock.now += 40
    for rank in range(2):
        await job.print(rank, 0, *((began + number // 4 * MILLI + number, f"line {number}") for number in range(20)))

    printed = await lines("logs", job.job)
    assert [line for line in printed if line.startswith("(")] == [
        f"(r{rank}) line {number}" for number in range(20) for rank in range(2)
    ]
    assert [line for line in printed if not line.startswith("(")] == own
    document = json.loads((await run("logs", job.job, "--json")).output)
    assert document["logs"] == await user.client.lines(job.job, direction="asc")


@pytest.mark.parametrize(("end", "code"), [("COMPLETED", 0), ("FAILED", 1), ("STOPPED", 1)])
async def test_logs_that_follow__have_late_lines_and_end_with_the_job(
    user: User, end: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.cli.jobs._FOLLOW_SECONDS", 0.02)
    said: list[str] = []
    echo = output._echo

    def noted(line: str, *, err: bool = False) -> None:
        said.append(line)
        echo(line, err=err)

    monkeypatch.setattr(output, "_echo", noted)
    job = await user.running(2)
    following = asyncio.create_task(run("logs", job.job, "--follow"))
    try:
        user.clock.now += 30
        await job.print(0, 0, (user.at(-1), "first"), (user.at(), "second"))
        await until(lambda: "(r0) second" in said)
        await job.print(1, 0, (user.at(-10), "late"))
        await until(lambda: "(r1) late" in said)
        assert not following.done()
    finally:  # the command must not outlive its mirror
        if end == "STOPPED":
            await user.client.ask("POST", f"{job.job}/stop", {})
        await job.end(code, "stop" if end == "STOPPED" else "go")
        done = await following

    assert done.exit_code == code
    *printed, last = done.stdout.splitlines()
    assert [line for line in printed if line.startswith("(")] == ["(r0) first", "(r0) second", "(r1) late"]
    assert len({*printed, last}) == len(printed) + 1
    assert last == (await user.client.log(job.job))[-1]
    assert done.stderr == f"training job {job.job} is {end}\n"


async def test_stop__says_whether_the_job_stops_or_had_ended(user: User) -> None:
    created = await user.created()
    assert await lines("stop", created) == [f"training job {created} is STOPPED"]
    assert await lines("stop", created) == [f"training job {created} had ended already: STOPPED"]

    job = await user.running(1)
    stopping = f"training job {job.job} is stopping; 'bdn jobs logs {job.job} --follow' ends when it has ended"
    assert await lines("stop", job.job) == [stopping]
    assert " RUNNING, stopping " in (await lines("ls"))[1]
    await job.end(143, "stop")
    assert await lines("stop", job.job) == [f"training job {job.job} had ended already: STOPPED"]
    assert (await run("stop", job.job, "-q")).output == f"{job.job}\n"
