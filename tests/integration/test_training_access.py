"""What tokens see of training jobs: a team its own, another organisation nothing, an agent the runs of its cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx2

from bdn.mirror.db import projects
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal
from tests.support.mirror.training_jobs import CPUS, JobAgent, spec

pytest_plugins = ("tests.support.mirror.fixtures",)

OPERATOR: Final = "the-operators"


async def token(mirror: MirrorUnderTest, role: str, **fields: str) -> dict[str, str]:
    body: Json = {"name": "n", "organisation": "acme", "role": role, **fields}
    made = await mirror.http.post("/tokens", json=body)
    assert made.status_code == 201, made.text
    return {"Authorization": f"Bearer {made.json()['token']}"}


@asynccontextmanager
async def with_a_project(folder: Path) -> AsyncIterator[tuple[MirrorUnderTest, str, list[dict[str, str]]]]:
    """A mirror, the id of a project of team research, and callers: of the team, of another, of the organisation, of another."""
    async with mirror_under_test(folder, auth="token", token=OPERATOR, bearer=OPERATOR, work=False) as mirror:
        database = mirror.service.requests.database
        for team in ("research", "other"):
            await mirror.http.post("/teams", json={"name": team}, headers={"BDN-Organisation": "acme"})
        async with database.write() as session:
            project = (await projects.project(session, "acme", "research", "llama", database.now())).id
        scopes: tuple[dict[str, str], ...] = ({"team": "research"}, {"team": "other"}, {}, {"organisation": "rival"})
        yield mirror, project, [await token(mirror, "controller", **scope) for scope in scopes]


async def test_the_stages_of_a_job__are_seen_by_those_who_see_the_job_and_for_its_own_mirror_alone(
    upstreams: None, tmp_path: Path
) -> None:
    """A caller without a team creates a job in a team's project, so its mirror is the organisation's, not the team's."""
    async with with_a_project(tmp_path / "mirror") as (mirror, project, (research, other, whole, rival)):
        agent = JobAgent(mirror, "n1")
        await agent.beat()
        path = f"/v1/training_projects/{project}/jobs"
        created = await mirror.http.post(path, headers=whole, json={"training_job": spec()})
        job = created.json()["training_job"]["id"]
        for _ in range(2):
            await mirror.service.controller.look()
        own = (await mirror.http.get(f"{path}/{job}", headers=whole)).json()["training_job"]["bdn"]["mirror_id"]
        stages = [
            {
                "id": f"stg_{number}",
                "job": job,
                "mirror_id": mirror_id,
                "manifests": [],
                "state": "READY",
                "bytes_done": 0,
            }
            | {"bytes_total": 0, "bytes_per_second": None, "since": 0, "error": None}
            for number, mirror_id in enumerate((own, f"mir_{'0' * 24}"))  # another's, under the job's name
        ]
        await agent.beat(stages=stages)
        for caller, expected in ((research, 1), (whole, 1), (other, 0), (rival, 0)):
            answer = await mirror.http.get("/stages", params={"job": job}, headers=caller)
            assert [one["id"] for one in answer.json()["items"]] == ["stg_0"] * expected


async def test_a_job__is_its_teams_its_organisations_and_its_clusters(upstreams: None, tmp_path: Path) -> None:
    async with with_a_project(tmp_path / "mirror") as (mirror, project, (research, other, whole, rival)):
        here, there = [await token(mirror, "agent", cluster=cluster) for cluster in ("c", "d")]

        async def ask(who: dict[str, str], method: str, path: str, **given: Any) -> httpx2.Response:
            return await mirror.http.request(method, path, headers=who, **given)

        heartbeat = {"node": "n1", "cluster": "c", "boot_id": "b", "roles": ["job"], "version": "1", "advertise": None}
        beat = await ask(
            here, "POST", "/agents/heartbeat", json={**heartbeat, "tiers": {}, "holdings": None, "capacity": CPUS}
        )
        assert beat.status_code == 200, beat.text
        jobs = f"/v1/training_projects/{project}/jobs"
        created = await ask(research, "POST", jobs, json={"training_job": spec()})
        assert created.status_code == 200, created.text
        job = created.json()["training_job"]["id"]
        for _ in range(2):
            await mirror.service.controller.look()

        calls: list[tuple[str, str, Json | None]] = [
            ("GET", jobs, None),
            ("POST", jobs, {"training_job": spec()}),
            ("GET", f"{jobs}/{job}", None),
            ("PATCH", f"{jobs}/{job}", {"priority": 1}),
            ("POST", f"{jobs}/{job}/logs", {}),
            ("GET", f"{jobs}/{job}/logs", None),
            ("POST", f"{jobs}/{job}/recreate", None),
            ("POST", f"{jobs}/{job}/stop", None),
            ("DELETE", f"{jobs}/{job}", None),
        ]
        for stranger in (other, rival):
            for method, path, body in calls:
                assert refusal(await ask(stranger, method, path, json=body)) == (404, "NOT_FOUND"), (method, path)
            found = await ask(stranger, "POST", "/v1/training_jobs/search", json={"job_id": job})
            assert found.json() == {"training_jobs": []}
        for owner in (research, whole):
            document = (await ask(owner, "GET", f"{jobs}/{job}")).json()["training_job"]
            assert document["current_status"] == "TRAINING_JOB_DEPLOYING"

        where = {"node": "n1", "boot_id": "b"}
        assert (await ask(here, "GET", f"/runs/{job}/0", params=where)).status_code == 200
        assert refusal(await ask(there, "GET", f"/runs/{job}/0", params=where)) == (404, "NOT_FOUND")
        lines = {"seq": 0, "lines": [[1, "x"]]}
        assert refusal(await ask(there, "POST", f"/runs/{job}/0/logs", json=lines)) == (404, "NOT_FOUND")
        assert (await ask(here, "POST", f"/runs/{job}/0/logs", json=lines)).status_code == 204
