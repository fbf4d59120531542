"""Users with the unmodified truss, and agents that run their jobs."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.support.agent.runs import left_of_runs
from tests.support.mirror.training_jobs import TERMINAL
from tests.support.services.cluster import Cluster
from tests.support.services.commands import ROOT, Finished, Shell, wait_until

CLIENTS: Final = ROOT / ".venv-truss/bin"
CONFIG: Final = """
from truss.base.truss_config import AcceleratorSpec, DockerAuthType, WeightsSource
from truss_train import (
    BasetenCheckpoint, CacheConfig, CheckpointingConfig, Compute, Image, LoadCheckpointConfig, Runtime, SecretReference,
    TrainingJob, TrainingProject,
)
from truss_train.definitions import DockerAuth, RegistrySecretDockerAuth

training_project = TrainingProject(name={project!r}, job=TrainingJob(
    image=Image({image}),
    compute=Compute(node_count={nodes}, {compute}),
    runtime=Runtime(start_commands={commands!r}, environment_variables={variables}, {runtime}),
    weights=[{weights}],
))
"""


@dataclass
class User:
    """Has truss in PATH, and a folder for each job's configuration. ``said``: the last push's output, in one line."""

    cluster: Cluster
    shell: Shell
    said: str = ""

    def truss(self, *words: str, **environment: str) -> Finished:
        extra = {"PATH": f"{CLIENTS}:{os.environ['PATH']}", "TRUSS_NO_UPDATE_CHECK": "1", "COLUMNS": "250"}
        user = replace(self.shell, extra={**self.shell.extra, **extra, **environment})
        return user.run("bdn", "truss", "train", *words)

    def push(self, project: str, *commands: str, **parts: Any) -> str:
        """Push a job and follow it to its end. ``parts`` are as of ``start``. Returns its id."""
        return self.start(project, *commands, options=("--tail",), **parts)

    def push_config(self, config: Path, *options: str) -> str:
        """Push the job that a file describes. Returns its id."""
        done = self.truss("push", str(config), *options)
        self.said = " ".join(done.out.split())
        assert done.code == 0, done.out + done.err
        found = re.search(r"--job-id (\w{10})", self.said)
        assert found is not None, done.out
        return found[1]

    def start(
        self,
        project: str,
        *commands: str,
        files: Mapping[str, str] | None = None,
        team: str | None = None,
        options: Sequence[str] = (),
        **parts: Any,
    ) -> str:
        """Push a job with these ``files``, whose configuration has these ``parts``. Returns its id."""
        folder = self.shell.root / f"job-{len(list(self.shell.root.glob('job-*')))}"
        folder.mkdir(parents=True)
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)
        given = {"nodes": 1, "compute": "", "variables": "{}", "runtime": "", "weights": ""}
        given |= {"image": 'base_image="python:3.11"'} | parts
        (folder / "config.py").write_text(CONFIG.format(project=project, commands=list(commands), **given))
        of_team = () if team is None else ("--team", team)
        return self.push_config(folder / "config.py", *of_team, *options)

    def job(self, job: str) -> Any:
        with self.cluster.http() as http:
            (found,) = http.post("/v1/training_jobs/search", json={"job_id": job}).json()["training_jobs"]
            return found

    def logs(self, job: str) -> str:
        return self.truss("logs", "--job-id", job).out


def agent(cluster: Cluster, node: str = "node-1", **environment: str) -> AbstractContextManager[Shell]:
    """An agent that runs jobs, with the training caches in ``volume`` of the cluster's root."""
    given = {
        "BDN_AGENT_ROLES": "node,cluster,job",
        "BDN_AGENT_JOB_LAUNCHER": "bwrap",
        "BDN_AGENT_VOLUME_ROOT": str(cluster.root / "volume"),
        "BDN_AGENT_EXPOSURE": "bind",
        "BDN_AGENT_SETTLE_SECONDS": "0",
    }
    return cluster.agent(node, **given | environment)


def ended(user: User, job: str) -> tuple[str, str]:
    """Status and reason."""
    found = user.job(job)
    return found["current_status"].removeprefix("TRAINING_JOB_"), found["error_message"] or ""


def over(user: User, job: str) -> tuple[str, str]:
    """Status and reason, once the job has ended."""
    wait_until(lambda: ended(user, job)[0] in TERMINAL, seconds=300, what=f"the end of job {job}")
    return ended(user, job)


def project_cache(user: User, job: str) -> Path:
    """Where the job's BT_PROJECT_CACHE_DIR is on this machine."""
    project = user.job(job)["training_project_id"]
    (found,) = user.cluster.root.glob(f"volume/*/projects/{project}/user_artifacts")
    return found


def left_over(shell: Shell) -> list[str]:
    """What a node still has of its jobs: processes, mounts, run directories, stages, job volumes."""
    return left_of_runs(shell.data)
