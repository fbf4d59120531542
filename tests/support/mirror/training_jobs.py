"""Training jobs against a mirror: a client that creates and reads them, and agents that report what a test tells them to."""

import asyncio
from typing import Any, Final

import httpx2

from bdn.mirror.db import projects, training
from bdn.mirror.db.tables import TrainingJobRow
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import LONGEST_SECONDS, Json, MirrorUnderTest

CPUS: Final[Json] = {"gpu_type": None, "gpus": 0, "cpus": 8, "memory_bytes": 2**34, "slots": 1, "launcher": "bwrap"}
TERMINAL: Final = {"COMPLETED", "FAILED", "DEPLOY_FAILED", "STOPPED"}


def gpus(count: int, kind: str = "H200") -> Json:
    return {**CPUS, "gpu_type": kind, "gpus": count}


def spec(*weights: Json, nodes: int = 1, **fields: Any) -> Json:
    """A request; ``fields`` replace its parts."""
    compute: Json = {"node_count": nodes, "cpu_count": 1, "memory": "2Gi", "accelerator": None}
    runtime: Json = {"start_commands": ["python train.py"], "environment_variables": {}}
    return {"compute": compute, "runtime": runtime, "weights": list(weights), "name": None, **fields}


def runtime(**fields: Any) -> Json:
    return {"start_commands": ["python train.py"], **fields}


def accelerated(kind: str, count: int, nodes: int = 1) -> Json:
    return {"node_count": nodes, "accelerator": {"accelerator": kind, "count": count}}


def job_row(job: str, project: str, number: int, status: str, at: float, **fields: Any) -> TrainingJobRow:
    given: dict[str, Any] = dict.fromkeys(("since", "created_at", "updated_at"), at)
    given |= {"name": f"job-{number}", "priority": 0, "availability_model": "dedicated"}
    given |= {"extras": [], "ranks": [], "request": {}, **fields}
    return TrainingJobRow(id=job, organisation="default", project=project, number=number, status=status, **given)


async def add_ended_job(mirror: MirrorUnderTest, project: str, job: str, *, number: int = 1, **fields: Any) -> None:
    """Record a job that has ended; ``fields`` are columns of its row."""
    database = mirror.service.requests.database
    async with database.write() as session:
        await training.insert_job(session, job_row(job, project, number, "COMPLETED", database.now(), **fields))


class JobClient:
    """Of one project."""

    def __init__(self, mirror: MirrorUnderTest, project: str, headers: dict[str, str] | None = None) -> None:
        self.mirror, self.project, self.headers = mirror, project, headers or {}

    @classmethod
    async def of(cls, mirror: MirrorUnderTest, name: str = "llama", team: str = "Default") -> "JobClient":
        """A client of the project, which is created if there is none."""
        database = mirror.service.requests.database
        async with database.write() as session:
            return cls(mirror, (await projects.project(session, "default", team, name, database.now())).id)

    async def ask(self, method: str, job: str = "", body: Json | None = None, **params: Any) -> httpx2.Response:
        """A call about a job, such as ``0123456789/stop``, or about all jobs."""
        path = f"/v1/training_projects/{self.project}/jobs" + (f"/{job}" if job else "")
        return await self.mirror.http.request(method, path, json=body, params=params, headers=self.headers)

    async def create(self, request: Json) -> str:
        answer = await self.ask("POST", body={"training_job": request})
        assert answer.status_code == 200, answer.text
        assert answer.json()["training_job"]["current_status"] == "TRAINING_JOB_CREATED"
        return str(answer.json()["training_job"]["id"])

    async def job(self, job: str) -> Json:
        answer = await self.ask("GET", job)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["training_job"])

    async def status(self, job: str) -> str:
        return str((await self.job(job))["current_status"]).removeprefix("TRAINING_JOB_")

    async def reached(self, job: str, *statuses: str) -> Json:
        """The job once it is in one of these states."""
        async with asyncio.timeout(LONGEST_SECONDS):
            while (status := await self.status(job)) not in statuses:
                assert status not in TERMINAL, await self.job(job)
                await asyncio.sleep(0.02)
        return await self.job(job)

    async def lines(self, job: str, **query: Any) -> list[Json]:
        answer = await self.ask("POST", f"{job}/logs", query)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["logs"])

    async def log(self, job: str) -> list[str]:
        """All messages, oldest first."""
        return [line["message"] for line in await self.lines(job, direction="asc")]


class JobAgent(FakeAgent):
    """An agent with the role ``job``. Its reports are about the ranks that it was commanded to start."""

    def __init__(self, mirror: MirrorUnderTest, node: str, capacity: Json = CPUS, **state: Any) -> None:
        super().__init__(mirror, node, roles=["node", "job"], capacity=capacity, **state)
        self.http = mirror.http
        self.running: dict[str, Json] = {}  # reports of commands that are being carried out, by their ids

    async def told(self, *reports: Json) -> list[str]:
        """The ids of the commands of the reply to a heartbeat with these reports, and those about what still runs."""
        ended = {report["id"] for report in reports}
        going = [report for name, report in self.running.items() if name not in ended]
        return [command["id"] for command in (await self.beat(reports=[*reports, *going]))["pending"]]

    async def commanded(self, want: str) -> str:
        """The id of the command ``want`` for one of its ranks, once the mirror gives it."""
        async with asyncio.timeout(LONGEST_SECONDS):
            while True:
                if found := [name for name in await self.told() if name.endswith(f":{want}")]:
                    return found[0]
                await asyncio.sleep(0.02)

    async def report(self, command: str, state: str, *, running: bool = False, **fields: Any) -> list[str]:
        """Answer a command, or say that it is being carried out. Returns the ids of the next commands."""
        _, run, rank, _ = command.split(":")
        body = {"run": run, "rank": int(rank), "state": state, **fields}
        report = {"id": command, "running": running, "run": body}
        if running:
            self.running[command] = report
            return await self.told()
        self.running.pop(command, None)
        return await self.told(report)

    async def spec(self, command: str, **changes: Any) -> httpx2.Response:
        _, run, rank, _ = command.split(":")
        params = {"node": self.state["node"], "boot_id": self.state["boot_id"], **changes}
        return await self.http.get(f"/runs/{run}/{rank}", params=params)

    async def print(self, command: str, seq: int, *lines: tuple[int, str]) -> None:
        _, run, rank, _ = command.split(":")
        answer = await self.http.post(f"/runs/{run}/{rank}/logs", json={"seq": seq, "lines": lines})
        assert answer.status_code == 204, answer.text
