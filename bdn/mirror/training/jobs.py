"""Training jobs as their callers see them: created, listed, changed, stopped, repeated and deleted.

For a caller without a team, a method covers the whole organisation; for others, other teams' jobs are NOT_FOUND.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bdn.core.errors import InUseError, NotFoundError
from bdn.core.training.environment import ARCHIVE, ignored
from bdn.core.training.states import ACTIVE
from bdn.core.units import counted
from bdn.mirror.access.callers import Caller
from bdn.mirror.db import projects, training
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.db.projects import new_id
from bdn.mirror.db.tables import ProjectRow, TrainingJobRow
from bdn.mirror.db.training import JobState
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.jobs.archives import Archives
from bdn.mirror.jobs.projects import Projects
from bdn.mirror.training.documents import job_document, project_document, spec_of
from bdn.mirror.training.loading import extra_source
from bdn.mirror.training.logs import Logs
from bdn.mirror.training.steps import Steps, is_own_mirror
from bdn.wire.run_schema import NodeCapacity
from bdn.wire.training_schema import (
    PREFIX,
    DeletedJob,
    LogPage,
    LogQuery,
    ProjectJobAnswer,
    ProjectJobsAnswer,
    TrainingJob,
    TrainingJobPatch,
    TrainingJobRequest,
    TrainingJobSearch,
    TrainingJobSpec,
    TrainingProject,
)


class WrongStateError(InUseError):
    """``holders`` is the job's status. ``remedy`` says in which one the request is possible."""

    remedy: str

    def describe(self) -> str:
        return f"{self.what} is {' and '.join(self.holders)}: {self.remedy}"


@dataclass(frozen=True)
class TrainingJobs:
    database: Database
    requests: MirrorRequests
    projects: Projects
    archives: Archives
    steps: Steps
    logs: Logs

    async def create(self, caller: Caller, project: str, request: TrainingJobRequest) -> TrainingJob:
        """Record a job. What is wrong in the request raises ``CallerError`` and records none."""
        spec = request.training_job
        spec.check()
        self.requests.check(spec.sources(), caller.organisation, caller.team)
        async with self.database.read() as session:
            found = await _project(session, caller, project)
        job = new_id()
        archive: str | None = None
        for artifact in spec.runtime.artifacts or ():
            archive = await self.archives.commit(caller.organisation, caller.team, artifact.s3_key, found.id, job)
        warnings = _warnings(spec, request.unknown_fields())
        return await self._insert(caller, found, job, spec, archive=archive, warnings=warnings)

    async def recreate(self, caller: Caller, project: str, job: str) -> TrainingJob:
        """A new job with the same request and archive."""
        before = await self._get(caller, project, job)
        spec, fresh = spec_of(before.row), new_id()
        archive: str | None = None
        if is_own_mirror(before.row.extras):
            archive = await self.archives.reuse(before.project.id, job, fresh)
        warnings = [f"recreated from training job {job}", *_warnings(spec, [])]
        return await self._insert(caller, before.project, fresh, spec, archive=archive, warnings=warnings)

    async def _insert(
        self,
        caller: Caller,
        project: ProjectRow,
        job: str,
        spec: TrainingJobSpec,
        *,
        archive: str | None,
        warnings: list[str],
    ) -> TrainingJob:
        extras = [] if archive is None else [extra_source(archive, ARCHIVE, is_archive=True)]
        async with self.database.write() as session:
            if not await projects.lock(session, project.id):
                raise NotFoundError(f"project {project.id}")
            now = round(self.database.now(), 6)
            number = await training.next_number(session, project.id)
            row = TrainingJobRow(
                id=job,
                organisation=caller.organisation,
                requester_team=caller.team,
                project=project.id,
                number=number,
                name=spec.name or f"job-{number}",
                status="CREATED",
                since=now,
                created_at=now,
                updated_at=now,
                priority=spec.priority or 0,
                availability_model=spec.compute.availability_model or "dedicated",
                request=spec.model_dump(mode="json"),
                extras=extras,
                ranks=[],
            )
            await training.insert_job(session, row)
            sources = counted(len(spec.weights or ()) + len(extras), "source")
            await self.steps.say(session, row, now, f"the job is created; mirroring {sources}", *warnings)
        return job_document(JobState(row, project))

    async def _get(self, caller: Caller, project: str, job: str) -> JobState:
        async with self.database.read() as session:
            return await training.get(session, caller.organisation, caller.team, project, job)

    async def get(self, caller: Caller, project: str, job: str) -> ProjectJobAnswer:
        async with self.database.read() as session:
            state = await training.get(session, caller.organisation, caller.team, project, job)
            newest = await training.latest(session, caller.organisation, project)
        return ProjectJobAnswer(
            training_project=project_document(state.project, newest.get(project)), training_job=job_document(state)
        )

    async def job(self, caller: Caller, project_id: str, job_id: str) -> TrainingJob:
        return job_document(await self._get(caller, project_id, job_id))

    async def project(self, caller: Caller, project: str) -> TrainingProject:
        async with self.database.read() as session:
            row = await _project(session, caller, project)
            newest = await training.latest(session, caller.organisation, row.id)
        return project_document(row, newest.get(row.id))

    async def list_projects(self, caller: Caller) -> list[TrainingProject]:
        async with self.database.read() as session:
            found = await projects.listed(session, caller.organisation, caller.team)
            newest = await training.latest(session, caller.organisation)
        return [project_document(one.row, newest.get(one.row.id)) for one in reversed(found)]

    async def capacities(self) -> Sequence[NodeCapacity]:
        """What live agents that run jobs have, busy or not."""
        now = self.database.now()
        async with self.database.read() as session:
            found = (await training.job_agents(session, now)).values()
        return [NodeCapacity.model_validate(agent.capacity) for agent in found if agent.is_alive(now)]

    async def of_project(self, caller: Caller, project: str) -> ProjectJobsAnswer:
        async with self.database.read() as session:
            row = await _project(session, caller, project)
            found = await training.listed(session, caller.organisation, caller.team, project=row.id)
        return ProjectJobsAnswer(
            training_project=project_document(row, found[0].row if found else None),
            training_jobs=[job_document(one) for one in found],
        )

    async def search(self, caller: Caller, query: TrainingJobSearch) -> list[TrainingJob]:
        given = query.statuses
        statuses = None if given is None else [status.removeprefix(PREFIX) for status in given]
        async with self.database.read() as session:
            found = await training.listed(
                session,
                caller.organisation,
                caller.team,
                project=query.project_id,
                job=query.job_id,
                statuses=statuses,
                is_ascending=query.is_ascending,
            )
        return [job_document(one) for one in found]

    async def change(self, caller: Caller, project: str, job: str, patch: TrainingJobPatch) -> TrainingJob:
        """Change priority or availability model. Raises ``WrongStateError`` unless the job is PENDING."""
        state = await self._get(caller, project, job)
        async with self.database.write() as session:
            row = await _locked(session, job)
            if row.status != "PENDING":
                raise WrongStateError(f"training job {job}", (row.status,), "only a PENDING job can be changed")
            if patch.priority is not None:
                row.priority = patch.priority
            if patch.availability_model is not None:
                row.availability_model = patch.availability_model
            row.updated_at = self.database.now()
            training.note_change(session, row)
        return job_document(JobState(row, state.project))

    async def stop(self, caller: Caller, project: str, job: str) -> TrainingJob:
        """Request the end of a job; a terminal state stays. The state changes once its ranks have ended."""
        state = await self._get(caller, project, job)
        async with self.database.write() as session:
            row = await _locked(session, job)
            await self.steps.stop(session, row, self.database.now())
        return job_document(JobState(row, state.project))

    async def remove(self, caller: Caller, project: str, job: str) -> DeletedJob:
        """Delete a job that has ended, with its log, archive and checkpoints, and its copies of those it loaded.

        What was mirrored from its checkpoints stays, as do its weights.

        Raises ``WrongStateError`` while it has not ended.
        """
        state = await self._get(caller, project, job)
        if state.row.status in ACTIVE:
            raise WrongStateError(
                f"training job {job}", (state.row.status,), "stop it first, and wait until it has ended"
            )
        async with self.database.write() as session:
            await self.projects.forget_job(session, state.project, job)
            await training.remove(session, job)
        return DeletedJob(id=job, training_project_id=state.project.id)

    async def log(self, caller: Caller, project: str, job: str, query: LogQuery) -> LogPage:
        await self._get(caller, project, job)
        return LogPage(logs=await self.logs.read(job, query))


async def _project(session: ReadSession, caller: Caller, project: str) -> ProjectRow:
    """Unlike ``projects.find``, accepts no name. Raises ``NotFoundError``."""
    row = await projects.find(session, caller.organisation, project, caller.team)
    if row is None or row.id != project:
        raise NotFoundError(f"training project {project}")
    return row


async def _locked(session: WriteSession, job: str) -> TrainingJobRow:
    row = await training.lock(session, job)
    if row is None:
        raise NotFoundError(f"training job {job}")
    return row


def _warnings(spec: TrainingJobSpec, unknown: list[str]) -> list[str]:
    """Lines about what the job will not have of its request."""
    lines: list[str] = []
    if unknown:
        lines.append(f"unknown fields of the request are ignored: {', '.join(unknown)}")
    if names := ignored(spec.runtime.environment_variables or {}):
        lines.append(f"variables that begin with BT_ are BDN's own; ignored: {', '.join(names)}")
    if spec.interactive_session is not None:
        lines.append("interactive sessions are not supported: the job runs its start_commands alone")
    return lines
