"""Several replicas of a mirror share training jobs: each is prepared, placed and started once."""

from pathlib import Path
from typing import Any, Final

from tests.support.mirror.service import mirror_under_test
from tests.support.mirror.training_jobs import JobAgent, JobClient, spec

pytest_plugins = ("tests.support.mirror.fixtures",)

JOBS: Final = 6


async def test_jobs_of_two_replicas__run_one_at_a_time_on_each_slot_and_start_once(
    upstreams: None, postgres_url: str, tmp_path: Path
) -> None:
    shared: dict[str, Any] = {"database_url": postgres_url, "store": f"file://{tmp_path}/store"}
    async with mirror_under_test(tmp_path / "a", **shared) as a, mirror_under_test(tmp_path / "b", **shared) as b:
        agents = [[JobAgent(mirror, node) for mirror in (a, b)] for node in ("n1", "n2")]
        for one, _ in agents:
            await one.beat()
        clients = [await JobClient.of(mirror) for mirror in (a, b)]
        jobs = [await clients[number % 2].create(spec(nodes=1 + number % 2)) for number in range(JOBS)]
        started: list[str] = []
        turn = 0
        while any([await clients[0].status(job) != "COMPLETED" for job in jobs]):
            turn += 1
            for node in agents:
                here, there = node[turn % 2], node[(turn + 1) % 2]
                commands = await here.told()
                assert len({command.split(":")[1] for command in commands}) <= 1, commands
                for command in commands:
                    if command.endswith(":stage"):
                        await there.report(command, "STAGED")
                    else:
                        started.append(command)
                        await there.report(command, "ENDED", exit_code=0)
        ranks = {f"run:{job}:{rank}:go" for number, job in enumerate(jobs) for rank in range(1 + number % 2)}
        assert set(started) == ranks
        logs = [await clients[1].log(job) for job in jobs]
        assert [sum("staging on" in line for line in log) for log in logs] == [1] * JOBS
        assert [log[-1] for log in logs] == ["the job completed"] * JOBS
        assert len((await a.get("/mirror"))["items"]) == JOBS
