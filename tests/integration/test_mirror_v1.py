"""The routes of ``/v1`` that are not about a job's life, and ``/graphql/``."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bdn.core.manifest import PageEntry, read_page
from bdn.mirror.api.v1 import UNSUPPORTED
from bdn.mirror.db.secrets import new_key
from bdn.wire.cache_schema import pack
from tests.support.mirror.job import Job
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal
from tests.support.mirror.training_jobs import CPUS, JobAgent, add_ended_job, gpus

pytest_plugins = ("tests.support.mirror.fixtures",)
JOB = "j000000001"
TREES = {
    (name, rank): {f"{name}.bin": name.encode() * 10, "sub/x y.txt": b"%d" % rank}
    for name in ("checkpoint-1", "checkpoint-2")
    for rank in (0, 1)
}


@dataclass
class World:
    mirror: MirrorUnderTest
    organisation: Job
    research: Job
    vision: Job

    async def project(self, user: Job, name: str = "tune", path: str = "/v1/training_projects", **more: Any) -> Json:
        answer = await user.ask("POST", path, training_project={"name": name, **more})
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["training_project"])

    async def graphql(self, user: Job, query: str, **variables: Any) -> Json:
        answer = await user.ask("POST", "/graphql/", query=query, **({"variables": variables} if variables else {}))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


@pytest.fixture
async def world(database_options: dict[str, Any], tmp_path: Path) -> AsyncIterator[World]:
    guarded: Json = {"auth": "token", "token": "operator", "bearer": "operator", "secrets_key": new_key()}
    async with (
        mirror_under_test(tmp_path / "mirror", serve=True, **guarded, **database_options) as mirror,
        AsyncExitStack() as stack,
    ):
        jobs = []
        for team in (None, "research", "vision"):
            if team is not None:
                await mirror.http.post("/teams", json={"name": team})
            body = {"name": "n", "organisation": "default", "role": "controller", "team": team}
            token = (await mirror.http.post("/tokens", json=body)).json()["token"]
            jobs.append(Job(mirror, token))
            await stack.enter_async_context(jobs[-1].plane)
        yield World(mirror, *jobs)


async def teams_of(user: Job) -> dict[str, Json]:
    return {one["name"]: one for one in (await user.ask("GET", "/v1/teams")).json()["teams"]}


async def projects_of(user: Job) -> list[str]:
    return [one["id"] for one in (await user.ask("GET", "/v1/training_projects")).json()["training_projects"]]


# --- projects and teams ---


async def test_a_project__belongs_to_the_team_of_the_path_or_the_body_or_the_token_or_to_default(world: World) -> None:
    research = (await teams_of(world.organisation))["research"]["id"]
    for user, path, more, team in (
        (world.organisation, f"/v1/teams/{research}/training_projects", {"team_name": "Default"}, "research"),
        (world.organisation, "/v1/training_projects", {"team_name": "vision"}, "vision"),
        (world.organisation, "/v1/training_projects", {}, "Default"),
        (world.research, "/v1/training_projects", {}, "research"),
        (world.vision, "/v1/training_projects", {"team_name": "vision"}, "vision"),
    ):
        made = await world.project(user, path=path, **more)
        assert (made["team_name"], made["latest_job"]) == (team, None)
    for user, path, more in (
        (world.vision, f"/v1/teams/{research}/training_projects", {}),
        (world.vision, "/v1/training_projects", {"team_name": "research"}),
        (world.organisation, "/v1/training_projects", {"team_name": "nobody"}),
        (world.organisation, "/v1/teams/0000000000/training_projects", {}),
    ):
        answer = await user.ask("POST", path, training_project={"name": "tune", **more})
        assert refusal(answer) == (404, "NOT_FOUND")


async def test_a_project_of_a_name__is_made_once_and_another_teams_is_not_there(world: World) -> None:
    ours = await world.project(world.research, "a name \u00fc: 1/2")
    assert await world.project(world.research, "a name \u00fc: 1/2") == ours
    theirs = await world.project(world.vision, "a name \u00fc: 1/2")
    newest = await world.project(world.research)
    assert await projects_of(world.research) == [newest["id"], ours["id"]]
    assert set(await projects_of(world.organisation)) == {newest["id"], ours["id"], theirs["id"]}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/cache/summary")):
        for named in (theirs["id"], "0000000000", "tune"):  # a name is not an id
            answer = await world.research.ask(method, f"/v1/training_projects/{named}{path}")
            assert refusal(answer) == (404, "NOT_FOUND")
    answer = await world.research.ask("GET", f"/v1/training_projects/{ours['id']}")
    assert answer.json() == {"training_project": ours}
    answer = await world.research.ask("DELETE", f"/v1/training_projects/{ours['id']}")
    assert answer.json() == {"id": ours["id"], "deleted": True}
    assert await projects_of(world.research) == [newest["id"]]


@pytest.mark.parametrize("name", ["", " x", "x ", "a\nb", "\u202e", "x" * 129, None])
async def test_a_name_of_a_project__is_printable(world: World, name: str | None) -> None:
    answer = await world.organisation.ask("POST", "/v1/training_projects", training_project={"name": name})
    assert refusal(answer) == (422, "INVALID_REQUEST")


async def test_a_project__shows_its_newest_job_and_is_as_new(world: World) -> None:
    project = await world.project(world.research)
    newest = datetime(2099, 1, 4, tzinfo=UTC).timestamp()
    for number, (job, at) in enumerate((("j000000000", newest - 1), (JOB, newest)), start=1):
        await add_ended_job(world.mirror, project["id"], job, number=number, updated_at=at)
    (shown,) = (await world.research.ask("GET", "/v1/training_projects")).json()["training_projects"]
    assert (shown["latest_job"]["id"], shown["updated_at"]) == (JOB, "2099-01-04T00:00:00Z")
    assert (await world.project(world.research))["latest_job"]["id"] == JOB


async def test_teams__are_those_of_the_caller(world: World) -> None:
    found = await teams_of(world.organisation)
    assert {name: one["default"] for name, one in found.items()} == {
        "Default": True,
        "research": False,
        "vision": False,
    }
    assert (await teams_of(world.research)).keys() == {"research"}


# --- secrets ---


async def test_secrets__are_the_organisations_and_never_shown(world: World) -> None:
    team = (await teams_of(world.organisation))["research"]
    at = f"/v1/teams/{team['id']}/secrets"
    made = await world.organisation.ask("POST", "/v1/secrets", name="hf_token", value="hf_secret_value")
    again = await world.organisation.ask("POST", at, name="hf_token", value="hf_secret_value")
    assert again.json() == made.json() | {"team_name": "research"}
    await world.organisation.ask("POST", at, name="other", value="x")
    for path, name in (("/v1/secrets", "research"), (at, "research")):
        listed = await world.research.ask("GET", path)
        assert [(one["name"], one["team_name"]) for one in listed.json()["secrets"]] == [
            ("hf_token", name),
            ("other", name),
        ]
        assert "hf_secret_value" not in listed.text + made.text
    table = (await world.mirror.http.get("/secrets")).json()["items"]
    assert [one["name"] for one in table] == ["hf_token", "other"]
    for path in (at, "/v1/secrets"):
        assert refusal(await world.research.ask("POST", path, name="hf_token", value="y")) == (401, "UNAUTHENTICATED")
        assert refusal(await world.research.ask("DELETE", f"{path}/hf_token")) == (401, "UNAUTHENTICATED")
    for path, name in (("/v1/secrets", "hf_token"), (at, "other")):
        assert (await world.organisation.ask("DELETE", f"{path}/{name}")).json() == {"name": name}
        assert refusal(await world.organisation.ask("DELETE", f"{path}/{name}")) == (404, "NOT_FOUND")
    for value in ("", '{"half', "x" * 70_000):
        answer = await world.organisation.ask("POST", "/v1/secrets", name="x", value=value)
        assert refusal(answer)[0] in (413, 422), value[:10]


# --- a job's checkpoints and metrics ---


async def pushed(world: World) -> Json:
    """A project whose job pushed two checkpoints of two ranks."""
    project = await world.project(world.research)
    await add_ended_job(world.mirror, project["id"], JOB, request={"compute": {"node_count": 2}})
    for (name, rank), tree in TREES.items():
        uri = f"bt://{project['id']}@{JOB}/{name}" + (f"#rank-{rank}" if rank else "")
        await world.research.push(tree, uri, checkpoint_type="lora" if rank else "full", base_model="org/base")
    return project


async def test_checkpoints_of_a_job__are_one_for_each_name(world: World) -> None:
    project = await pushed(world)
    path = f"/v1/training_projects/{project['id']}/jobs/{JOB}/checkpoints"
    found = (await world.research.ask("GET", path)).json()
    assert found["training_job"]["id"] == JOB
    assert [(one["checkpoint_id"], one["checkpoint_type"], one["training_job_id"]) for one in found["checkpoints"]] == [
        ("checkpoint-1", "full", JOB),
        ("checkpoint-2", "full", JOB),
    ]
    sizes = [
        sum(len(file) for rank in (0, 1) for file in TREES[name, rank].values())
        for name in ("checkpoint-1", "checkpoint-2")
    ]
    assert [one["size_bytes"] for one in found["checkpoints"]] == sizes
    assert {one["sync_status"] for one in found["checkpoints"]} == {"COMPLETE"}
    await world.research.begin(f"bt://{project['id']}@{JOB}/checkpoint-2#rank-1")
    found = (await world.research.ask("GET", path)).json()
    assert [one["sync_status"] for one in found["checkpoints"]] == ["COMPLETE", "SYNCING"]


async def test_files_of_checkpoints__come_in_pages_and_each_address_answers_its_file(world: World) -> None:
    project = await pushed(world)
    path = f"/v1/training_projects/{project['id']}/jobs/{JOB}/checkpoint_files"
    files: list[Json] = []
    for size in (1, 3, 1000, 10**9):
        files.clear()
        token: int | None = 0
        while token is not None:
            answer = await world.research.ask("GET", f"{path}?page_size={size}&page_token={token}")
            assert answer.headers["cache-control"] == "no-store"
            page = answer.json()
            assert (page["total_count"], len(page["presigned_urls"]) <= size) == (8, True)
            files += page["presigned_urls"]
            token = page["next_page_token"]
        came = {(one["relative_file_name"], one["node_rank"]): one["size_bytes"] for one in files}
        assert len(files) == 8
        assert came == {
            (f"{name}/{file}", rank): len(content)
            for (name, rank), tree in TREES.items()
            for file, content in tree.items()
        }
    async with httpx2.AsyncClient(transport=world.mirror.http._transport) as anybody:
        for one in files:
            name, _, file = one["relative_file_name"].partition("/")
            assert one["url"].startswith("http://mirror/files/")
            assert (await anybody.get(one["url"])).content == TREES[name, one["node_rank"]][file]
    beyond = (await world.research.ask("GET", f"{path}?page_token=8")).json()
    assert (beyond["presigned_urls"], beyond["next_page_token"]) == ([], None)


async def test_a_file_that_goes_on_from_an_earlier_page__is_listed_there_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def going_on(content: bytes) -> list[PageEntry]:
        first, *rest = read_page(content)
        return [replace(first, path="begun on an earlier page", start=1), first, *rest]

    monkeypatch.setattr("bdn.mirror.serving.served_files.read_page", going_on)
    project = await pushed(world)
    answer = await world.research.ask("GET", f"/v1/training_projects/{project['id']}/jobs/{JOB}/checkpoint_files")
    names = [one["relative_file_name"] for one in answer.json()["presigned_urls"]]
    assert sorted(set(names)) == sorted(f"{name}/{file}" for name, rank in TREES if rank for file in TREES[name, rank])


async def test_addresses__begin_with_the_public_url(tmp_path: Path) -> None:
    async with mirror_under_test(tmp_path / "mirror", serve=True, public_url="https://bdn.example/at/") as mirror:
        job = Job(mirror)
        async with job.plane:
            world = World(mirror, job, job, job)
            project = await pushed(world)
            answer = await job.ask("GET", f"/v1/training_projects/{project['id']}/jobs/{JOB}/checkpoint_files")
    assert {one["url"].split("b3:")[0] for one in answer.json()["presigned_urls"]} == {"https://bdn.example/at/files/"}


async def test_what_is_about_a_job__is_not_found_without_it(world: World) -> None:
    project = await pushed(world)
    for user, project_id, job in ((world.research, project["id"], "j000000009"), (world.research, "0000000000", JOB)):
        for what in ("checkpoints", "checkpoint_files", "download", "metrics", "auth_codes"):
            answer = await user.ask("GET", f"/v1/training_projects/{project_id}/jobs/{job}/{what}")
            assert refusal(answer) == (404, "NOT_FOUND")


async def test_metrics__have_the_use_of_the_cache_within_the_window(world: World) -> None:
    project = await pushed(world)
    path = f"/v1/training_projects/{project['id']}/jobs/{JOB}/metrics"
    assert (await world.research.ask("GET", path)).json()["cache"] == {"usage_bytes": [], "utilization": []}
    volume = {"volume_id": "0" * 32}
    await world.research.ask("POST", "/caches", project=project["id"], cluster="c", **volume)
    sums = {"timestamp": "2025-01-01T00:00:00Z", "size_bytes": 250, "files": 1, "packed": pack([]), **volume}
    await world.mirror.http.patch(f"/caches/{project['id']}", json={"limit_bytes": 1000})
    put = await world.mirror.http.put(f"/caches/{project['id']}/c/summary", json=sums)
    assert put.status_code == 200, put.text
    at = 1_735_689_600_000
    for window, is_in in (
        ({}, True),
        ({"start_epoch_millis": at, "end_epoch_millis": at}, True),
        ({"start_epoch_millis": at + 1}, False),
        ({"end_epoch_millis": at - 1}, False),
    ):
        asked = await world.mirror.http.post(path, json=window, headers=world.research.headers)
        got = await world.mirror.http.get(path, params=window, headers=world.research.headers)
        assert asked.json() == got.json()
        cache = got.json()["cache"]
        assert [one["value"] for one in cache["usage_bytes"]] == [250] * is_in, window
        assert [one["value"] for one in cache["utilization"]] == [0.25] * is_in
        assert [one["node_id"] for one in got.json()["per_node_metrics"]] == ["r0", "r1"]


async def test_metrics__have_the_scratch_of_each_node_until_its_rank_ends(world: World) -> None:
    project = await world.project(world.research)
    at = 1_735_689_600_000
    used: Json = {"node": "n", "scratch_bytes": 250, "scratch_limit_bytes": 1000, "reported_at": at / 1000}
    ranks: list[Json] = [
        {"state": "RUNNING", **used},
        {"state": "ENDED", **used},
        {"state": "STAGED", "node": "n"},
    ]
    await add_ended_job(world.mirror, project["id"], JOB, request={"compute": {"node_count": 4}}, ranks=ranks)
    path = f"/v1/training_projects/{project['id']}/jobs/{JOB}/metrics"
    for window, times in (
        ({}, [at, at]),
        ({"start_epoch_millis": at, "end_epoch_millis": at}, [at, at]),
        ({"start_epoch_millis": at + 60_000}, [at + 60_000, None]),
        ({"end_epoch_millis": at - 1}, [None, None]),
    ):
        got = (await world.mirror.http.post(path, json=window, headers=world.research.headers)).json()
        assert got["ephemeral_storage"] == {"usage_bytes": [], "utilization": []}
        scratch = {one["node_id"]: one["metrics"]["ephemeral_storage"] for one in got["per_node_metrics"]}
        assert list(scratch) == ["r0", "r1", "r2", "r3"]
        for found_of, time in zip(scratch.values(), [*times, None, None], strict=True):
            for series, value in (("usage_bytes", 250), ("utilization", 0.25)):
                found = [(datetime.fromisoformat(one["timestamp"]), one["value"]) for one in found_of[series]]
                assert found == ([] if time is None else [(datetime.fromtimestamp(time / 1000, UTC), value)]), window


# --- errors ---


async def test_errors_of_v1__have_both_forms(world: World) -> None:
    nobody = {"Authorization": "Bearer nonsense"}
    for method, path, headers, body, status in (
        ("GET", "/v1/nothing", {}, None, 404),
        ("PUT", "/v1/teams", {}, None, 405),
        ("POST", "/v1/secrets", {}, {"name": "x"}, 422),
        ("GET", "/v1/teams", nobody, None, 401),
        ("POST", "/v1/secrets", nobody, {"name": "x"}, 401),  # whose body is not read
    ):
        answer = await world.mirror.http.request(method, path, headers=headers, json=body)
        document = answer.json()
        assert answer.status_code == status
        assert document.keys() == {"code", "message", "error"}
        assert (document["code"], document["message"]) == (document["error"]["code"], document["error"]["message"])
        assert answer.headers["content-length"] == str(len(answer.content))
    assert (await world.mirror.http.get("/nothing")).json().keys() == {"error"}


async def test_what_bdn_does_not_have__is_refused_with_a_way(world: World) -> None:
    for path, (methods, (what, remedy)) in UNSUPPORTED.items():
        for method in methods:
            place = path.replace("{path:path}", "a/b").replace("{", "").replace("}", "")
            answer = await world.mirror.http.request(method, place, headers=world.research.headers, json={"x": 1})
            assert refusal(answer) == (400, "NOT_SUPPORTED"), (method, place)
            assert answer.json()["message"] == f"{what} is not supported here: {remedy}"
            refused = await world.mirror.http.request(method, place, headers={"Authorization": "Bearer nonsense"})
            assert refusal(refused) == (401, "UNAUTHENTICATED")
    assert (await world.research.ask("GET", "/v1/training/capacity")).json() == {
        "gpu_capacities": [],
        "team_gpu_capacities": [],
    }


# --- GraphQL ---


async def test_graphql__answers_its_fields_by_the_names_of_the_query(world: World) -> None:
    found = await world.graphql(world.research, "query { mine: teams { n: name default } organization { id } }")
    assert found == {"data": {"mine": [{"n": "research", "default": False}], "organization": {"id": "default"}}}
    for query in (
        "{ models { id } }",
        "{ organization { aws_external_id } }",
        "{ teams { id secrets } }",
        "subscription { teams }",
    ):
        found = await world.graphql(world.research, query)
        assert (found["data"], found["errors"][0]["extensions"]) == (None, {"code": "NOT_SUPPORTED"}), query


async def test_listed_instances__are_what_live_agents_have(world: World) -> None:
    query = "{ listed_instances { id gpu_type gpu_count node_count millicpu_limit memory_limit } }"
    (only,) = (await world.graphql(world.research, query))["data"]["listed_instances"]
    assert (only["id"], only["gpu_type"], only["gpu_count"], only["node_count"]) == ("CPU:1", None, 0, 1)
    for node, capacity in (("a", gpus(8) | {"cpus": 64, "memory_bytes": 512 * 1024**3}), ("b", CPUS)):
        await JobAgent(world.mirror, node, capacity).beat()
    found = (await world.graphql(world.research, query))["data"]["listed_instances"]
    assert [(one["id"], one["millicpu_limit"], one["memory_limit"]) for one in found] == [
        ("CPU:64", 64_000, 512 * 1024),
        ("H200:8", 64_000, 512 * 1024),
    ]


MUTATION = """mutation ($request: CreateModelVersionFromInferenceTemplateRequest!) {
    create_model_version_from_inference_template(request: $request) { model_version { id } truss_config } }"""


async def test_a_model__is_configured_in_a_dry_run_and_never_served(world: World) -> None:
    await pushed(world)

    async def asked(user: Job = world.research, name: str = "checkpoint-2", **changes: Any) -> Json:
        named = {"training_job_id": JOB, "checkpoint_name": name}
        request = {
            "metadata": {"oracle_name": "m"},
            "weights_sources": [{"b10_training_checkpoint_weights_source": {"checkpoint": named}}],
            "inference_stack": {"environment_variables": [{"name": "T", "value": "s", "is_secret_reference": True}]},
            "instance_type_id": "CPU:1",
            "dry_run": True,
        }
        return await world.graphql(user, MUTATION, request=request | changes)

    made = (await asked())["data"]["create_model_version_from_inference_template"]
    assert made["model_version"] is None
    assert '"paths": ["rank-0/checkpoint-2/"]' in made["truss_config"]
    for code, refused in (
        ("NOT_FOUND", await asked(name="checkpoint-3")),
        ("NOT_FOUND", await asked(world.vision)),
        ("NOT_FOUND", await asked(instance_type_id="H100:1")),
        ("NOT_SUPPORTED", await asked(dry_run=False)),
        ("NOT_SUPPORTED", await asked(weights_sources=[{"b10_loops_checkpoint_weights_source": {}}])),
        ("INVALID_REQUEST", await world.graphql(world.research, MUTATION)),
    ):
        assert refused["errors"][0]["extensions"] == {"code": code}
    served = (await asked(dry_run=False))["errors"][0]["message"]
    assert f"bt://tune@{JOB}/checkpoint-2" in served
    assert "bdn pull" in served
