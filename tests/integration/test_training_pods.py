"""Training jobs as pods of Kubernetes, whose API server, scheduler and pods a test moves."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.mirror.db.secrets import new_key
from tests.doubles.faults import answer, drop
from tests.doubles.hub import Hub
from tests.doubles.kubernetes_api import NAMESPACE, set_state
from tests.fakes.clock import Clock
from tests.support.mirror.pod_jobs import CLUSTER, IMAGE, PodJobs, pod_jobs
from tests.support.mirror.service import LONGEST_SECONDS, Json, refusal, source
from tests.support.mirror.training_jobs import JobAgent, accelerated, gpus, runtime, spec

pytest_plugins = ("tests.support.mirror.fixtures",)
SECRET: Final = "hunter2-" * 5


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def pods(upstreams: None, clock: Clock, tmp_path: Path) -> AsyncIterator[PodJobs]:
    """Two nodes. The controller looks when the test says so."""
    given: dict[str, Any] = {"clock": clock, "secrets_key": new_key(), "jobs": {"cache_claim": "training-caches"}}
    async with pod_jobs(tmp_path, "n1", "n2", **given) as world:
        yield world


async def over(pods: PodJobs, job: str) -> tuple[str, str | None]:
    """Status and reason, after the controller has looked."""
    await pods.looked(3)
    document = await pods.client.job(job)
    return document["current_status"].removeprefix("TRAINING_JOB_"), document["error_message"]


# --- from a request to the end ---


async def test_a_job_of_two_ranks__waits_for_nodes_starts_together_and_completes(pods: PodJobs) -> None:
    pods.api.nodes = ["n1"]
    job = await pods.placed(spec(nodes=2))
    await pods.looked(2)
    document = await pods.client.job(job)
    assert document["current_status"] == "TRAINING_JOB_PENDING"
    assert document["bdn"]["waiting_for"] == "waits for nodes: 0/1 nodes are available"
    assert document["bdn"]["ranks"] == []
    assert refusal(await pods.spec(job, node="n1")) == (404, "NOT_FOUND")  # before all pods are on nodes

    pods.api.nodes = ["n1", "n2"]
    pods.api.change("", lambda _: None)
    await pods.looked()
    document = await pods.client.job(job)
    assert [rank["node"] for rank in document["bdn"]["ranks"]] == ["n1", "n2"]
    assert document["current_status"] == "TRAINING_JOB_DEPLOYING"
    given = (await pods.spec(job, 1)).json()
    assert given["environment"]["BT_LEADER_ADDR"] == f"bdn-{job}-0.bdn-{job}"
    assert (given["environment"]["BT_NODE_RANK"], given["environment"]["BT_GROUP_SIZE"]) == ("1", "2")

    pods.api.runs(job, 0)
    await pods.looked(2)
    assert wants(pods, job) == ["stage", "stage"]
    pods.api.runs(job, 1)
    await pods.looked(2)
    assert wants(pods, job) == ["go", "go"]
    document = await pods.client.job(job)
    assert document["current_status"] == "TRAINING_JOB_RUNNING"
    assert [rank["state"] for rank in document["bdn"]["ranks"]] == ["STAGED", "STAGED"]
    await pods.looked()
    assert [rank["state"] for rank in (await pods.client.job(job))["bdn"]["ranks"]] == ["RUNNING", "RUNNING"]
    lines = {"seq": 0, "lines": [[1, "step 1"]]}
    assert (
        await pods.mirror.http.post(f"/runs/{job}/1/logs", json=lines, headers=pods.bearing(job, 1))
    ).status_code == 204

    pods.api.ends(job, 0)
    pods.api.ends(job, 1, sent=None)
    await pods.looked()
    assert await pods.client.status(job) == "RUNNING"  # its output and checkpoints are being sent
    pods.api.ends(job, 1)
    assert await over(pods, job) == ("COMPLETED", None)
    log = await pods.client.log(job)
    assert "step 1" in log
    assert f"mirrored; 2 pods in namespace {NAMESPACE} of cluster {CLUSTER}" in log


def wants(pods: PodJobs, job: str) -> list[str]:
    found = [pods.api.pod(job, rank) for rank in range(2)]
    return [pod["metadata"]["annotations"]["bdn.dev/want"] for pod in found if pod is not None]


async def test_a_rank_that_fails__fails_the_job_with_its_rank_node_and_code(pods: PodJobs) -> None:
    """Kubernetes deletes the other pod of the Job before the mirror looks: its exit code is not the reason."""
    job = await pods.running(spec(nodes=2))
    pods.api.ends(job, 1, code=3)
    other = pods.api.pod(job, 0)
    assert other is not None
    assert "deletionTimestamp" in other["metadata"]
    pods.api.ends(job, 0, code=143)
    pods.api.remove(other["metadata"]["uid"])
    assert await over(pods, job) == ("FAILED", "rank 1 on node n2 ended with exit code 3 [COMMAND_FAILED]")


@pytest.mark.parametrize("phase", ["PENDING", "DEPLOYING", "RUNNING"])
async def test_a_stop__deletes_the_job_and_ends_once_its_pods_have(pods: PodJobs, phase: str) -> None:
    if phase == "PENDING":
        pods.api.nodes = []
    begin = {"PENDING": pods.placed, "DEPLOYING": pods.deployed, "RUNNING": pods.running}[phase]
    job = await begin(spec())
    await pods.looked()
    assert await pods.client.status(job) == phase
    await pods.client.ask("POST", f"{job}/stop", {})
    if phase != "PENDING":
        await pods.looked(3)
        assert await pods.client.status(job) == phase  # its pod has not ended
        pods.api.ends(job, code=143)
    assert (await over(pods, job))[0] == "STOPPED"
    assert [pods.api.names(kind) for kind in ("jobs", "services", "pods")] == [[], [], []]


async def test_objects__are_created_once_and_by_any_controller(pods: PodJobs) -> None:
    """Two controllers look at the same moment; then a third one, which was started after a kill between two objects."""
    job = await pods.client.create({"image": IMAGE, **spec()})
    await asyncio.gather(*(pods.looked(3) for _ in range(2)))
    assert pods.api.names("jobs") == pods.api.names("services") == [f"bdn-{job}"]
    assert len(pods.api.names("pods")) == 1

    del pods.api.objects["services"][f"bdn-{job}"]
    second = await pods.placed(spec())
    del pods.api.objects["services"][f"bdn-{second}"]
    for runner in pods.mirror.service.controller.pods:
        runner._made.clear()
    await pods.looked(2)
    assert f"bdn-{second}" in pods.api.names("services")


async def test_bytes_of_a_rank__are_those_of_its_volumes_on_the_node(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"a.txt": b"12345"})
    sources = [source("hf://org/model", place) for place in ("/models/m", "/models/n")]
    async with pod_jobs(tmp_path, "n1", work=True) as pods:
        job = await pods.client.create({"image": IMAGE, **spec(*sources)})
        await pods.client.reached(job, "DEPLOYING")
        pod = pods.api.pod(job)
        assert pod is not None
        agent = JobAgent(pods.mirror, "n1")
        common: Json = {"mirror_id": None, "manifests": [], "state": "STAGING", "since": 0, "error": None}
        common |= {"bytes_per_second": None}
        stages: list[Json] = []
        for number, uid in enumerate((pod["metadata"]["uid"], "another", pod["metadata"]["uid"])):
            name = f"training/p/mount-{number}@{uid}.{'0' * 16}"
            stages.append({**common, "id": f"stg_{number}", "job": name, "bytes_done": 10 + number, "bytes_total": 100})
            await agent.beat(stages=stages)
            expected = {0: (10, None), 1: (10, None), 2: (22, 200)}[number]
            async with asyncio.timeout(LONGEST_SECONDS):
                while await bytes_of(pods, job) != expected:  # noqa: ASYNC110 - the next look brings it
                    await asyncio.sleep(0.02)


async def bytes_of(pods: PodJobs, job: str) -> tuple[int, int | None]:
    (rank,) = (await pods.client.job(job))["bdn"]["ranks"]
    return rank["bytes_done"], rank["bytes_total"]


async def test_a_job_that_was_deleted_while_it_waited__is_created_again(pods: PodJobs) -> None:
    pods.api.nodes = []
    job = await pods.placed(spec())
    before = pods.api.job(job)
    assert before is not None
    pods.api.objects["jobs"].clear()
    pods.api.objects["pods"].clear()
    pods.api.nodes = ["n1"]
    await pods.looked(3)
    after = pods.api.job(job)
    assert after is not None
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert await pods.client.status(job) == "DEPLOYING"


# --- what fails, and how it is reported ---


async def test_an_api_server_that_is_away__changes_no_state(pods: PodJobs, caplog: pytest.LogCaptureFixture) -> None:
    job = await pods.running(spec())
    pods.api.fail(drop())
    waiting = await pods.placed(spec())
    await pods.looked(5)
    assert [await pods.client.status(one) for one in (job, waiting)] == ["RUNNING", "PENDING"]
    said = [record.getMessage() for record in caplog.records if "Kubernetes cluster 'c'" in record.getMessage()]
    assert len(said) <= 2  # once for each reason, not in each turn
    pods.api.mend()
    pods.api.fail(answer(500))
    await pods.looked(2)
    pods.api.mend()
    pods.api.ends(job)
    assert await over(pods, job) == ("COMPLETED", None)
    assert await pods.client.status(waiting) in ("PENDING", "DEPLOYING")


@pytest.mark.parametrize(("status", "expected"), [(403, "PENDING"), (429, "PENDING"), (422, "DEPLOY_FAILED")])
async def test_a_job_that_kubernetes_refuses__says_why(pods: PodJobs, status: int, expected: str) -> None:
    refused = {"kind": "Status", "message": 'exceeded quota: "training"'}
    pods.api.fail(answer(status, body=json.dumps(refused).encode()), method="POST")
    job = await pods.placed(spec())
    found, reason = await over(pods, job)
    assert found == expected
    assert reason is not None
    assert 'exceeded quota: "training"' in reason
    pods.api.mend()
    await pods.looked(2)
    assert await pods.client.status(job) == ("DEPLOYING" if expected == "PENDING" else "DEPLOY_FAILED")


async def test_a_job_without_an_image__fails_before_anything_is_made(pods: PodJobs) -> None:
    job = await pods.client.create(spec())
    status, reason = await over(pods, job)
    assert (status, pods.api.sent) == ("DEPLOY_FAILED", [])
    assert reason == "the job names no image, which a pod needs: set image.base_image [INVALID_REQUEST]"


async def test_an_image_that_cannot_be_pulled__fails_the_deployment_with_the_message_of_kubernetes(
    pods: PodJobs,
) -> None:
    job = await pods.deployed(spec())
    pod = pods.api.pod(job)
    assert pod is not None
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image python:none"}}
    pods.api.change(pod["metadata"]["uid"], lambda one: set_state(one, "main", waiting))
    await pods.looked()
    deleted = pods.api.job(job)
    assert deleted is not None
    assert "deletionTimestamp" in deleted["metadata"]  # at once: no later turn looks at the job
    status, reason = await over(pods, job)
    assert status == "DEPLOY_FAILED"
    assert reason is not None
    assert (
        "rank 0 on node n1: container main cannot start: ImagePullBackOff: Back-off pulling image python:none" in reason
    )


async def test_a_pod_that_is_gone__is_a_lost_rank(pods: PodJobs) -> None:
    job = await pods.running(spec(nodes=2))
    pod = pods.api.pod(job, 1)
    assert pod is not None
    pods.api.remove(pod["metadata"]["uid"])
    await pods.looked(2)
    pods.api.ends(job, 0, code=143)
    status, reason = await over(pods, job)
    assert status == "FAILED"
    assert reason is not None
    assert reason.endswith("its pod is gone: it was deleted, or its node is lost [NODE_LOST]")
    assert [rank["state"] for rank in (await pods.client.job(job))["bdn"]["ranks"]] == ["ENDED", "LOST"]


async def test_a_job_made_while_it_was_stopped__is_deleted(pods: PodJobs, clock: Clock) -> None:
    job = await pods.placed(spec())
    left = pods.api.job(job)
    assert left is not None
    await pods.client.ask("POST", f"{job}/stop", {})
    pods.api.ends(job, code=143)
    assert (await over(pods, job))[0] == "STOPPED"
    foreign = json.loads(json.dumps(left).replace(job, "0123456789"))
    foreign["metadata"]["labels"]["bdn.dev/mirror"] = "another"
    pods.api.objects["jobs"] |= {f"bdn-{job}": left, "bdn-0123456789": foreign}
    clock.now += 61
    await pods.looked(2)
    for rank in range(2):
        for run in (job, "0123456789"):
            pod = pods.api.pod(run, rank)
            if pod is not None and "deletionTimestamp" in pod["metadata"]:
                pods.api.ends(run, rank, code=143)
                pods.api.remove(pod["metadata"]["uid"])
    assert pods.api.names("jobs") == ["bdn-0123456789"]  # another mirror's


# --- placement ---


async def test_a_gpu_type_that_is_not_listed__is_no_capacity(pods: PodJobs) -> None:
    job = await pods.client.create({"image": IMAGE, **spec(compute=accelerated("B200", 8))})
    status, reason = await over(pods, job)
    assert status == "DEPLOY_FAILED"
    assert reason is not None
    assert "list the GPU type in BDN_KUBERNETES [NO_SUCH_CAPACITY]" in reason
    listed = await pods.deployed(spec(compute=accelerated("h100", 8)))
    assert (await pods.spec(listed)).json()["environment"]["BT_NUM_GPUS"] == "8"


async def test_agents_of_a_cluster_with_pods__get_no_ranks_and_report_on_none(pods: PodJobs) -> None:
    agent = JobAgent(pods.mirror, "n1")
    await agent.beat()
    job = await pods.deployed(spec())
    assert await agent.told() == []
    await agent.report(f"run:{job}:0:stage", "STAGED")
    assert (await pods.client.job(job))["bdn"]["ranks"][0]["state"] == "STAGING"
    stray = await agent.report(f"run:{job}:0:go", "RUNNING", running=True)
    assert stray == [f"run:{job}:0:stop"]
    assert (await pods.client.job(job))["bdn"]["ranks"][0]["state"] == "STAGING"


async def test_a_gpu_type_that_agents_have__runs_on_agents_whose_node_has_pods_as_well(pods: PodJobs) -> None:
    """What pods take of a node is not taken of the agent of this name."""
    agent = JobAgent(pods.mirror, "n1", gpus(8, "B200"))
    await agent.beat()
    as_pods = await pods.deployed(spec(compute=accelerated("H100", 8)))
    on_agent = await pods.placed(spec(compute=accelerated("B200", 8)))
    assert await agent.told() == [f"run:{on_agent}:0:stage"]
    found = [(await pods.client.job(job))["bdn"]["ranks"][0]["node"] for job in (as_pods, on_agent)]
    assert found == ["n1", "n1"]


async def test_a_training_cache__is_the_directory_of_agents_on_the_claim_and_pins_the_project(pods: PodJobs) -> None:
    job = await pods.deployed(spec(runtime=runtime(cache_config={"enabled": True, "enable_legacy_hf_mount": True})))
    (sent,) = [one for one in pods.api.sent if one["kind"] == "Job"]
    pod = sent["spec"]["template"]["spec"]
    mounts = {one["mountPath"]: one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "caches"}
    caches = (await pods.mirror.get("/caches"))["items"]
    (cache,) = [one for one in caches if one["project_id"] == pods.client.project]
    assert cache["cluster"] == CLUSTER
    assert {place: one["subPath"].split("/", 1)[1] for place, one in mounts.items()} == {
        "/root/.cache/user_artifacts": f"projects/{pods.client.project}/user_artifacts",
        "/root/.cache/huggingface": f"projects/{pods.client.project}/huggingface",
        "/root/.cache/team_artifacts": f"teams/{cache['team_id']}",
    }
    assert len({one["subPath"].split("/")[0] for one in mounts.values()}) == 1
    given = (await pods.spec(job)).json()
    assert (given["cache_grant"], given["caches"]["project"]) == (None, "/root/.cache/user_artifacts")


async def test_a_training_cache_without_a_claim__is_refused(upstreams: None, tmp_path: Path) -> None:
    async with pod_jobs(tmp_path, "n1") as pods:
        job = await pods.client.create({"image": IMAGE, **spec(runtime=runtime(cache_config={"enabled": True}))})
        status, reason = await over(pods, job)
        assert status == "DEPLOY_FAILED"
        assert reason is not None
        assert "jobs.cache_claim" in reason
        assert reason.endswith("[NOT_SUPPORTED]")


async def test_a_job_in_a_queue__says_that_it_waits_there(upstreams: None, tmp_path: Path) -> None:
    async with pod_jobs(tmp_path, "n1", jobs={"queue": "team-a"}) as pods:
        pods.api.queue_admits = False
        job = await pods.placed(spec())
        await pods.looked(2)
        document = await pods.client.job(job)
        assert document["bdn"]["waiting_for"] == "waits in its queue"
        found = pods.api.job(job)
        assert found is not None
        assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
        pods.api.queue_admits = True
        pods.api.change("", lambda _: None)
        await pods.looked(2)
        assert await pods.client.status(job) == "DEPLOYING"


# --- access ---


async def test_a_rank__is_readable_by_its_own_pod_alone(pods: PodJobs) -> None:
    job = await pods.deployed(spec(nodes=2))
    assert (await pods.spec(job, 0)).status_code == 200
    own = pods.bearing(job, 0)
    wrong: list[tuple[int, dict[str, str], Json]] = [
        (1, own, {}),  # another rank's pod
        (0, pods.bearing(job, 1), {}),
        (0, own, {"boot_id": "b"}),
        (0, own, {"node": "n2"}),
        (0, bearing(pods, "lab"), {}),  # a pod that users made
        (0, bearing(pods, "bdn", "agent"), {}),  # an agent, with the right node and uid
    ]
    for rank, bearer, changes in wrong:
        found = await pods.spec(job, rank, bearer, **changes)
        assert refusal(found) == (404, "NOT_FOUND"), (rank, changes)
    lines = {"seq": 0, "lines": [[1, "forged"]]}
    for rank, bearer, _ in (*wrong[:2], *wrong[4:]):
        found = await pods.mirror.http.post(f"/runs/{job}/{rank}/logs", json=lines, headers=bearer)
        assert refusal(found) == (404, "NOT_FOUND")
    assert "forged" not in await pods.client.log(job)
    pod = pods.api.pod(job, 0)
    assert pod is not None
    pods.api.ends(job, 0, code=1)
    await pods.looked(2)
    place = {"node": pod["spec"]["nodeName"], "boot_id": pod["metadata"]["uid"]}
    ended = await pods.mirror.http.get(f"/runs/{job}/0", params=place, headers=own)
    assert refusal(ended) == (404, "NOT_FOUND")


def bearing(pods: PodJobs, namespace: str, account: str = "default") -> dict[str, str]:
    return {"Authorization": f"Bearer {pods.issuer.token(namespace, account)}"}


async def test_secrets__reach_the_pod_and_stand_in_no_object(pods: PodJobs, tmp_path: Path) -> None:
    for name, value in (("wandb", SECRET), ("registry", f"user:{SECRET}")):
        stored = await pods.mirror.http.put(f"/secrets/{name}", json={"value": value})
        assert stored.status_code in (200, 201, 204), stored.text
    auth = {"auth_method": "REGISTRY_SECRET", "registry": "docker.io"}
    image = {**IMAGE, "docker_auth": {**auth, "registry_secret_docker_auth": {"secret_ref": {"name": "registry"}}}}
    variables = {"KEY": {"name": "wandb"}}
    job = await pods.deployed({**spec(runtime=runtime(environment_variables=variables)), "image": image})
    assert (await pods.spec(job)).json()["environment"]["KEY"] == SECRET
    kinds = {one["kind"]: one for one in pods.api.sent}
    assert SECRET not in json.dumps([kinds["Job"], kinds["Service"]])
    assert kinds["Job"]["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": f"bdn-{job}"}]
    assert list(kinds["Secret"]["data"]) == [".dockerconfigjson"]


# --- volumes ---


async def test_weights_and_archive__are_volumes_of_the_jobs_mirror(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"a.txt": b"12345"})
    async with pod_jobs(tmp_path, "n1", work=True) as pods:
        job = await pods.client.create({"image": IMAGE, **spec(source("hf://org/model", "/models/m"))})
        await pods.client.reached(job, "DEPLOYING")
        (sent,) = [one for one in pods.api.sent if one["kind"] == "Job"]
        volumes = [one["csi"] for one in sent["spec"]["template"]["spec"]["volumes"] if "csi" in one]
        mirror = (await pods.client.job(job))["bdn"]["mirror_id"]
        attributes = {"mirror": mirror, "mountLocation": "/models/m"}
        assert volumes == [{"driver": "csi.bdn.dev", "readOnly": True, "volumeAttributes": attributes}]
        read = await pods.mirror.http.get(f"/mirror/{mirror}", headers=pods.bearing(job))
        assert read.status_code == 200, read.text  # by the CSI driver, with the pod's token
