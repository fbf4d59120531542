"""The routes of ``/v1`` that are not about a job's life: projects, secrets, teams, checkpoints, caches, metrics.

They answer unmodified clients of Baseten. Every success is 200: the Python client accepts nothing else.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final, NoReturn

from blake3 import blake3
from fastapi import Path, Query, Request, Response

from bdn.core.chunk import digest_in
from bdn.core.errors import NotFoundError, NotSupportedError
from bdn.core.training.states import OVER
from bdn.mirror.access.callers import Caller
from bdn.mirror.api.callers import TEXT, Controller, SecretName, TeamController
from bdn.mirror.db.tables import SecretRow
from bdn.mirror.jobs.archives import Archives
from bdn.mirror.jobs.caches import TrainingCaches
from bdn.mirror.jobs.projects import Projects
from bdn.mirror.serving.served_files import ServedFiles
from bdn.mirror.training.jobs import TrainingJobs
from bdn.mirror.upstream.sign_ins import Secrets
from bdn.net.api_server import new_router, provided
from bdn.wire.access_schema import DEFAULT_TEAM, SecretBody
from bdn.wire.cache_schema import CacheSummaryDocument
from bdn.wire.push_schema import Checkpoint
from bdn.wire.shapes import moment
from bdn.wire.training_schema import RankDocument
from bdn.wire.v1_schema import (
    ArchiveAnswer,
    AuthCodesAnswer,
    CapacityAnswer,
    CheckpointFile,
    CheckpointFiles,
    DeletedProject,
    DeletedSecret,
    JobCheckpoint,
    JobCheckpoints,
    JobMetrics,
    JobSeries,
    MetricsQuery,
    NamedSecret,
    NamedSecrets,
    NodeSeries,
    SecretUpsert,
    StorageSeries,
    TeamDocument,
    TeamsAnswer,
    TrainingProjectAnswer,
    TrainingProjectRequest,
    TrainingProjectsAnswer,
)

logger = logging.getLogger(__name__)

FILES_AT_ONCE: Final = 1000


@dataclass(frozen=True)
class ClientApi:
    """The services behind these routes. ``public_url`` begins signed addresses; None: the request's own address."""

    training: TrainingJobs
    projects: Projects
    archives: Archives
    caches: TrainingCaches
    files: ServedFiles
    secrets: Secrets
    public_url: str | None

    def address(self, request: Request) -> str:
        return self.public_url or str(request.base_url).rstrip("/")

    async def team_name(self, caller: Caller, team_id: str) -> str:
        for one in await self.projects.teams(caller.organisation, caller.team):
            if one.id == team_id:
                return one.name
        raise NotFoundError(f"team {team_id!r}")

    async def made(self, caller: Caller, team: str | None, name: str) -> TrainingProjectAnswer:
        """The project of this name, of the team, else of the caller's team, else of the team Default."""
        team = team or caller.team or DEFAULT_TEAM
        if caller.team not in (None, team):
            raise NotFoundError(f"team {team!r}")
        made = await self.projects.make_project(caller.organisation, team, name)
        return TrainingProjectAnswer(training_project=await self.training.project(caller, made.id))

    async def named_secrets(self, caller: Caller, team: str) -> NamedSecrets:
        rows = await self.secrets.table.rows(caller.organisation)
        return NamedSecrets(secrets=[_secret(row, team) for row in rows])

    async def set_secret(self, caller: Caller, team: str, body: SecretUpsert) -> NamedSecret:
        SecretBody(value=body.value).check()
        row = await self.secrets.table.set(caller.organisation, body.name, body.value)
        logger.info("secret set", extra={"secret": body.name, "organisation": caller.organisation})
        return _secret(row, team)

    async def remove_secret(self, caller: Caller, name: str) -> DeletedSecret:
        await self.secrets.table.remove(caller.organisation, name)
        logger.info("secret removed", extra={"secret": name, "organisation": caller.organisation})
        return DeletedSecret(name=name)

    async def metrics(self, caller: Caller, project_id: str, job_id: str, window: MetricsQuery) -> JobMetrics:
        job = await self.training.job(caller, project_id, job_id)
        scratch = {one.rank: _scratch_series(one, window) for one in job.bdn.ranks}
        nodes = [
            NodeSeries(node_id=f"r{rank}", metrics=JobSeries(ephemeral_storage=scratch.get(rank, StorageSeries())))
            for rank in range(job.node_count)
        ]
        cache = await self._cache_series(caller, project_id, window)
        return JobMetrics(training_job=job, per_node_metrics=nodes, cache=cache)

    async def _cache_series(self, caller: Caller, project_id: str, window: MetricsQuery) -> StorageSeries:
        """The last measurement of the project's cache in its cluster, if the window covers it."""
        caches = (await self.caches.listed(caller.organisation, caller.team)).items
        for cache in [one for one in caches if one.project_id == project_id]:
            for one in cache.directories:
                at, size = one.captured_at, one.size_bytes
                if one.cluster == cache.cluster and at is not None and size is not None and _covers(window, at):
                    return StorageSeries.of(at, size, cache.limit_bytes)
        return StorageSeries()


_Api = Annotated[ClientApi, provided(ClientApi)]
_Id = Annotated[str, Path(min_length=1, max_length=256, pattern=TEXT)]
_Offset = Annotated[int, Query(ge=0, lt=2**53)]

_JOB: Final = "/v1/training_projects/{project_id}/jobs/{job_id}"

v1_router = new_router("baseten")


# --- projects ---


@v1_router.post("/v1/training_projects", summary="Create a project, unless it exists")
async def make_training_project(
    api: _Api, body: TrainingProjectRequest, caller: TeamController
) -> TrainingProjectAnswer:
    return await api.made(caller, body.training_project.team_name, body.training_project.name)


@v1_router.post("/v1/teams/{team_id}/training_projects", summary="Create a project of a team, unless it exists")
async def make_training_project_of_team(
    api: _Api, team_id: _Id, body: TrainingProjectRequest, caller: TeamController
) -> TrainingProjectAnswer:
    return await api.made(caller, await api.team_name(caller, team_id), body.training_project.name)


@v1_router.get("/v1/training_projects", summary="Projects, newest first")
async def list_training_projects(api: _Api, caller: TeamController) -> TrainingProjectsAnswer:
    return TrainingProjectsAnswer(training_projects=await api.training.list_projects(caller))


@v1_router.get("/v1/training_projects/{project_id}", summary="A project")
async def get_training_project(api: _Api, project_id: _Id, caller: TeamController) -> TrainingProjectAnswer:
    return TrainingProjectAnswer(training_project=await api.training.project(caller, project_id))


@v1_router.delete("/v1/training_projects/{project_id}", summary="Delete a project for ever")
async def remove_training_project(api: _Api, project_id: _Id, caller: TeamController) -> DeletedProject:
    found = await api.training.project(caller, project_id)  # and not one of this name
    await api.projects.remove_project(caller.organisation, caller.team, found.id)
    return DeletedProject(id=found.id)


@v1_router.get("/v1/training_projects/{project_id}/cache/summary", summary="The last summary of a project's cache")
async def training_cache_summary(api: _Api, project_id: _Id, caller: TeamController) -> CacheSummaryDocument:
    found = await api.training.project(caller, project_id)
    return await api.caches.summary(caller.organisation, caller.team, found.id)


# --- a job's checkpoints, metrics and sessions ---


@v1_router.get(f"{_JOB}/checkpoints", summary="A job's checkpoints, oldest first")
async def job_checkpoints(api: _Api, project_id: _Id, job_id: _Id, caller: TeamController) -> JobCheckpoints:
    job = await api.training.job(caller, project_id, job_id)
    by_name: dict[str, list[Checkpoint]] = {}
    for one in await api.projects.checkpoints(caller.organisation, caller.team, project_id, job_id):
        by_name.setdefault(one.checkpoint_id, []).append(one)
    return JobCheckpoints(training_job=job, checkpoints=[_job_checkpoint(ranks) for ranks in by_name.values()])


@v1_router.get(f"{_JOB}/checkpoint_files", summary="Signed addresses of checkpoint files")
async def checkpoint_files(
    *,
    api: _Api,
    project_id: _Id,
    job_id: _Id,
    caller: TeamController,
    request: Request,
    response: Response,
    page_size: Annotated[int, Query(ge=1, lt=2**53)] = FILES_AT_ONCE,
    page_token: _Offset = 0,
) -> CheckpointFiles:
    """At most 1000 files a page. ``page_token`` is an offset into the files of all checkpoints."""
    response.headers["Cache-Control"] = "no-store"
    await api.training.job(caller, project_id, job_id)
    base, files, before = api.address(request), list[CheckpointFile](), 0
    end = page_token + min(page_size, FILES_AT_ONCE)
    for one in await api.projects.checkpoints(caller.organisation, caller.team, project_id, job_id):
        start, stop = max(0, page_token - before), min(one.files, end - before)
        before += one.files
        if start >= stop:
            continue
        digest = digest_in(one.manifest)
        files += [
            CheckpointFile(
                url=f"{base}{file.url}",
                relative_file_name=f"{one.checkpoint_id}/{file.path}",
                node_rank=one.rank,
                size_bytes=file.size_bytes,
                last_modified=one.committed_at,
            )
            for file in await api.files.listed(digest, start, stop, caller.organisation, caller.team)
        ]
    return CheckpointFiles(presigned_urls=files, next_page_token=end if end < before else None, total_count=before)


@v1_router.get(f"{_JOB}/download", summary="A signed address of the archive")
async def download(
    *, api: _Api, project_id: _Id, job_id: _Id, caller: TeamController, request: Request, response: Response
) -> ArchiveAnswer:
    response.headers["Cache-Control"] = "no-store"
    await api.training.job(caller, project_id, job_id)
    manifest = await api.archives.manifest(caller.organisation, caller.team, project_id, job_id)
    found = await api.files.listed(manifest, 0, 1, caller.organisation, caller.team) if manifest else []
    return ArchiveAnswer(artifact_presigned_urls=[f"{api.address(request)}{one.url}" for one in found])


@v1_router.post(f"{_JOB}/metrics", summary="A job's metrics of storage")
async def query_metrics(
    api: _Api, project_id: _Id, job_id: _Id, body: MetricsQuery, caller: TeamController
) -> JobMetrics:
    return await api.metrics(caller, project_id, job_id, body)


@v1_router.get(f"{_JOB}/metrics", summary="A job's metrics of storage")
async def get_metrics(
    api: _Api, project_id: _Id, job_id: _Id, window: Annotated[MetricsQuery, Query()], caller: TeamController
) -> JobMetrics:
    return await api.metrics(caller, project_id, job_id, window)


@v1_router.get(f"{_JOB}/auth_codes", summary="No codes: jobs have no interactive sessions")
async def auth_codes(api: _Api, project_id: _Id, job_id: _Id, caller: TeamController) -> AuthCodesAnswer:
    await api.training.job(caller, project_id, job_id)
    return AuthCodesAnswer()


# --- teams, secrets, capacity ---


@v1_router.get("/v1/teams", summary="Teams, oldest first")
async def list_client_teams(api: _Api, caller: TeamController) -> TeamsAnswer:
    found = await api.projects.teams(caller.organisation, caller.team)
    teams = [TeamDocument(**one.model_dump(), default=one.name == DEFAULT_TEAM) for one in found]
    return TeamsAnswer(teams=teams)


@v1_router.get("/v1/secrets", summary="Names of secrets of the organisation")
async def list_named_secrets(api: _Api, caller: TeamController) -> NamedSecrets:
    return await api.named_secrets(caller, caller.team or DEFAULT_TEAM)


@v1_router.get("/v1/teams/{team_id}/secrets", summary="Names of secrets of the organisation")
async def list_named_secrets_of_team(api: _Api, team_id: _Id, caller: TeamController) -> NamedSecrets:
    return await api.named_secrets(caller, await api.team_name(caller, team_id))


@v1_router.post("/v1/secrets", summary="Create a secret, or change its value")
async def set_named_secret(api: _Api, body: SecretUpsert, caller: Controller) -> NamedSecret:
    return await api.set_secret(caller, DEFAULT_TEAM, body)


@v1_router.post("/v1/teams/{team_id}/secrets", summary="Create a secret of the organisation, or change its value")
async def set_named_secret_of_team(api: _Api, team_id: _Id, body: SecretUpsert, caller: Controller) -> NamedSecret:
    return await api.set_secret(caller, await api.team_name(caller, team_id), body)


@v1_router.delete("/v1/secrets/{name}", summary="Delete a secret")
async def remove_named_secret(api: _Api, name: SecretName, caller: Controller) -> DeletedSecret:
    return await api.remove_secret(caller, name)


@v1_router.delete("/v1/teams/{team_id}/secrets/{name}", summary="Delete a secret of the organisation")
async def remove_named_secret_of_team(api: _Api, team_id: _Id, name: SecretName, caller: Controller) -> DeletedSecret:
    await api.team_name(caller, team_id)
    return await api.remove_secret(caller, name)


@v1_router.get("/v1/training/capacity", summary="No limits of GPU capacity")
async def capacity(_: TeamController) -> CapacityAnswer:
    return CapacityAnswer()


# --- what BDN does not have ---

_NO_SESSIONS: Final = (
    "an interactive session",
    "read the output with 'truss train logs', and push another job to try something",
)
UNSUPPORTED: Final[dict[str, tuple[tuple[str, ...], tuple[str, str]]]] = {
    f"{_JOB}/interactive_session": (("PATCH",), _NO_SESSIONS),
    f"{_JOB}/interactive_sessions/{{session_id}}": (("PATCH",), _NO_SESSIONS),
    f"{_JOB}/ssh/sign": (("POST",), ("SSH", "read the output with 'truss train logs'")),
    "/v1/api_keys": (("POST",), ("an API key", "create a token with 'bdn-admin tokens create'")),
    "/v1/training/capacity": (
        ("PATCH",),
        ("a limit of GPU capacity", "a cluster's agents say how many GPUs jobs may have"),
    ),
    "/v1/training/jobs/{job_id}/queue_context": (
        ("GET",),
        ("the context of the queue", "'truss train view --job-id' says what a PENDING job waits for"),
    ),
    "/v1/loops/{path:path}": (
        ("GET", "POST", "PUT", "PATCH", "DELETE"),
        ("Loops", "run the training as a job with 'truss train push'"),
    ),
}


def _refuse(path: str, methods: Sequence[str], what: str, remedy: str) -> None:
    async def refuse(_: TeamController) -> NoReturn:
        raise NotSupportedError(what, remedy)

    v1_router.add_api_route(path, refuse, methods=list(methods), include_in_schema=False, response_model=None)


for _path, (_methods, _why) in UNSUPPORTED.items():
    _refuse(_path, _methods, *_why)


# --- documents ---


def _secret(row: SecretRow, team: str) -> NamedSecret:
    named = blake3(f"{row.organisation}\0{row.name}".encode()).hexdigest()[:10]
    return NamedSecret(id=named, created_at=moment(row.created_at), name=row.name, team_name=team)


def _job_checkpoint(ranks: Sequence[Checkpoint]) -> JobCheckpoint:
    """The entry of one name: as its lowest rank describes it."""
    first = min(ranks, key=lambda one: one.rank)
    is_syncing = any(one.sync_status == "SYNCING" for one in ranks)
    return JobCheckpoint(
        **first.model_dump(exclude={"size_bytes", "sync_status"}),
        size_bytes=sum(one.size_bytes for one in ranks),
        sync_status="SYNCING" if is_syncing else "COMPLETE",
        training_job_id=first.job,
    )


def _scratch_series(rank: RankDocument, window: MetricsQuery) -> StorageSeries:
    """The last report of the rank's scratch, which holds until the next one or the rank's end, if the window covers it."""
    at, used, limit = rank.reported_at, rank.scratch_bytes, rank.scratch_limit_bytes
    if at is None or used is None or limit is None:
        return StorageSeries()
    if rank.state not in OVER and window.start_epoch_millis is not None:
        at = max(at, moment(window.start_epoch_millis / 1000))
    return StorageSeries.of(at, used, limit) if _covers(window, at) else StorageSeries()


def _covers(window: MetricsQuery, at: datetime) -> bool:
    millis = at.timestamp() * 1000
    start, end = window.start_epoch_millis, window.end_epoch_millis
    return (start is None or start <= millis) and (end is None or millis <= end)
