"""Training jobs from their creation to their end: states, the barrier, stops and failures, as clients and agents see them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import jwt
import pytest

from bdn.mirror.db.secrets import new_key
from tests.doubles.hub import Hub
from tests.fakes.clock import Clock
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal, source, statements_of
from tests.support.mirror.training_jobs import JobAgent, JobClient, accelerated, gpus, runtime, spec

pytest_plugins = ("tests.support.mirror.fixtures",)

ERROR: Final = {"code": "CACHE_TOO_SMALL", "message": "can never fit", "retryable": False}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def timed(clock: Clock, upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    """A mirror that lives by the clock, and whose controller looks when the test says so. It mirrors nothing."""
    async with mirror_under_test(tmp_path / "mirror", clock=clock, work=False, secrets_key=new_key()) as mirror:
        yield mirror


async def looked(mirror: MirrorUnderTest, times: int = 2) -> None:
    """Prepare what was created, then place it."""
    for _ in range(times):
        await mirror.service.controller.look()


async def running(mirror: MirrorUnderTest, client: JobClient, *agents: JobAgent) -> tuple[str, list[str]]:
    """A job with a rank on each of these agents, whose commands run; and the ids of the commands that say so."""
    for agent in agents:
        await agent.beat()
    job = await client.create(spec(nodes=len(agents)))
    await looked(mirror)
    for rank, agent in enumerate(agents):
        await agent.report(f"run:{job}:{rank}:stage", "STAGED")
    assert await client.status(job) == "RUNNING"
    going = [f"run:{job}:{rank}:go" for rank in range(len(agents))]
    for agent, go in zip(agents, going, strict=True):
        await agent.report(go, "RUNNING", running=True)
    return job, going


async def test_a_job__is_mirrored_staged_started_and_completed(mirror: MirrorUnderTest, hub: Hub) -> None:
    hub.repo("org/model").commit({"a.txt": b"12345"})
    agent, client = JobAgent(mirror, "n1"), await JobClient.of(mirror)
    await agent.beat()
    job = await client.create(spec(source("hf://org/model")))
    stage = await agent.commanded("stage")
    assert stage == f"run:{job}:0:stage"
    given = (await agent.spec(stage)).json()
    assert (given["commands"], given["working_dir"]) == (["python train.py"], "/b10/workspace")
    assert given["environment"]["BT_LEADER_ADDR"] == "n1"
    read = jwt.decode(given["read_grant"], options={"verify_signature": False})
    assert read["mirror"] == (await client.job(job))["bdn"]["mirror_id"]  # by which the stage is shown to its owner
    assert (given["caches"], given["cache_grant"], given["checkpoints"]) == (None, None, None)  # it requested none
    assert await agent.report(stage, "STAGING", running=True, bytes_done=2, bytes_total=5) == []
    document = await client.job(job)
    assert document["current_status"] == "TRAINING_JOB_DEPLOYING"
    (rank,) = document["bdn"]["ranks"]
    assert (rank["node"], rank["state"], rank["bytes_done"]) == ("n1", "STAGING", 2)
    assert (document["bdn"]["slowest_rank"], document["bdn"]["cluster"]) == (0, "c")
    (go,) = await agent.report(stage, "STAGED", bytes_done=5, bytes_total=5)
    assert go == f"run:{job}:0:go"
    assert await client.status(job) == "RUNNING"
    await agent.report(go, "RUNNING", running=True)
    assert await agent.report(go, "ENDED", exit_code=0) == []
    assert await client.status(job) == "COMPLETED"
    log = await client.log(job)
    assert (log[0], log[-1]) == ("the job is created; mirroring 1 source", "the job completed")
    assert (await agent.spec(stage)).status_code == 404

    lost = await client.create(spec(source("hf://org/none")))
    document = await client.reached(lost, "DEPLOY_FAILED")
    assert document["error_message"].endswith("[AUTH_REQUIRED]")  # the mirror's words
    assert (await client.log(lost))[-1] == f"the job failed: {document['error_message']}"


async def test_a_job__is_advanced_by_what_happens_and_not_by_polling(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.training.controller.POLL_SECONDS", 3600.0)
    hub.repo("org/model").commit({"a.txt": b"12345"})
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        agent, client = JobAgent(mirror, "n1"), await JobClient.of(mirror)
        await agent.beat()
        for weights in ([source("hf://org/model")], []):
            job = await client.create(spec(*weights))
            (go,) = await agent.report(await agent.commanded("stage"), "STAGED")
            await agent.report(go, "ENDED", exit_code=0)
            assert await client.status(job) == "COMPLETED"


async def test_no_command__starts_before_the_last_rank_is_staged(timed: MirrorUnderTest) -> None:
    one, two = JobAgent(timed, "n1"), JobAgent(timed, "n2")
    await one.beat()
    await two.beat()
    client = await JobClient.of(timed)
    job = await client.create(spec(nodes=2))
    await looked(timed)
    assert (await one.told(), await two.told()) == ([f"run:{job}:0:stage"], [f"run:{job}:1:stage"])
    assert await one.report(f"run:{job}:0:stage", "STAGED") == []
    assert await two.report(f"run:{job}:1:stage", "STAGING", running=True, bytes_done=1, bytes_total=9) == []
    document = await client.job(job)
    assert (document["current_status"], document["bdn"]["slowest_rank"]) == ("TRAINING_JOB_DEPLOYING", 1)
    epoch = (await one.beat())["epoch"]
    held = asyncio.create_task(one.beat(epoch=epoch, wait_seconds=30))
    assert await two.report(f"run:{job}:1:stage", "STAGED") == [f"run:{job}:1:go"]
    assert [command["id"] for command in (await asyncio.wait_for(held, 60))["pending"]] == [f"run:{job}:0:go"]
    assert await one.told() == [f"run:{job}:0:go"]  # repeated until it is reported
    assert await one.report(f"run:{job}:0:go", "RUNNING", running=True) == []


async def test_scratch__that_ranks_report__is_kept_and_written_every_ten_seconds(
    timed: MirrorUnderTest, clock: Clock
) -> None:
    agent, client = JobAgent(timed, "n1"), await JobClient.of(timed)
    job, (go,) = await running(timed, client, agent)

    async def shown() -> list[tuple[float, float]]:
        found = (await client.ask("POST", f"{job}/metrics", {})).json()["per_node_metrics"][0]["metrics"]
        series = found["ephemeral_storage"]
        pairs = zip(series["usage_bytes"], series["utilization"], strict=True)
        return [(usage["value"], share["value"]) for usage, share in pairs]

    assert await shown() == []
    for seconds, used, expected in ((10, 100, 100), (5, 200, 100), (5, 300, 300), (60, None, 300)):
        clock.now += seconds
        await agent.report(go, "RUNNING", running=True, scratch_bytes=used, scratch_limit_bytes=used and 1000)
        assert await shown() == [(expected, expected / 1000)]
    await agent.report(go, "ENDED", exit_code=0, scratch_bytes=400, scratch_limit_bytes=1000)
    assert await shown() == [(400, 0.4)]


async def test_a_stop__ends_a_job_in_each_state(timed: MirrorUnderTest) -> None:
    agent, client = JobAgent(timed, "n1"), await JobClient.of(timed)
    await agent.beat()

    async def stopped(job: str) -> tuple[str, bool]:
        answer = await client.ask("POST", f"{job}/stop", {})
        assert answer.status_code == 200, answer.text
        document = answer.json()["training_job"]
        return document["current_status"], document["bdn"]["stopping"]

    created = await client.create(spec())
    assert await stopped(created) == ("TRAINING_JOB_STOPPED", False)
    await looked(timed)
    assert await client.status(created) == "STOPPED"

    deploying = await client.create(spec())
    await looked(timed)
    pending = await client.create(spec())
    await looked(timed)
    assert await client.status(pending) == "PENDING"
    assert await stopped(pending) == ("TRAINING_JOB_STOPPED", False)

    assert await stopped(deploying) == ("TRAINING_JOB_DEPLOYING", True)
    assert await stopped(deploying) == ("TRAINING_JOB_DEPLOYING", True)  # idempotent
    assert await agent.told() == [f"run:{deploying}:0:stop"]
    await agent.report(f"run:{deploying}:0:stop", "ENDED", exit_code=143)
    assert await client.status(deploying) == "STOPPED"

    job, (go,) = await running(timed, client, agent)
    assert await stopped(job) == ("TRAINING_JOB_RUNNING", True)
    assert await agent.told() == [f"run:{job}:0:stop"]
    assert await agent.report(go, "ENDED", exit_code=143) == []
    document = await client.job(job)
    assert (document["current_status"], document["error_message"]) == ("TRAINING_JOB_STOPPED", None)
    assert await stopped(job) == ("TRAINING_JOB_STOPPED", False)


async def test_a_failed_rank__ends_the_others_and_gives_the_reason(timed: MirrorUnderTest) -> None:
    one, two = JobAgent(timed, "n1"), JobAgent(timed, "n2")
    client = await JobClient.of(timed)
    job, (first, second) = await running(timed, client, one, two)
    await two.report(second, "ENDED", exit_code=3)
    document = await client.job(job)
    assert document["current_status"] == "TRAINING_JOB_RUNNING"
    assert document["error_message"].endswith("[COMMAND_FAILED]")
    assert await one.told() == [f"run:{job}:0:stop"]
    await one.report(first, "ENDED", exit_code=143)
    document = await client.job(job)
    assert document["current_status"] == "TRAINING_JOB_FAILED"
    assert "rank 1 on node n2 ended with exit code 3" in document["error_message"]
    assert [rank["exit_code"] for rank in document["bdn"]["ranks"]] == [143, 3]

    staging = await client.create(spec())
    await looked(timed)
    await one.report(f"run:{staging}:0:stage", "STAGING", running=True, error=ERROR)  # it retries
    assert await client.status(staging) == "DEPLOYING"
    await one.report(f"run:{staging}:0:stage", "ENDED", error=ERROR)
    document = await client.job(staging)
    assert document["current_status"] == "TRAINING_JOB_DEPLOY_FAILED"
    assert document["error_message"] == "rank 0 on node n1: can never fit [CACHE_TOO_SMALL]"

    refused = await client.create(spec())
    await looked(timed)
    await one.told({"id": f"run:{refused}:0:stage", "error": ERROR})  # an agent that knows no runs
    assert await client.status(refused) == "DEPLOY_FAILED"


async def test_a_silent_node__is_lost_after_a_minute_and_told_to_stop_when_it_is_back(
    timed: MirrorUnderTest, clock: Clock
) -> None:
    one, two = JobAgent(timed, "n1"), JobAgent(timed, "n2")
    client = await JobClient.of(timed)
    job, (_, second) = await running(timed, client, one, two)
    clock.now += 300  # the mirror was away: nobody is judged
    await looked(timed)
    for seconds in (10, 10, 10, 10, 10, 9):
        clock.now += seconds
        await one.told()
        await looked(timed, 1)
    assert await client.status(job) == "RUNNING"
    assert (await client.job(job))["error_message"] is None
    clock.now += 1
    await looked(timed, 1)
    document = await client.job(job)
    assert document["error_message"].endswith("[NODE_LOST]")
    assert [rank["state"] for rank in document["bdn"]["ranks"]] == ["RUNNING", "LOST"]
    (stop,) = await one.told()
    await one.report(stop, "ENDED", exit_code=143)
    assert await client.status(job) == "FAILED"
    assert await two.told() == [f"run:{job}:1:stop"]
    two.running[f"run:{job}:1:stop"] = {**two.running[second], "id": f"run:{job}:1:stop"}
    assert await two.told() == []
    await two.report(second, "ENDED", exit_code=0)  # too late to change anything
    assert (await client.job(job))["bdn"]["ranks"][1]["state"] == "LOST"


async def test_a_node_that_restarted_while_others_stage__is_lost(timed: MirrorUnderTest, clock: Clock) -> None:
    one, two = JobAgent(timed, "n1"), JobAgent(timed, "n2")
    await one.beat()
    await two.beat()
    client = await JobClient.of(timed)
    job = await client.create(spec(nodes=2))
    await looked(timed)
    await one.report(f"run:{job}:0:stage", "STAGED")
    for _ in range(5):
        clock.now += 14
        await one.told()
        await two.told()
        await looked(timed, 1)
    assert await client.status(job) == "DEPLOYING"
    one.state["boot_id"] = "after a restart"
    await one.told()
    await looked(timed, 1)
    document = await client.job(job)
    assert document["error_message"].endswith("[NODE_LOST]")
    assert [rank["state"] for rank in document["bdn"]["ranks"]] == ["LOST", "STAGING"]


async def test_looks_that_take_long__do_not_delay_the_loss_of_a_node(
    timed: MirrorUnderTest, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, client = JobAgent(timed, "n1"), await JobClient.of(timed)
    job, _ = await running(timed, client, agent)

    async def upkeep(*_: object) -> None:
        clock.now += 20

    monkeypatch.setattr("bdn.mirror.training.controller.Controller._upkeep", upkeep)
    monkeypatch.setattr("bdn.mirror.training.controller._UPKEEP_SECONDS", 0.0)
    await looked(timed, 6)
    assert (await client.job(job))["error_message"].endswith("[NODE_LOST]")


async def test_placing_a_job__does_not_lock_those_that_go_on_waiting(timed: MirrorUnderTest, clock: Clock) -> None:
    agent, client = JobAgent(timed, "n1"), await JobClient.of(timed)
    await agent.beat()
    for _ in range(3):
        await client.create(spec())
    await looked(timed)
    clock.now += 1
    job = await client.create(spec())
    await looked(timed, 1)
    with statements_of(timed) as seen:
        await looked(timed, 1)
    assert await client.status(job) == "PENDING"
    assert len([one for one in seen if "ranks" in one and one.endswith("WHERE training_jobs.id = ?")]) == 1


async def test_what_takes_too_long__fails(timed: MirrorUnderTest, clock: Clock) -> None:
    agent, client = JobAgent(timed, "n1"), await JobClient.of(timed)

    async def later(seconds: float) -> None:
        while seconds > 0:
            clock.now += min(14.0, seconds)
            seconds -= 14.0
            await agent.told()
        await looked(timed, 1)

    job, (go,) = await running(timed, client, agent)
    await agent.report(go, "RUNNING", running=True, exit_code=0, sync_status="SYNCING")
    await later(3599)
    assert await client.status(job) == "RUNNING"
    await later(1)
    document = await client.job(job)
    assert document["current_status"] == "TRAINING_JOB_FAILED"
    assert document["error_message"].endswith("[CHECKPOINT_SYNC_FAILED]")
    agent.running.clear()

    staging = await client.create(spec())
    await looked(timed)
    await later(3600)
    document = await client.job(staging)
    assert document["error_message"].endswith("[STAGE_TIMEOUT]")
    assert await agent.told() == [f"run:{staging}:0:stop"]


async def test_jobs_wait_for_nodes__by_priority_then_age(timed: MirrorUnderTest, clock: Clock) -> None:
    agent, client = JobAgent(timed, "n1", gpus(8)), await JobClient.of(timed)
    await agent.beat()
    first = await client.create(spec(compute=accelerated("H200", 8)))
    await looked(timed)
    waiting: list[str] = []
    for priority in (0, 5, 5):
        clock.now += 1
        waiting.append(await client.create(spec(compute=accelerated("H200", 8), priority=priority)))
    await looked(timed)
    document = await client.job(waiting[0])
    assert document["current_status"] == "TRAINING_JOB_PENDING"
    assert document["error_message"] == document["bdn"]["waiting_for"]
    assert "needs 1 node with H200:8 free in cluster c" in document["error_message"]
    assert document["bdn"]["mirror_id"]

    other = await client.ask("PATCH", first, {"priority": 9})
    assert refusal(other) == (409, "IN_USE")
    changed = await client.ask("PATCH", waiting[2], {"priority": 6, "availability_model": "spot"})
    assert changed.status_code == 200, changed.text
    document = changed.json()["training_job"]
    assert (document["priority"], document["availability_model"]) == (6, "spot")

    order: list[str] = []
    deploying = first
    for _ in waiting:
        await agent.report(f"run:{deploying}:0:stage", "ENDED", error=ERROR)
        await looked(timed, 1)
        (deploying,) = [job for job in waiting if await client.status(job) == "DEPLOYING"]
        order.append(deploying)
    assert order == [waiting[2], waiting[1], waiting[0]]


async def test_a_waiting_job__is_not_overtaken_on_its_nodes(timed: MirrorUnderTest, clock: Clock) -> None:
    one, two = JobAgent(timed, "n1", gpus(8)), JobAgent(timed, "n2", gpus(8))
    client = await JobClient.of(timed)
    await one.beat()
    await two.beat()
    jobs: list[str] = []
    for compute in (
        accelerated("H200", 8),
        accelerated("H200", 8, nodes=2),
        accelerated("H200", 1),
        {"node_count": 1},  # needs none of these GPUs
    ):
        clock.now += 1
        jobs.append(await client.create(spec(compute=compute)))
    await looked(timed)
    assert [await client.status(job) for job in jobs] == ["DEPLOYING", "PENDING", "PENDING", "DEPLOYING"]


OIDC: Final = {"auth_method": "AWS_OIDC", "aws_oidc_role_arn": "arn:aws:iam::1:role/r", "aws_oidc_region": "us-east-1"}
REFUSED: Final[list[tuple[Json, int, str]]] = [
    ({"weights": [source("azure://a/b")]}, 422, "INVALID_SOURCE"),
    ({"weights": [source("hf://org/model", "/b10/x")]}, 422, "INVALID_MOUNT"),
    ({"weights": [source("hf://org/model", "/app:ro")]}, 422, "INVALID_MOUNT"),
    ({"image": {"base_image": "--privileged"}}, 422, "INVALID_REQUEST"),
    ({"weights": [source("s3://bucket", auth=OIDC)]}, 422, "INVALID_REQUEST"),  # this mirror is not an issuer
    ({"runtime": {"start_commands": [" "]}}, 422, "INVALID_REQUEST"),
    ({"runtime": runtime(environment_variables={"a-b": "x"})}, 422, "INVALID_REQUEST"),
    ({"runtime": runtime(artifacts=[{"s3_bucket": "b", "s3_key": "k"}] * 2)}, 422, "INVALID_REQUEST"),
    ({"compute": {"node_count": 0}}, 422, "INVALID_REQUEST"),
    ({"compute": {"node_count": 1001}}, 422, "INVALID_REQUEST"),
    ({"compute": {"memory": "much"}}, 422, "INVALID_REQUEST"),
    ({"image": {"docker_auth": {"auth_method": "GCP_OIDC"}}}, 400, "NOT_SUPPORTED"),
    ({"image": {"docker_auth": {"auth_method": "REGISTRY_SECRET"}}}, 422, "INVALID_REQUEST"),
    (
        {"runtime": runtime(load_checkpoint_config={"enabled": True, "checkpoints": [{"typ": "loops_checkpoint"}]})},
        400,
        "NOT_SUPPORTED",
    ),
    (
        {"runtime": runtime(load_checkpoint_config={"enabled": True, "checkpoints": [{"typ": "other"}]})},
        422,
        "INVALID_REQUEST",
    ),
]


async def test_a_request_that_is_wrong_in_itself__creates_no_job(timed: MirrorUnderTest) -> None:
    client = await JobClient.of(timed)
    for fields, status, code in REFUSED:
        answer = await client.ask("POST", body={"training_job": spec(**fields)})
        assert refusal(answer) == (status, code), (fields, answer.text)
    nowhere = await JobClient(timed, "0" * 10).ask("POST", body={"training_job": spec()})
    assert refusal(nowhere) == (404, "NOT_FOUND")
    assert timed.count("training_jobs") == 0


async def test_what_the_world_lacks__fails_the_job_before_anything_is_mirrored(
    timed: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BDN_SECRET_OPERATORS", "the operator's alone")
    agent, client = JobAgent(timed, "n1", gpus(4, "H100")), await JobClient.of(timed)
    await agent.beat()
    variables = {"A": {"name": "operators"}, "B": {"name": "other"}}
    wanted: list[tuple[Json, str, tuple[str, ...]]] = [
        ({"runtime": runtime(environment_variables=variables)}, "SECRET_NOT_FOUND", ("'operators'", "'other'")),
        ({"compute": accelerated("H200", 1)}, "NO_SUCH_CAPACITY", ("H200:1", "H100:4")),
        ({"compute": accelerated("H100", 8)}, "NO_SUCH_CAPACITY", ()),
        ({"compute": accelerated("H100", 4, nodes=2)}, "NO_SUCH_CAPACITY", ()),
        (
            {"runtime": runtime(load_checkpoint_config=loading({"typ": "baseten_latest_checkpoint", "job_id": "no"}))},
            "NOT_FOUND",
            ("no",),
        ),
    ]
    for fields, code, words in wanted:
        job = await client.create(spec(**fields))
        await looked(timed, 1)
        document = await client.job(job)
        assert document["current_status"] == "TRAINING_JOB_DEPLOY_FAILED", document
        assert document["error_message"].endswith(f"[{code}]")
        assert [word for word in words if word not in document["error_message"]] == []
    assert timed.count("mirrors") == 0


def loading(*checkpoints: Json) -> Json:
    return {"enabled": True, "checkpoints": list(checkpoints), "download_folder": None}


async def test_a_rank__gets_all_that_it_needs_and_no_other_agent_does(timed: MirrorUnderTest) -> None:
    one, two = JobAgent(timed, "n1"), JobAgent(timed, "n2")
    await one.beat()
    await two.beat()
    for name, value in (("token", "s3cr3t-value"), ("login", "user:pass-w0rd")):
        assert (await timed.http.put(f"/secrets/{name}", json={"value": value})).status_code == 200
    auth = {
        "auth_method": "REGISTRY_SECRET",
        "registry": "registry.example",
        "registry_secret_docker_auth": {"secret_ref": {"name": "login"}},
    }
    client = await JobClient.of(timed, "with spaces")
    job = await client.create(
        spec(
            nodes=2,
            name="mine",
            image={"base_image": "registry.example/x:1", "docker_auth": auth},
            runtime=runtime(
                environment_variables={"TOKEN": {"name": "token"}, "HF_HOME": "$BT_PROJECT_CACHE_DIR/huggingface"},
                checkpointing_config={"enabled": True, "volume_size_gib": 2},
                enable_cache=True,
            ),
        )
    )
    await looked(timed)
    commands = [f"run:{job}:{rank}:stage" for rank in range(2)]
    volume = "0" * 32
    given = (await two.spec(commands[1], volume_id=volume)).json()
    assert given["environment"]["TOKEN"] == "s3cr3t-value"
    assert given["environment"]["HF_HOME"] == "/root/.cache/user_artifacts/huggingface"
    names = ("BT_TRAINING_JOB_NAME", "BT_TRAINING_PROJECT_NAME", "BT_NODE_RANK", "BT_GROUP_SIZE", "BT_LEADER_ADDR")
    assert [given["environment"][name] for name in names] == ["mine", "with spaces", "1", "2", "n1"]
    assert (given["image"], given["cpus"], given["memory_bytes"]) == ("registry.example/x:1", 1, 2 * 1024**3)
    assert given["login"] == {"registry": "registry.example", "username": "user", "password": "pass-w0rd"}
    assert (given["checkpoints"], given["checkpoint_bytes"]) == ("/mnt/ckpts", 2 * 1024**3)
    assert given["caches"]["huggingface"] == "/root/.cache/huggingface"
    assert (given["read_grant"], given["archive"], given["loaded"]) == (None, None, None)
    assert given["push_grant"]
    assert given["cache_grant"]
    (event,) = [one for one in (await timed.get("/events"))["items"] if one["kind"] == "secrets_given"]
    assert event["sentence"] == f"gave the secrets login, token to rank 1 of job {job} on n2"
    for agent, command, changes in (
        (one, commands[1], {}),  # another rank's
        (two, commands[1], {"boot_id": "after a restart"}),
        (two, f"run:{'0' * 10}:1:stage", {}),
        (two, f"run:{job}:7:stage", {}),
    ):
        assert refusal(await agent.spec(command, volume_id=volume, **changes)) == (404, "NOT_FOUND")
    other = await one.spec(commands[0], volume_id="1" * 32)
    assert refusal(other) == (409, "CACHE_NOT_SHARED")
    everything = repr(timed.rows())
    assert "s3cr3t-value" not in everything
    assert "pass-w0rd" not in everything


async def test_a_job_with_a_cache__runs_where_the_cache_is_or_elsewhere_with_an_empty_one(
    timed: MirrorUnderTest,
) -> None:
    here, there = JobAgent(timed, "n1", gpus(8, "H100"), cluster="east"), JobAgent(timed, "n2", gpus(8), cluster="west")
    await here.beat()
    await there.beat()
    client, volume = await JobClient.of(timed), "0" * 32
    pin = await timed.http.post("/caches", json={"project": client.project, "cluster": "east", "volume_id": volume})
    assert pin.status_code == 201, pin.text

    def cached(kind: str, **config: bool) -> Json:
        return spec(compute=accelerated(kind, 8), runtime=runtime(cache_config={"enabled": True, **config}))

    at_home = await client.create(cached("H100"))
    refused = await client.create(cached("H200"))
    elsewhere = await client.create(cached("H200", require_cache_affinity=False))
    await looked(timed)
    assert (await client.job(at_home))["bdn"]["cluster"] == "east"
    document = await client.job(refused)
    assert document["current_status"] == "TRAINING_JOB_DEPLOY_FAILED"
    assert document["error_message"].endswith("[CACHE_AFFINITY]")
    assert (await client.job(elsewhere))["bdn"]["cluster"] == "west"
    given = await there.spec(f"run:{elsewhere}:0:stage", volume_id="1" * 32)
    assert given.status_code == 200, given.text
    (cache,) = (await timed.get("/caches"))["items"]
    assert cache["cluster"] == "east"  # the pin stays
    assert [one["cluster"] for one in cache["directories"]] == ["east", "west"]


async def test_unknown_fields__are_accepted_and_named_in_the_log(timed: MirrorUnderTest) -> None:
    client = await JobClient.of(timed)
    fields: Json = {"shiny": 1, "compute": {"node_count": 1, "shape": "x"}, "interactive_session": {"trigger": "x"}}
    job = await client.create(spec(**fields, runtime=runtime(environment_variables={"BT_X": "1"})))
    first, unknown, variables, session = await client.log(job)
    assert first == "the job is created; mirroring 0 sources"
    assert unknown.endswith("training_job.compute.shape, training_job.shiny")
    assert variables.endswith("BT_X")
    assert "interactive sessions are not supported" in session


async def test_jobs__are_listed_searched_repeated_and_deleted(
    timed: MirrorUnderTest, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await JobClient.of(timed)
    jobs: list[str] = []
    for name in (None, "named"):
        clock.now += 1
        jobs.append(await client.create(spec(name=name)))
    await client.ask("POST", f"{jobs[0]}/stop", {})

    async def search(**query: Any) -> list[str]:
        answer = await timed.http.post("/v1/training_jobs/search", json=query)
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()["training_jobs"]]

    elsewhere = await JobClient.of(timed, "mistral")
    clock.now += 1
    stranger = await elsewhere.create(spec())
    assert [one["id"] for one in (await elsewhere.ask("GET")).json()["training_jobs"]] == [stranger]
    assert await search(project_id=client.project) == jobs[::-1]
    await elsewhere.ask("POST", f"{stranger}/stop", {})
    assert (await elsewhere.ask("DELETE", stranger)).status_code == 200

    listed = (await client.ask("GET")).json()
    assert [(one["id"], one["name"]) for one in listed["training_jobs"]] == [(jobs[1], "named"), (jobs[0], "job-1")]
    assert listed["training_project"]["latest_job"]["id"] == jobs[1]
    by_created = [{"field": "created_at", "order": "asc"}]
    assert await search(statuses=None, project_id=None, job_id=None, order_by=by_created) == jobs
    assert await search(statuses=["TRAINING_JOB_CREATED", "TRAINING_JOB_QUEUED"]) == [jobs[1]]
    assert await search(job_id=jobs[0]) == [jobs[0]]
    assert await search(project_id="other") == []

    with monkeypatch.context() as patch:
        patch.setattr("bdn.mirror.db.training.JOBS_AT_ONCE", 1)
        assert [await search(), await search(order_by=by_created)] == [[jobs[1]]] * 2
        assert [one["id"] for one in (await client.ask("GET")).json()["training_jobs"]] == [jobs[1]]

    clock.now += 1
    again = (await client.ask("POST", f"{jobs[0]}/recreate", {})).json()["training_job"]
    assert (again["name"], again["current_status"]) == ("job-3", "TRAINING_JOB_CREATED")
    assert refusal(await client.ask("DELETE", jobs[1])) == (409, "IN_USE")
    deleted = await client.ask("DELETE", jobs[0])
    assert deleted.json() == {"id": jobs[0], "deleted": True, "training_project_id": client.project}
    assert refusal(await client.ask("GET", jobs[0])) == (404, "NOT_FOUND")
    assert (await search(), timed.count("training_logs")) == ([again["id"], jobs[1]], 2)

    in_use = await timed.http.delete(f"/projects/{client.project}")
    assert refusal(in_use) == (409, "IN_USE")
    assert f"training job {jobs[1]}, training job {again['id']}" in in_use.json()["error"]["message"]
    for job in (jobs[1], again["id"]):
        await client.ask("POST", f"{job}/stop", {})
    assert (await timed.http.delete(f"/projects/{client.project}")).status_code == 200
    assert (timed.count("training_jobs"), timed.count("training_logs")) == (0, 0)


async def test_a_prepared_job__is_resumed_by_another_worker_when_the_claim_expires(
    timed: MirrorUnderTest, clock: Clock
) -> None:
    agent, client = JobAgent(timed, "n1"), await JobClient.of(timed)
    await agent.beat()
    job = await client.create(spec())
    claim = "UPDATE training_jobs SET claimed_by = 'a dead worker', claim_expires_at = ?"
    timed.behind.query(claim, clock.now + 15)
    clock.now += 14
    await looked(timed)
    assert await client.status(job) == "CREATED"
    assert timed.count("mirrors") == 0
    clock.now += 2
    await agent.beat()
    await looked(timed)
    assert await client.status(job) == "DEPLOYING"
    assert timed.count("mirrors") == 1


async def test_a_stopped_job__cancels_its_mirror_only_if_no_other_job_can_have_it(timed: MirrorUnderTest) -> None:
    client = await JobClient.of(timed)
    agent = JobAgent(timed, "n1")
    await agent.beat()
    jobs = [await client.create(spec(source("hf://org/model"))) for _ in range(2)]
    await looked(timed, 1)
    mirrors = {(await client.job(job))["bdn"]["mirror_id"] for job in jobs}
    assert len(mirrors) == 1
    await client.ask("POST", f"{jobs[0]}/stop", {})
    assert (await timed.get(f"/mirror/{mirrors.pop()}"))["status"] == "PENDING"
    assert await client.status(jobs[1]) == "CREATED"
