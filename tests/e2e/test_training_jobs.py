"""Training jobs by the unmodified truss: pushed, staged, run on agents, and seen from outside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from bdn.mirror.db.secrets import new_key
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import needs_bwrap
from tests.support.services.cluster import Cluster
from tests.support.services.commands import wait_until
from tests.support.services.training import CLIENTS, User, agent, ended, left_over
from tests.support.services.training_scripts import (
    CHECKPOINTS,
    LATEST_OF_ITS_PROJECT,
    READING,
    RESUMED,
    WEIGHTS,
    check_read_only,
    publish_weights,
)

pytestmark = [
    pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it"),
    needs_bwrap,
    needs_mounts,
]
SECRET: Final = "hunter2-" * 5
STOPPED: Final = """
import os, pathlib, signal, sys, time
def stop(number, frame):
    folder = pathlib.Path(os.environ["BT_CHECKPOINT_DIR"], "checkpoint-1")
    folder.mkdir()
    (folder / "state.bin").write_bytes(b"x" * 100_000)
    print("stopped by", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("waiting", flush=True)
while True:
    time.sleep(1)
"""
GROUP: Final = """
import os, socket, time
rank, size = int(os.environ["BT_NODE_RANK"]), int(os.environ["BT_GROUP_SIZE"])
if rank == 0:
    with socket.create_server(("", 29500)) as server:
        server.accept()
else:
    for _ in range(600):
        try:
            socket.create_connection((os.environ["BT_LEADER_ADDR"], 29500)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    print(f"rank {rank} of {size} reached its leader")
"""


@pytest.fixture
def cluster(backend: str, tmp_path: Path, hub: Hub, s3: S3Server) -> Iterator[Cluster]:
    publish_weights(hub, s3)
    with unmounting(tmp_path):
        extra = {"HF_ENDPOINT": hub.url, "AWS_ENDPOINT_URL_S3": s3.url}
        cluster = Cluster(tmp_path, {**extra, "BDN_SECRETS_KEY": new_key(), "BDN_SECRET_OPERATORS": "x"})
        with cluster.mirror():
            yield cluster


def bytes_from(hub: Hub, s3: S3Server) -> int:
    """Of files: listings are requests without a range."""
    requests = [*hub.log.find(method="GET"), *s3.log.find(method="GET")]
    return sum(one.bytes_served for one in requests if "range" in one.headers)


@pytest.mark.production
def test_a_job__finds_its_weights_read_only_and_a_second_one_moves_no_byte(
    cluster: Cluster, hub: Hub, s3: S3Server
) -> None:
    with agent(cluster) as shell:
        user = User(cluster, shell)
        first = user.push("demo", "python3 script.py", files={"script.py": READING}, weights=WEIGHTS)
        assert "completed successfully" in user.said
        check_read_only(user.said)
        assert user.job(first)["current_status"] == "TRAINING_JOB_COMPLETED"
        assert "TRAINING_JOB_COMPLETED" in user.truss("view", "--job-id", first).out
        assert not Path("/app").exists()
        wait_until(lambda: not left_over(shell), what="an empty node")

        moved = bytes_from(hub, s3)
        second = user.push("demo", "python3 script.py", files={"script.py": READING}, weights=WEIGHTS)
        assert user.job(second)["current_status"] == "TRAINING_JOB_COMPLETED"
        assert bytes_from(hub, s3) == moved


@pytest.mark.production
def test_a_job__ends_as_its_commands_did_and_leaves_nothing(cluster: Cluster) -> None:
    with agent(cluster) as shell:
        user = User(cluster, shell)
        failed = user.push("ends", "echo before; sleep 1000 & exit 3", "echo never")
        assert ended(user, failed) == ("FAILED", "rank 0 on node node-1 ended with exit code 3 [COMMAND_FAILED]")
        assert "before" in user.logs(failed)
        assert "never" not in user.logs(failed)
        killed = user.push("ends", "kill -9 $$")
        assert ended(user, killed)[1].startswith("rank 0 on node node-1 was killed (exit code 137)")
        missing = user.push("ends", "true", weights='WeightsSource(source="hf://org/none", mount_location="/m")')
        status, reason = ended(user, missing)
        assert status == "DEPLOY_FAILED"
        assert "org/none" in reason
        assert reason.replace(" ", "") in user.said.replace(" ", "")
        wait_until(lambda: not left_over(shell), what="an empty node")


@pytest.mark.production
def test_a_stop__lets_the_commands_finish_a_checkpoint(cluster: Cluster) -> None:
    with agent(cluster) as shell:
        user = User(cluster, shell)
        job = user.start("stops", "python3 script.py", files={"script.py": STOPPED}, runtime=CHECKPOINTS)
        wait_until(lambda: "waiting" in user.logs(job), what="the first line")
        done = user.truss("stop", "--job-id", job)
        assert done.code == 0, done.out
        wait_until(lambda: ended(user, job)[0] == "STOPPED", what="the end of the job")
        assert "stopped by 15" in user.logs(job)
        listed = user.truss("checkpoints", "list", "--job-id", job, "-o", "json").document
        assert [one["checkpoint_id"] for one in listed["checkpoints"]] == ["checkpoint-1"]
        wait_until(lambda: not left_over(shell), what="an empty node")


@pytest.mark.production
def test_ranks__begin_together_and_find_their_leader(cluster: Cluster) -> None:
    with agent(cluster) as shell, agent(cluster, "node-2"):
        user = User(cluster, shell)
        job = user.push("group", "python3 script.py", files={"script.py": GROUP}, nodes=2, weights=WEIGHTS)
        assert ended(user, job) == ("COMPLETED", "")
        assert "rank 1 of 2 reached its leader" in user.logs(job)


@pytest.mark.production
def test_a_secret__reaches_the_commands_alone(cluster: Cluster) -> None:
    with agent(cluster) as shell:
        user = User(cluster, shell)
        done = shell.run("bdn-admin", "secrets", "set", "wandb", given=SECRET.encode())
        assert done.code == 0, done.out + done.err
        variables = '{"KEY": SecretReference(name="wandb"), "PLAIN": "$BT_SCRATCH_DIR/x"}'
        command = 'python3 -c \'import os; print(len(os.environ["KEY"]), os.environ["PLAIN"])\'; sleep 3'
        job = user.push("secret", command, variables=variables)
        assert ended(user, job)[0] == "COMPLETED"
        assert f"{len(SECRET)} /mnt/bt-scratch/x" in user.logs(job)
        with cluster.http() as http:
            assert (
                SECRET not in http.get(f"/v1/training_projects/{user.job(job)['training_project_id']}/jobs/{job}").text
            )
        kept = [path for path in cluster.root.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
        assert kept == []
        unknown = user.push("secret", "true", variables='{"KEY": SecretReference(name="operators")}')
        assert ended(user, unknown)[0] == "DEPLOY_FAILED"
        assert "operators" in ended(user, unknown)[1]
        assert "[SECRET_NOT_FOUND]" in ended(user, unknown)[1]


@pytest.mark.production
def test_the_cache_of_a_project__is_found_by_its_next_job(cluster: Cluster) -> None:
    with agent(cluster) as shell:
        user = User(cluster, shell)
        runtime = "cache_config=CacheConfig(enabled=True, enable_legacy_hf_mount=True)"
        first = user.push(
            "cached", "mkdir $BT_PROJECT_CACHE_DIR/d; echo kept > $BT_PROJECT_CACHE_DIR/d/f", runtime=runtime
        )
        assert ended(user, first)[0] == "COMPLETED", ended(user, first)
        command = "cat /root/.cache/user_artifacts/d/f; test $BT_RW_CACHE_DIR = $BT_PROJECT_CACHE_DIR && ls -d /root/.cache/huggingface $BT_TEAM_CACHE_DIR"
        second = user.push("cached", command, runtime=runtime)
        assert ended(user, second)[0] == "COMPLETED", ended(user, second)
        assert "kept" in user.logs(second)
        other = user.push("other", "ls -A $BT_PROJECT_CACHE_DIR | wc -l", runtime=runtime)
        assert "(r0) 0" in user.logs(other)
        summary = user.truss("cache", "summarize", "cached", "-o", "json").document
        assert "user_artifacts/d/f" in [one["path"] for one in summary["files"]]


@pytest.mark.production
def test_a_job__resumes_from_the_checkpoint_of_the_job_before_it(cluster: Cluster) -> None:
    with agent(cluster) as shell, agent(cluster, "node-2"):
        user = User(cluster, shell)
        runtime = f"{CHECKPOINTS}, {LATEST_OF_ITS_PROJECT}"
        jobs = [
            user.push("resumes", "python3 script.py", files={"script.py": RESUMED}, runtime=runtime) for _ in range(2)
        ]
        for step, job in enumerate(jobs, start=1):
            assert ended(user, job) == ("COMPLETED", "")
            assert f"step {step}" in user.logs(job)
        listed = user.truss("get_checkpoint_urls", "--job-id", jobs[-1])
        assert listed.code == 0, listed.out + listed.err
