"""Training jobs from their creation to their end: states, the barrier, stops and failures, as clients and agents see them."""

from tests.doubles.hub import Hub
from tests.support.mirror.service import MirrorUnderTest, source
from tests.support.mirror.training import JobAgent, JobClient, spec

pytest_plugins = ("tests.support.mirror.fixtures",)


async def test_a_job__is_mirrored_staged_started_and_completed(mirror: MirrorUnderTest, hub: Hub) -> None:
    hub.repo("org/model").commit({"a.txt": b"12345"})
    agent, client = JobAgent(mirror, "n1"), await JobClient.of(mirror)
    await agent.beat()
    job = await client.create(spec(source("hf://org/model")))
    stage = await agent.commanded("stage")
    assert stage == f"run:{job}:0:stage"
    answer = await agent.spec(stage)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    given = answer.json()
    assert (given["commands"], given["working_dir"]) == (["python train.py"], "/b10/workspace")
    assert given["environment"]["BT_LEADER_ADDR"] == "n1"
    assert given["read_grant"]
    assert await agent.report(stage, "STAGING", running=True, bytes_done=2, bytes_total=5) == []
    (rank,) = (await client.job(job))["bdn"]["ranks"]
    assert (rank["node"], rank["state"], rank["bytes_done"]) == ("n1", "STAGING", 2)
    (go,) = await agent.report(stage, "STAGED", bytes_done=5, bytes_total=5)
    assert go == f"run:{job}:0:go"
    assert await client.status(job) == "RUNNING"
    await agent.report(go, "RUNNING", running=True)
    assert await agent.report(go, "ENDED", exit_code=0) == []
    assert await client.status(job) == "COMPLETED"
    assert (await client.log(job))[-1] == "the job completed"
    assert (await client.log(job))[0] == "the job is created; mirroring 1 source"
