"""Checkpoints that a training job loads, by job, by project and by name, where each of its nodes finds them, and how long they stay."""

import json
from base64 import urlsafe_b64decode
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from bdn.core.chunk import Digest
from tests.doubles.hub import Hub
from tests.support.mirror.job import Job, chunks_of
from tests.support.mirror.service import Json, MirrorUnderTest, source
from tests.support.mirror.training_jobs import CPUS, JobAgent, JobClient, runtime, spec
from tests.support.mirror.uploads import uploads_of

pytest_plugins = ("tests.support.mirror.fixtures",)

TREE: Final = {"model.safetensors": b"weights"}


def latest(**fields: str) -> Json:
    return {"typ": "baseten_latest_checkpoint", "job_id": None, "project_name": None, **fields}


def named(job: str, name: str) -> Json:
    return {"typ": "baseten_named_checkpoint", "job_id": job, "checkpoint_name": name}


def loading(*checkpoints: Json, nodes: int = 1) -> Json:
    config = {"enabled": True, "download_folder": "/load", "checkpoints": list(checkpoints)}
    return spec(nodes=nodes, runtime=runtime(load_checkpoint_config=config))


def mounts_of(given: dict[str, Any]) -> list[str]:
    """The places of a rank's grant, each with the job and rank that it comes from."""
    if given["read_grant"] is None:
        return []
    payload = given["read_grant"].split(".")[1]
    claims = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return [f"{place} {source.partition('@')[2]}" for place, _, source in claims["mounts"]]


@pytest.fixture
async def job(mirror_with_data_plane: MirrorUnderTest) -> AsyncIterator[Job]:
    """Pushes to project llama: job a checkpoint c1 of two ranks, then job b c2 of one. And there are nodes for jobs."""
    job = Job(mirror_with_data_plane)
    async with job.plane:
        for uri in ("a/c1", "a/c1#rank-1", "b/c2"):
            await job.push({**TREE, "from": uri.encode()}, f"bt://llama@{uri}")
        for node in ("n1", "n2"):
            await JobAgent(job.mirror, node, {**CPUS, "slots": 9}).beat()
        yield job


async def mounts(client: JobClient, request: Json) -> list[list[str]]:
    """What each rank of a job with this request gets."""
    job = await client.create(request)
    document = await client.reached(job, "DEPLOYING")
    found: list[list[str]] = []
    for rank in document["bdn"]["ranks"]:
        agent = JobAgent(client.mirror, rank["node"])
        given = await agent.spec(f"run:{job}:{rank['rank']}:stage")
        assert (given.status_code, given.json()["loaded"]) == (200, "/load"), given.text
        found.append(mounts_of(given.json()))
    return found


async def test_checkpoints__are_found_and_given_to_the_nodes_of_their_ranks(job: Job) -> None:
    own, other = await JobClient.of(job.mirror), await JobClient.of(job.mirror, "other")
    both = ["/load/rank-0/c1 a/c1", "/load/rank-1/c1 a/c1#rank-1"]
    assert await mounts(other, loading(latest(job_id="a"), nodes=2)) == [both[:1], both]
    assert await mounts(other, loading(named("a", "c1"))) == [both]
    assert await mounts(other, loading(latest(project_name="llama"), nodes=2)) == [["/load/rank-0/c2 b/c2"]] * 2
    assert await mounts(own, loading(latest())) == [["/load/rank-0/c2 b/c2"]]
    assert await mounts(own, loading(latest(project_name="llama", job_id="a"))) == [both]


async def test_a_checkpoint_that_is_missing__fails_the_job_unless_the_project_is_its_own(
    job: Job,
) -> None:
    other = await JobClient.of(job.mirror, "other")
    first = await other.create(loading(latest(project_name="other")))
    await other.reached(first, "DEPLOYING")
    assert "this project has no checkpoint yet: nothing is loaded" in await other.log(first)
    for checkpoint, code in (
        (latest(job_id="none"), "NOT_FOUND"),
        (latest(project_name="none"), "NOT_FOUND"),
        (named("a", "c2"), "NOT_FOUND"),
    ):
        document = await other.reached(await other.create(loading(checkpoint)), "DEPLOY_FAILED")
        assert document["error_message"].endswith(f"[{code}]"), document
    await job.push(TREE, "bt://llama@b/c1")
    twice = await other.create(loading(named("a", "c1"), named("b", "c1")))
    assert (await other.reached(twice, "DEPLOY_FAILED"))["error_message"].endswith("[INVALID_MOUNT]")


@pytest.mark.parametrize("deleted", ["jobs", "project"])
async def test_archive_and_loaded_checkpoint__their_jobs_are_deleted__leave_the_store_and_weights_stay(
    job: Job, hub: Hub, deleted: str
) -> None:
    hub.repo("org/model").commit({"weights.bin": b"w" * 1000})
    loads, client = {"from": b"loaded"}, await JobClient.of(job.mirror, "other")
    await job.push({**TREE, **loads}, "bt://other@x/c1")
    async with uploads_of(job.mirror) as uploads:
        upload = await uploads.begin()
        await upload.ask("put_object", Body=b"code")
    request = loading(named("x", "c1"))
    request["runtime"]["artifacts"] = [{"s3_bucket": upload.document["s3_bucket"], "s3_key": upload.key}]
    first = await client.create({**request, "weights": [source("hf://org/model")]})
    await client.reached(first, "DEPLOYING")
    again = (await client.ask("POST", f"{first}/recreate", {})).json()["training_job"]["id"]
    await client.reached(again, "DEPLOYING")

    async def stored() -> tuple[bool, bool, bool]:
        """Of the code, the checkpoint and the weights."""
        await job.mirror.collect(grace_seconds=0)
        held = job.mirror.chunks()
        trees = ({"archive.tgz": b"code"}, {**TREE, **loads}, {"weights.bin": b"w" * 1000})
        code, checkpoint, weights = [
            all(Digest.parse(name).fanout in held for name in chunks_of(tree)) for tree in trees
        ]
        return code, checkpoint, weights

    for one in (first, again):
        await client.ask("POST", f"{one}/stop", {})
        for rank in (await client.job(one))["bdn"]["ranks"]:
            await JobAgent(job.mirror, rank["node"], {**CPUS, "slots": 9}).report(f"run:{one}:0:stop", "ENDED")
        await client.reached(one, "STOPPED")
    for checkpoint in await job.checkpoints(project="other"):
        assert (await job.ask("DELETE", f"/checkpoints/{checkpoint['id']}")).status_code == 200
    assert await stored() == (True, True, True)
    if deleted == "project":
        assert (await job.ask("DELETE", f"/projects/{client.project}")).status_code == 200
    else:
        assert (await client.ask("DELETE", first)).status_code == 200
        assert await stored() == (True, True, True)  # the other job has them, too
        assert (await client.ask("DELETE", again)).status_code == 200
    assert await stored() == (False, False, True)
