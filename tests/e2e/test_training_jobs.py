"""Training jobs by the unmodified truss: pushed, staged, run on agents, and seen from outside."""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.mirror.db.secrets import new_key
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import ending_ranks, needs_bwrap
from tests.support.services.cluster import Cluster
from tests.support.services.commands import wait_until
from tests.support.services.training import CLIENTS, User, agent, ended, left_over
from tests.support.services.training_scripts import (
    CHECKPOINTS,
    DATA,
    READING,
    RESUMED,
    WEIGHTS,
    check_read_only,
    publish_weights,
    resuming,
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
FETCHED: Final = """
import os, pathlib, sys, urllib.request
file = pathlib.Path(os.environ["BT_PROJECT_CACHE_DIR"], "d/f")
if not file.exists():
    file.parent.mkdir()
    file.write_bytes(urllib.request.urlopen(sys.argv[1]).read())
    print("downloaded")
print(file.stat().st_size, "bytes are there")
"""
STORED: Final = """
import os, pathlib
print("WEIGHTS", pathlib.Path("/app/model/weights.txt").read_text())
for name in ("SCRATCH", "PROJECT_CACHE", "CHECKPOINT", "LOAD_CHECKPOINT"):
    print(name, [path.read_text() for path in pathlib.Path(os.environ[f"BT_{name}_DIR"]).rglob("state.pt")])
for name in ("SCRATCH", "PROJECT_CACHE", "CHECKPOINT"):
    folder = pathlib.Path(os.environ[f"BT_{name}_DIR"], "step-1")
    folder.mkdir(exist_ok=True)
    (folder / "state.pt").write_text(f"what is in {name}")
"""


@pytest.fixture
def cluster(backend: str, tmp_path: Path, hub: Hub, s3: S3Server) -> Iterator[Cluster]:
    publish_weights(hub, s3)
    with unmounting(tmp_path), ending_ranks(tmp_path):
        extra = {"HF_ENDPOINT": hub.url, "AWS_ENDPOINT_URL_S3": s3.url}
        cluster = Cluster(tmp_path, {**extra, "BDN_SECRETS_KEY": new_key(), "BDN_SECRET_OPERATORS": "x"})
        with cluster.mirror():
            yield cluster


def bytes_from(hub: Hub, s3: S3Server) -> int:
    """Of files: listings are requests without a range."""
    requests = [*hub.log.find(method="GET"), *s3.log.find(method="GET")]
    return sum(one.bytes_served for one in requests if "range" in one.headers)


def pushed_with_weights(user: User) -> str:
    """A job that reads all of its weights and tries to change them. Returns its id."""
    job = user.push("demo", "python3 script.py", files={"script.py": READING}, weights=WEIGHTS)
    assert "completed successfully" in user.said
    check_read_only(user.said)
    assert ended(user, job) == ("COMPLETED", "")
    return job


@pytest.mark.production
def test_a_job__finds_its_weights_read_only_and_a_second_one_moves_no_byte(
    cluster: Cluster, hub: Hub, s3: S3Server
) -> None:
    with agent(cluster) as shell:
        user = User(cluster, shell)
        first = pushed_with_weights(user)
        assert "TRAINING_JOB_COMPLETED" in user.truss("view", "--job-id", first).out
        assert not Path("/app").exists()
        wait_until(lambda: not left_over(shell), what="an empty node")

        moved = bytes_from(hub, s3)
        pushed_with_weights(user)
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
def test_a_secret__reaches_the_commands_alone(cluster: Cluster) -> None:
    with agent(cluster) as shell:
        user = User(cluster, shell)
        done = shell.run("bdn-admin", "secrets", "set", "wandb", given=SECRET.encode())
        assert done.code == 0, done.out + done.err
        variables = '{"KEY": SecretReference(name="wandb"), "PLAIN": "$BT_SCRATCH_DIR/x"}'
        command = "printf %s $KEY | sha256sum; echo $PLAIN; sleep 3"
        job = user.push("secret", command, variables=variables)
        assert ended(user, job)[0] == "COMPLETED"
        for line in (hashlib.sha256(SECRET.encode()).hexdigest(), "/mnt/bt-scratch/x"):
            assert line in user.logs(job)
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
def test_the_cache_of_a_project__is_found_by_its_next_job(cluster: Cluster, s3: S3Server) -> None:
    """It is looked for before it is downloaded, as Baseten's guide says."""
    given: dict[str, Any] = {
        "runtime": "cache_config=CacheConfig(enabled=True, enable_legacy_hf_mount=True)",
        "variables": '{"HF_HOME": "$BT_PROJECT_CACHE_DIR/huggingface"}',
    }
    fetch, files = f"python3 script.py {s3.url}/data/train/a.jsonl", {"script.py": FETCHED}
    with agent(cluster) as shell:
        user = User(cluster, shell)
        write = (
            "mkdir $HF_HOME; echo by-hf-home >$HF_HOME/f; echo by-mount >/root/.cache/huggingface/f; "
            "echo by-team >$BT_TEAM_CACHE_DIR/f"
        )
        first = user.push("cached", fetch, write, files=files, **given)
        assert ended(user, first) == ("COMPLETED", "")
        assert "downloaded" in user.logs(first)

        read = "test $BT_RW_CACHE_DIR = $BT_PROJECT_CACHE_DIR; cd /root/.cache; cat user_artifacts/huggingface/f huggingface/f"
        found = "find user_artifacts huggingface -type f -printf 'FOUND %p %s\\n'"
        second = user.push("cached", fetch, f"set -e; {read}; {found}", files=files, **given)
        assert ended(user, second) == ("COMPLETED", "")
        said = user.logs(second)
        for line in (f"{len(DATA['a.jsonl'])} bytes are there", "by-hf-home", "by-mount"):
            assert line in said
        assert "downloaded" not in said
        assert s3.log.count("a.jsonl", method="GET") == 1

        other = user.push("other", "ls -A $BT_PROJECT_CACHE_DIR | wc -l; cat /root/.cache/team_artifacts/f", **given)
        assert "(r0) 0" in user.logs(other)
        assert "by-team" in user.logs(other)
        summary = user.truss("cache", "summarize", "cached", "-o", "json").document
        sizes = {one["path"]: one["size_bytes"] for one in summary["files"] if one["type"] == "file"}
        assert sizes == {path: int(size) for path, size in re.findall(r"FOUND (\S+) (\d+)", said)}


@pytest.mark.production
def test_a_job__resumes_on_another_node_from_the_checkpoint_of_the_job_before_it(cluster: Cluster) -> None:
    """The first node is lost with all that it had."""
    user, job = User(cluster, cluster.shell("operator")), ""
    for step, node in enumerate(("node-1", "node-2"), start=1):
        with agent(cluster, node) as shell:
            job = user.push("resumes", "python3 script.py", files={"script.py": RESUMED}, runtime=resuming("resumes"))
            assert ended(user, job) == ("COMPLETED", "")
            assert f"step {step}" in user.logs(job)
            wait_until(lambda shell=shell: not left_over(shell), what="an empty node")
        shutil.rmtree(shell.data)
    listed = user.truss("get_checkpoint_urls", "--job-id", job)
    assert listed.code == 0, listed.out + listed.err


def holding(root: Path, text: str) -> list[str]:
    """The files below the folder that have this text. Files are read to their end, holes included."""
    found = subprocess.run(["grep", "-rlaF", text, root], check=False, capture_output=True, text=True)
    return found.stdout.splitlines()


@pytest.mark.embedded("it searches the files of the store")
def test_storage_of_each_kind__stays_as_long_as_it_says_and_leaves_no_byte(cluster: Cluster, hub: Hub) -> None:
    hub.repo("org/stored").commit({"weights.txt": b"what is in WEIGHTS"})
    weights = 'WeightsSource(source="hf://org/stored", mount_location="/app/model")'
    small = "checkpointing_config=CheckpointingConfig(enabled=True, volume_size_gib=1)"  # read as a file of this size
    runtime = f"{resuming('stored', small)}, cache_config=CacheConfig(enabled=True)"
    kinds = ("WEIGHTS", "PROJECT_CACHE", "CHECKPOINT")
    with agent(cluster, BDN_AGENT_SCRATCH_BYTES="64MiB") as shell:
        user = User(cluster, shell)
        said = []
        for _ in range(2):
            job = user.push(
                "stored", "python3 script.py", files={"script.py": STORED}, runtime=runtime, weights=weights
            )
            assert ended(user, job) == ("COMPLETED", "")
            said.append(user.logs(job))
            wait_until(lambda: not left_over(shell), what="an empty node")
            wait_until(lambda: not holding(cluster.root, "what is in SCRATCH"), what="the end of the scratch")
        for text in said:
            assert "WEIGHTS what is in WEIGHTS" in text
            assert "(r0) SCRATCH []" in text
            assert "(r0) CHECKPOINT []" in text
        for kind, read in (("PROJECT_CACHE", "PROJECT_CACHE"), ("CHECKPOINT", "LOAD_CHECKPOINT")):
            assert f"(r0) {read} []" in said[0]
            assert f"(r0) {read} ['what is in {kind}']" in said[1]
        assert all(holding(cluster.root, f"what is in {kind}") for kind in kinds)

        wait_until(lambda: shell.run("bdn-admin", "projects", "rm", "stored").code == 0, what="the unused project")
        shell.told("bdn-admin", "evict", "--all", "--force", "--purge")
        shell.told("bdn-admin", "gc", "--grace", "0s")
        for kind in kinds:
            wait_until(lambda kind=kind: not holding(cluster.root, f"what is in {kind}"), what=f"the end of {kind}")
