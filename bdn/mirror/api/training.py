"""The routes of training jobs, as clients of ``/v1`` call them: every success is 200."""

from typing import Annotated, Final

from fastapi import Path, Query

from bdn.mirror.api.callers import TeamController
from bdn.mirror.training.jobs import TrainingJobs
from bdn.net.api_server import new_router, provided
from bdn.wire.training_schema import (
    DeletedJob,
    LogPage,
    LogQuery,
    ProjectJobAnswer,
    ProjectJobsAnswer,
    TrainingJobAnswer,
    TrainingJobPatch,
    TrainingJobRequest,
    TrainingJobsAnswer,
    TrainingJobSearch,
)

_Jobs = Annotated[TrainingJobs, provided(TrainingJobs)]
_Id = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,64}$")]

_JOB: Final = "/v1/training_projects/{project_id}/jobs/{job_id}"

training_router = new_router("training")


@training_router.post("/v1/training_projects/{project_id}/jobs", summary="Create a training job")
async def create_job(
    jobs: _Jobs, project_id: _Id, body: TrainingJobRequest, caller: TeamController
) -> TrainingJobAnswer:
    return TrainingJobAnswer(training_job=await jobs.create(caller, project_id, body))


@training_router.get("/v1/training_projects/{project_id}/jobs", summary="A project's training jobs, newest first")
async def list_jobs(jobs: _Jobs, project_id: _Id, caller: TeamController) -> ProjectJobsAnswer:
    return await jobs.of_project(caller, project_id)


@training_router.post("/v1/training_jobs/search", summary="Training jobs by status, project or id")
async def search_jobs(jobs: _Jobs, body: TrainingJobSearch, caller: TeamController) -> TrainingJobsAnswer:
    return TrainingJobsAnswer(training_jobs=await jobs.search(caller, body))


@training_router.get(_JOB, summary="A training job")
async def get_job(jobs: _Jobs, project_id: _Id, job_id: _Id, caller: TeamController) -> ProjectJobAnswer:
    return await jobs.get(caller, project_id, job_id)


@training_router.patch(_JOB, summary="Change a PENDING training job")
async def change_job(
    jobs: _Jobs, project_id: _Id, job_id: _Id, body: TrainingJobPatch, caller: TeamController
) -> TrainingJobAnswer:
    return TrainingJobAnswer(training_job=await jobs.change(caller, project_id, job_id, body))


@training_router.post(f"{_JOB}/stop", summary="Stop a training job; idempotent")
async def stop_job(jobs: _Jobs, project_id: _Id, job_id: _Id, caller: TeamController) -> TrainingJobAnswer:
    return TrainingJobAnswer(training_job=await jobs.stop(caller, project_id, job_id))


@training_router.post(f"{_JOB}/recreate", summary="Repeat a training job as a new one")
async def recreate_job(jobs: _Jobs, project_id: _Id, job_id: _Id, caller: TeamController) -> TrainingJobAnswer:
    return TrainingJobAnswer(training_job=await jobs.recreate(caller, project_id, job_id))


@training_router.delete(_JOB, summary="Delete a training job that has ended")
async def remove_job(jobs: _Jobs, project_id: _Id, job_id: _Id, caller: TeamController) -> DeletedJob:
    return await jobs.remove(caller, project_id, job_id)


@training_router.post(f"{_JOB}/logs", summary="Lines of a training job's log")
async def search_log(jobs: _Jobs, project_id: _Id, job_id: _Id, body: LogQuery, caller: TeamController) -> LogPage:
    return await jobs.log(caller, project_id, job_id, body)


@training_router.get(f"{_JOB}/logs", summary="The same, by a query")
async def read_log(
    jobs: _Jobs, project_id: _Id, job_id: _Id, query: Annotated[LogQuery, Query()], caller: TeamController
) -> LogPage:
    return await jobs.log(caller, project_id, job_id, query)
