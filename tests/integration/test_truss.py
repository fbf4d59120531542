"""The real truss through ``bdn truss``, and the Python client of Baseten, against a mirror that listens."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from bdn.mirror.db.secrets import new_key
from bdn.wire.cache_schema import FileSummary, pack
from tests.support.mirror.job import Job
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test
from tests.support.mirror.training_jobs import JobAgent, add_ended_job, gpus
from tests.support.network.service import listening
from tests.support.services.commands import Finished, Shell

pytest_plugins = ("tests.support.mirror.fixtures",)
CLIENTS: Final = Path(__file__).parents[2] / ".venv-truss/bin"
pytestmark = pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it")
TOKEN: Final = "operator-token"
JOB: Final = "j000000001"
ENTRY: Final = {"modified": "2026-11-28T05:00:00Z", "file_type": "file", "permissions": "-rw-r--r--", "size_bytes": 7}
DEPLOY: Final = f"""
from truss.base.truss_config import AcceleratorSpec
from truss_train import (
    CheckpointList, Compute, DeployCheckpointsConfig, DeployCheckpointsRuntime, FullCheckpoint, SecretReference,
)
deploy_checkpoints = DeployCheckpointsConfig(
    model_name="m",
    checkpoint_details=CheckpointList(checkpoints=[FullCheckpoint(training_job_id="{JOB}", checkpoint_name="checkpoint-24")]),
    compute=Compute(accelerator=AcceleratorSpec(accelerator="H100", count=1)),
    runtime=DeployCheckpointsRuntime(environment_variables={{"HF_TOKEN": SecretReference(name="hf_access_token"), "A": "b"}}),
)
"""


@dataclass
class User:
    """Has a project of a name with spaces, a job in it with a checkpoint, and truss in PATH."""

    mirror: MirrorUnderTest
    shell: Shell
    url: str
    project: Json

    async def truss(self, *arguments: str, **environment: str) -> Finished:
        shell = replace(self.shell, extra=self.shell.extra | environment)
        return await asyncio.to_thread(shell.run, "bdn", "truss", *arguments)


@pytest.fixture
async def user(tmp_path: Path) -> AsyncIterator[User]:
    guarded: Json = {"auth": "token", "token": TOKEN, "bearer": TOKEN, "secrets_key": new_key()}
    async with mirror_under_test(tmp_path / "mirror", serve=True, **guarded) as mirror:
        await JobAgent(mirror, "a", gpus(1, "H100")).beat()
        made = await mirror.http.post("/v1/training_projects", json={"training_project": {"name": "my tune"}})
        project = made.json()["training_project"]
        await add_ended_job(mirror, project["id"], JOB)
        job = Job(mirror, TOKEN)
        async with job.plane, listening(mirror.service.api) as url:
            await job.push({"x.bin": b"x"}, f"bt://{project['id']}@{JOB}/checkpoint-24", checkpoint_type="full")
            environment = {
                "PATH": f"{CLIENTS}:{os.environ['PATH']}",
                "BDN_URL": url,
                "BDN_TOKEN": TOKEN,
                "TRUSS_NO_UPDATE_CHECK": "1",
                "COLUMNS": "200",
            }
            yield User(mirror, Shell(tmp_path, environment, is_forked=True), url, project)


async def test_the_cache_of_a_project__is_summarized_also_with_a_no_proxy(user: User) -> None:
    cache = {"project": user.project["id"], "cluster": "c", "volume_id": "0" * 32}
    await user.mirror.http.post("/caches", json=cache)
    entry = FileSummary.model_validate({**ENTRY, "path": "user_artifacts/tokens.bin"})
    sums = {"volume_id": "0" * 32, "timestamp": ENTRY["modified"], "size_bytes": 7, "files": 1}
    path = f"/caches/{user.project['id']}/c/summary"
    assert (await user.mirror.http.put(path, json={**sums, "packed": pack([entry])})).status_code == 200
    done = await user.truss("train", "cache", "summarize", "my tune", "-o", "json", NO_PROXY="localhost,127.0.0.1")
    assert done.code == 0, done.out + done.err
    assert done.document["project_id"] == user.project["id"]
    assert [(one["path"], one["size_bytes"]) for one in done.document["files"]] == [("user_artifacts/tokens.bin", 7)]


async def test_what_is_refused__is_said_and_ends_with_truss_own_exit_code(user: User) -> None:
    unknown = await user.truss("train", "cache", "summarize", "no-such")
    assert unknown.code == 1, unknown.out
    assert f"{user.project['id']} (my tune)" in " ".join(unknown.out.split())
    session = await user.truss("train", "update_session", JOB, "--trigger", "on_demand")
    assert session.code == 1
    assert "an interactive session is not supported here" in " ".join(session.out.split())
    nobody = await user.truss("train", "capacity", "view", BDN_TOKEN="nonsense")
    assert nobody.code == 1
    assert "the token is unknown to this mirror" in " ".join(nobody.out.split())


async def test_a_checkpoint__is_configured_for_serving_in_a_dry_run_alone(user: User) -> None:
    config = user.shell.root / "deploy.py"
    config.write_text(DEPLOY)
    out = user.shell.root / "written"
    asked = ("train", "deploy_checkpoints", "--config", str(config), "--truss-config-output-dir", str(out))
    done = await user.truss(*asked, "--dry-run")
    assert done.code == 0, done.out + done.err
    written = (out / "config.yaml").read_text()
    for line in (
        "rank-0/checkpoint-24/",
        f"training_job_id: {JOB}",
        "hf_access_token: null",
        "accelerator: H100",
        "A: b",
    ):
        assert line in written, written
    served = await user.truss(*asked)
    assert served.code != 0
    assert f"bt://my tune@{JOB}/checkpoint-24" in " ".join((served.out + served.err).split())


PARSED: Final = """
import json, sys
from baseten.client import ManagementClient
from baseten.client.managementapi import UpsertSecretRequest, UpsertTrainingProject, UpsertTrainingProjectRequest
project, job = sys.argv[3:]
of = {"training_project_id": project}
with ManagementClient(api_key=sys.argv[2], base_url_override=sys.argv[1]) as client:
    api, found = client.api, {}
    request = UpsertTrainingProjectRequest(training_project=UpsertTrainingProject(name="other"))
    found["made"] = api.post_training_projects(request=request)
    found["projects"] = api.get_training_projects()
    found["project"] = api.get_training_projects_training_project_id(**of)
    found["summary"] = api.get_training_projects_cache_summary(**of)
    of_job = {**of, "training_job_id": job}
    found["checkpoints"] = api.get_training_projects_jobs_checkpoints(**of_job)
    found["files"] = api.get_training_projects_jobs_checkpoint_files(**of_job)
    found["metrics"] = api.get_training_projects_jobs_metrics(**of_job)
    found["archive"] = api.get_training_projects_jobs_download(**of_job)
    found["codes"] = api.get_training_projects_jobs_auth_codes(**of_job)
    found["secret"] = api.post_secrets(request=UpsertSecretRequest(name="hf", value="x"))
    found["secrets"] = api.get_secrets()
    found["gone"] = api.delete_secrets(secret_name="hf")
    found["teams"] = api.get_teams()
    found["of_team"] = api.get_teams_secrets(team_id=found["teams"].teams[0].id)
    found["capacity"] = api.get_training_capacity()
    found["deleted"] = api.delete_training_projects(training_project_id=found["made"].training_project.id)
print(json.dumps({name: one.model_dump(mode="json") for name, one in found.items()}))
"""


async def test_the_python_client__parses_every_answer(user: User) -> None:
    command = [str(CLIENTS / "python"), "-c", PARSED, user.url, TOKEN, user.project["id"], JOB]
    run = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [one["name"] for one in found["projects"]["training_projects"]] == ["other", "my tune"]
    assert found["project"]["training_project"]["latest_job"]["id"] == JOB
    assert found["checkpoints"]["checkpoints"][0]["checkpoint_id"] == "checkpoint-24"
    (file,) = found["files"]["presigned_urls"]
    assert (file["relative_file_name"], file["url"].startswith(f"{user.url}/files/")) == ("checkpoint-24/x.bin", True)
    assert [one["name"] for one in found["secrets"]["secrets"]] == ["hf"]
    assert found["deleted"] == {"id": found["made"]["training_project"]["id"], "deleted": True}
