"""Clients of Baseten, unmodified, against a mirror with tokens and teams: truss, and the package baseten for Python."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from bdn.mirror.db.secrets import new_key
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import ending_ranks, needs_bwrap
from tests.support.services.cluster import Cluster
from tests.support.services.commands import LONGEST_SECONDS, Shell
from tests.support.services.training import CLIENTS, User, agent, over

pytestmark = [
    pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it"),
    needs_bwrap,
    needs_mounts,
]
TOKEN: Final = "operator-token"
TEAMS: Final = ("research", "serving")
NAME: Final = "my tune"


@pytest.fixture
def cluster(backend: str, tmp_path: Path) -> Iterator[Cluster]:
    with unmounting(tmp_path), ending_ranks(tmp_path):
        cluster = Cluster(tmp_path, {"BDN_AUTH": "token", "BDN_TOKEN": TOKEN, "BDN_SECRETS_KEY": new_key()})
        with cluster.mirror():
            yield cluster


def token(shell: Shell, *options: str) -> str:
    words = ("tokens", "create", "user", "--organisation", "default", "--role", "controller")
    return str(shell.told("bdn-admin", *words, *options)["token"])


def user(cluster: Cluster, shell: Shell, bearer: str) -> User:
    """With a NO_PROXY past which truss would miss the forwarder."""
    environment = {"BDN_TOKEN": bearer, "NO_PROXY": "localhost,.localhost", "no_proxy": "localhost,.localhost"}
    return User(cluster, replace(shell, extra={**shell.extra, **environment}))


@pytest.mark.production
def test_teams__have_projects_of_one_name_and_see_only_their_own(cluster: Cluster) -> None:
    with agent(cluster) as shell:
        for team in TEAMS:
            shell.told("bdn-admin", "teams", "create", team)
        whole = user(cluster, shell, token(shell))
        members = {team: user(cluster, shell, token(shell, "--team", team)) for team in TEAMS}
        jobs = {team: whole.start(NAME, f"echo pushed for {team}", team=team) for team in TEAMS}
        assert [over(whole, job) for job in jobs.values()] == [("COMPLETED", "")] * 2
        projects = {team: whole.job(job)["training_project_id"] for team, job in jobs.items()}
        assert len(set(projects.values())) == 2
        for team, other in (TEAMS, TEAMS[::-1]):
            member = members[team]
            assert f"pushed for {team}" in member.logs(jobs[team])
            listed = member.truss("view", "--project", NAME).out
            assert (jobs[team] in listed, jobs[other] in listed) == (True, False)
            assert projects[other] not in member.truss("view").out
            assert "No training jobs found" in member.truss("view", "--job-id", jobs[other]).err

        team, other = TEAMS
        member = members[team]
        for words in (("logs",), ("stop",), ("recreate",)):
            refused = member.truss(*words, "--job-id", jobs[other])
            assert (refused.code != 0, "pushed" in refused.out) == (True, False), words
        refused = member.truss("push", str(next(shell.root.glob("job-*/config.py"))), "--team", other)
        assert refused.code != 0
        assert f"Team '{other}' does not exist" in " ".join((refused.out + refused.err).split())
        again = member.start(NAME, "echo $BT_TRAINING_PROJECT_NAME, once more")  # of its only team
        assert over(member, again) == ("COMPLETED", "")
        assert whole.job(again)["training_project_id"] == projects[team]
        assert f"{NAME}, once more" in member.logs(again)


CALLS: Final = """
import json, re, sys, time
from baseten.client import ManagementClient
from baseten.client import managementapi as models
url, token, longest = sys.argv[1:]
deadline = time.monotonic() + float(longest)
api, called, found = ManagementClient(api_key=token, base_url_override=url).api, set(), {}

def call(name, request=None, **given):
    called.add(name)
    return getattr(api, name)(**given, **({} if request is None else {"request": request}))

def until(condition):
    while not (last := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return last

def refused(name, *request, **given):
    try:
        call(name, *request, **given)
    except models.ResponseError as error:
        assert error.status_code == 400 and json.loads(error.body)["code"] == "NOT_SUPPORTED", error
    else:
        raise AssertionError(name)

def project(name):
    return models.UpsertTrainingProjectRequest(training_project=models.UpsertTrainingProject(name=name))

def create(*commands):
    runtime = {
        "start_commands": commands,
        "environment_variables": {"PLAIN": "x", "SECRET": {"name": "of-team"}},
        "cache_config": {"enabled": True},
        "checkpointing_config": {"enabled": True, "volume_size_gib": 1},
    }
    job = {"image": {"base_image": "python:3.11"}, "compute": {"memory": "1Gi"}, "runtime": runtime}
    request = models.CreateTrainingJobRequest.model_validate({"training_job": job})
    return call("post_training_projects_jobs", request, **of).training_job.id

def reached(job, status):
    def is_there():
        one = call("get_training_projects_jobs_training_job_id", **of, training_job_id=job).training_job
        return one if one.current_status == f"TRAINING_JOB_{status}" else None
    return until(is_there)

team = call("get_teams").teams[0].id
of = {"training_project_id": call("post_training_projects", project("of python")).training_project.id}
of_team = call("post_teams_training_projects", project("of team"), team_id=team).training_project
call("post_secrets", models.UpsertSecretRequest(name="own", value="x"))
call("post_teams_secrets", models.UpsertSecretRequest(name="of-team", value="y"), team_id=team)
found["secrets"] = [one.name for one in call("get_secrets").secrets]
assert found["secrets"] == [one.name for one in call("get_teams_secrets", team_id=team).secrets]
call("get_blobs_credentials_train")
call("get_training_capacity")

made = "mkdir $BT_CHECKPOINT_DIR/checkpoint-1; echo 1 > $BT_CHECKPOINT_DIR/checkpoint-1/model.pt"
job = create(made, "echo kept > $BT_PROJECT_CACHE_DIR/kept; echo $PLAIN$SECRET")
reached(job, "COMPLETED")
of_job = {**of, "training_job_id": job}
found["listed"] = [one.id for one in call("get_training_projects_jobs", **of).training_jobs] == [job]
(searched,) = call("post_training_jobs_search", models.SearchTrainingJobsRequest(job_id=job)).training_jobs
found["status"] = searched.current_status
found["latest"] = call("get_training_projects_training_project_id", **of).training_project.latest_job.id == job
found["projects"] = sorted(one.name for one in call("get_training_projects").training_projects)
lines = call("get_training_projects_jobs_logs", **of_job).logs
assert lines == call("post_training_projects_jobs_logs", models.GetTrainingJobLogsRequest(), **of_job).logs
found["lines"] = [one.message for one in reversed(lines) if one.replica]
call("get_training_projects_jobs_metrics", **of_job)
call("post_training_projects_jobs_metrics", models.GetTrainingJobMetricsRequest(), **of_job)
call("get_training_projects_jobs_auth_codes", **of_job)
call("get_training_projects_jobs_download", **of_job)
found["checkpoints"] = [one.checkpoint_id for one in call("get_training_projects_jobs_checkpoints", **of_job).checkpoints]
urls = call("get_training_projects_jobs_checkpoint_files", **of_job).presigned_urls
found["files"] = [one.relative_file_name for one in urls]
summary = until(lambda: call("get_training_projects_cache_summary", **of).file_summaries)
found["cache"] = [one.path for one in summary]

first = create("sleep 86399")
reached(first, "RUNNING")
second = create("true")
reached(second, "PENDING")
patch = models.UpdateTrainingJobRequest(priority=7)
found["priority"] = call("patch_training_projects_jobs", patch, **of, training_job_id=second).training_job.priority
third = call("post_training_projects_jobs_recreate", **of_job).training_job.id
for one in (third, second, first):
    call("post_training_projects_jobs_stop", models.StopTrainingJobRequest(), **of, training_job_id=one)
for one in (third, second, first):
    reached(one, "STOPPED")
found["deleted"] = [
    call("delete_training_projects_jobs", **of, training_job_id=one).deleted for one in (job, first, second, third)
]

def is_deleted():  # its node may still report the cache as mounted
    try:
        return call("delete_training_projects", **of).deleted
    except models.ResponseError as error:
        assert error.status_code == 409, error
until(is_deleted)
call("delete_training_projects", training_project_id=of_team.id)
call("delete_secrets", secret_name="own")
call("delete_teams_secrets", team_id=team, secret_name="of-team")

refused("get_training_jobs_queue_context", training_job_id=job)
refused("patch_training_capacity", models.PatchTeamTrainingGpuCapacityRequest(team_id=team, gpu_type="H100", max_gpus=1))
session = {**of_job, "session_id": "x"}
refused("patch_training_projects_jobs_interactive_sessions", models.PatchInteractiveSessionRequest(), **session)
refused("post_training_projects_jobs_ssh_sign", models.SignSSHCertificateRequest(public_key="x"), **of_job)
known = {name for name in dir(api) if re.search("_(training|secrets|teams_secrets|teams_training)", name)}
found["not called"] = sorted(known - called)
print(json.dumps(found))
"""


@pytest.mark.production
def test_the_python_client__parses_the_answer_of_every_call(cluster: Cluster) -> None:
    with agent(cluster) as shell:
        command = [str(CLIENTS / "python"), "-c", CALLS, cluster.url, token(shell), str(LONGEST_SECONDS)]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found == {
        "secrets": ["of-team", "own"],
        "listed": True,
        "status": "TRAINING_JOB_COMPLETED",
        "latest": True,
        "projects": ["of python", "of team"],
        "lines": [one for one in found["lines"] if one.startswith("bdn: ")] + ["xy"],
        "checkpoints": ["checkpoint-1"],
        "files": ["checkpoint-1/model.pt"],
        "cache": ["user_artifacts", "user_artifacts/kept"],
        "priority": 7,
        "deleted": [True] * 4,
        "not called": [],
    }
