"""Training jobs by the unmodified truss: pushed, staged, run on agents, and seen from outside."""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import needs_bwrap
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Finished, Shell, wait_until

CLIENTS: Final = Path(__file__).parents[2] / ".venv-truss/bin"
pytestmark = [
    pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it"),
    needs_bwrap,
    needs_mounts,
]
MODEL: Final = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096}
DATA: Final = {"train/a.jsonl": b"[1]\n" * 1000, "train/b.jsonl": b"[2]\n"}
CONFIG: Final = """
from truss.base.truss_config import WeightsSource
from truss_train import CacheConfig, CheckpointingConfig, Compute, Image, Runtime, SecretReference, TrainingJob, TrainingProject

training_project = TrainingProject(name={project!r}, job=TrainingJob(
    image=Image(base_image="python:3.11"),
    compute=Compute(node_count={nodes}),
    runtime=Runtime(start_commands={commands!r}, environment_variables={variables}, {runtime}),
    weights=[{weights}],
))
"""
WEIGHTS: Final = (
    'WeightsSource(source="hf://org/model", mount_location="/app/models/org/model"), '
    'WeightsSource(source="s3://data/train", mount_location="/app/data")'
)


class User:
    """Has truss in PATH, and a folder for each job's configuration."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    def truss(self, *words: str, **environment: str) -> Finished:
        extra = {"PATH": f"{CLIENTS}:{os.environ['PATH']}", "TRUSS_NO_UPDATE_CHECK": "1", "COLUMNS": "250"}
        return self.shell.run("bdn", "truss", "train", *words, **extra, **environment)

    def push(self, project: str, *commands: str, files: dict[str, str] | None = None, **parts: Any) -> str:
        """Push a job and follow it to its end. Returns its id."""
        folder = self.shell.root / f"job-{len(list(self.shell.root.glob('job-*')))}"
        folder.mkdir(parents=True)
        for name, content in (files or {}).items():
            (folder / name).write_text(content)
        given = {"nodes": 1, "variables": "{}", "runtime": "", "weights": ""} | parts
        (folder / "config.py").write_text(CONFIG.format(project=project, commands=list(commands), **given))
        done = self.truss("push", str(folder / "config.py"), "--tail")
        self.said = " ".join(done.out.split())
        assert done.code == 0, done.out + done.err
        found = re.search(r"--job-id (\w{10})", self.said)
        assert found is not None, done.out
        return found[1]

    def job(self, job: str) -> Any:
        with self.cluster_http() as http:
            (found,) = http.post("/v1/training_jobs/search", json={"job_id": job}).json()["training_jobs"]
            return found

    def logs(self, job: str) -> str:
        return self.truss("logs", "--job-id", job).out

    cluster_http: Any = None


@pytest.fixture
def cluster(backend: str, tmp_path: Path, hub: Hub, s3: S3Server) -> Iterator[Cluster]:
    hub.repo("org/model").commit(MODEL)
    s3.bucket("data", public=True).put(DATA)
    with unmounting(tmp_path):
        extra = {"HF_ENDPOINT": hub.url, "AWS_ENDPOINT_URL_S3": s3.url}
        cluster = Cluster(tmp_path, extra)
        with cluster.mirror():
            yield cluster


def user_of(cluster: Cluster, shell: Shell) -> User:
    user = User(shell)
    user.cluster_http = cluster.http
    return user


def left_over(shell: Shell) -> list[str]:
    """Stages, volumes and run directories of a node."""
    stages = [one["stage_id"] for one in shell.run("bdn", "ls", "--json").document.get("stages", [])]
    volumes = [one["id"] for one in shell.run("bdn", "volumes", "ls", "--json").document["items"]]
    runs = [str(path) for path in shell.data.glob("**/runs/[a-z0-9]*")]
    return [*stages, *volumes, *runs]


SCRIPT: Final = """
import hashlib, os, subprocess
for place in ("/app/models/org/model", "/app/data"):
    for folder, _, names in sorted(os.walk(place)):
        for name in sorted(names):
            path = os.path.join(folder, name)
            print("FILE", path, hashlib.sha256(open(path, "rb").read()).hexdigest())
            for refused in (lambda: open(path, "ab"), lambda: os.remove(path), lambda: open(folder + "/new", "w")):
                try:
                    refused()
                    print("WRITTEN", path)
                except OSError:
                    pass
    if subprocess.run(["mount", "-o", "remount,rw", place], capture_output=True).returncode == 0:
        print("REMOUNTED", place)
print("UID", os.getuid())
"""


def bytes_from(hub: Hub, s3: S3Server) -> int:
    """Of files: listings are requests without a range."""
    requests = [*hub.log.find(method="GET"), *s3.log.find(method="GET")]
    return sum(one.bytes_served for one in requests if "range" in one.headers)


@pytest.mark.production
def test_a_job__finds_its_weights_read_only_and_a_second_one_moves_no_byte(
    cluster: Cluster, hub: Hub, s3: S3Server
) -> None:
    with cluster.agent(
        "node-1", BDN_AGENT_ROLES="node,cluster,job", BDN_AGENT_JOB_LAUNCHER="bwrap", BDN_AGENT_EXPOSURE="bind"
    ) as shell:
        user = user_of(cluster, shell)
        first = user.push("demo", "python3 script.py", files={"script.py": SCRIPT}, weights=WEIGHTS)
        assert "completed successfully" in user.said
        said = user.said.replace(" ", "")
        for place, files in (("/app/models/org/model", MODEL), ("/app/data", DATA)):
            for name, content in files.items():
                path = f"{place}/{name.removeprefix('train/') if place == '/app/data' else name}"
                assert f"FILE{path}{hashlib.sha256(content).hexdigest()}" in said
        assert "UID0" in said
        assert "WRITTEN" not in said
        assert "REMOUNTED" not in said
        assert user.job(first)["current_status"] == "TRAINING_JOB_COMPLETED"
        assert "TRAINING_JOB_COMPLETED" in user.truss("view", "--job-id", first).out
        assert not Path("/app").exists()
        wait_until(lambda: not left_over(shell), what="an empty node")

        moved = bytes_from(hub, s3)
        second = user.push("demo", "python3 script.py", files={"script.py": SCRIPT}, weights=WEIGHTS)
        assert user.job(second)["current_status"] == "TRAINING_JOB_COMPLETED"
        assert bytes_from(hub, s3) == moved
