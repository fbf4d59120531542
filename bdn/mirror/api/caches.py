"""The routes of training caches."""

from typing import Annotated

from fastapi import Path

from bdn.mirror.api.callers import TEXT, Agent, Operator, ProjectName, TeamController
from bdn.mirror.jobs.caches import TrainingCaches
from bdn.mirror.jobs.uses import ProjectUses
from bdn.net.api_server import new_router, provided
from bdn.wire.cache_schema import (
    CacheGrantDocument,
    CacheLimit,
    CacheRequest,
    Caches,
    CacheSummaryBody,
    CacheSummaryDocument,
    ProjectCache,
    TrainingCacheDirectory,
)
from bdn.wire.shapes import Items

_Caches = Annotated[TrainingCaches, provided(TrainingCaches)]
_Uses = Annotated[ProjectUses, provided(ProjectUses)]
_ClusterName = Annotated[str, Path(min_length=1, max_length=256, pattern=TEXT)]

caches_router = new_router("caches")


@caches_router.post("/caches", status_code=201, summary="Grant a node the mount of a project's training cache")
async def grant_cache(caches: _Caches, body: CacheRequest, caller: TeamController) -> CacheGrantDocument:
    return await caches.grant(body, caller.organisation, caller.team)


@caches_router.get("/caches", summary="List training caches, and the remains of removed ones")
async def list_caches(caches: _Caches, caller: TeamController) -> Caches:
    return await caches.listed(caller.organisation, caller.team)


@caches_router.patch("/caches/{project}", summary="Set the size limit of a training cache")
async def limit_cache(caches: _Caches, project: ProjectName, body: CacheLimit, caller: Operator) -> ProjectCache:
    return await caches.limit(caller.organisation, project, body)


@caches_router.get("/caches/{project}/summary", summary="The last summary of a training cache's content")
async def cache_summary(caches: _Caches, project: ProjectName, caller: TeamController) -> CacheSummaryDocument:
    return await caches.summary(caller.organisation, caller.team, project)


@caches_router.get("/caches/{project}/uses", summary="Agents only: what forbids to delete from a project's cache")
async def project_uses(uses: _Uses, project: ProjectName, _: Agent) -> Items[str]:
    return await uses.of(project)


@caches_router.delete(
    "/caches/{project}/{cluster}", summary="Remove the record of a training cache's volume in a cluster"
)
async def forget_volume(caches: _Caches, project: ProjectName, cluster: _ClusterName, caller: Operator) -> ProjectCache:
    return await caches.forget_volume(caller.organisation, project, cluster)


@caches_router.put("/caches/{project}/{cluster}/summary", summary="Agents only: report the content of a training cache")
async def record_summary(
    caches: _Caches,
    project: ProjectName,
    cluster: _ClusterName,
    body: CacheSummaryBody,
    caller: Agent,
) -> TrainingCacheDirectory:
    caller.check_cluster(cluster)
    return await caches.record(project, cluster, body)
