"""The routes of training caches."""

from typing import Annotated

from fastapi import Path

from bdn.mirror.api.callers import TEXT, Agent, Operator, ProjectName, TeamController
from bdn.mirror.jobs.caches import TrainingCaches
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

_Caches = Annotated[TrainingCaches, provided(TrainingCaches)]
_ClusterName = Annotated[str, Path(min_length=1, max_length=256, pattern=TEXT)]

caches_router = new_router("caches")


@caches_router.post("/caches", status_code=201, summary="What lets a node mount a project's training cache")
async def grant_cache(caches: _Caches, body: CacheRequest, caller: TeamController) -> CacheGrantDocument:
    return await caches.grant(body, caller.organisation, caller.team)


@caches_router.get("/caches", summary="Training caches, and what is left of those that are to be removed")
async def list_caches(caches: _Caches, caller: TeamController) -> Caches:
    return await caches.listed(caller.organisation, caller.team)


@caches_router.patch("/caches/{project}", summary="How much a training cache may hold")
async def limit_cache(caches: _Caches, project: ProjectName, body: CacheLimit, caller: Operator) -> ProjectCache:
    return await caches.limit(caller.organisation, project, body)


@caches_router.get("/caches/{project}/summary", summary="What a training cache held when an agent looked last")
async def cache_summary(caches: _Caches, project: ProjectName, caller: TeamController) -> CacheSummaryDocument:
    return await caches.summary(caller.organisation, caller.team, project)


@caches_router.delete("/caches/{project}/{cluster}", summary="Forget on which volume of a cluster a training cache is")
async def forget_volume(caches: _Caches, project: ProjectName, cluster: _ClusterName, caller: Operator) -> ProjectCache:
    return await caches.forget_volume(caller.organisation, project, cluster)


@caches_router.put("/caches/{project}/{cluster}/summary", summary="Agents only: what they found in a cache")
async def record_summary(
    caches: _Caches,
    project: ProjectName,
    cluster: _ClusterName,
    body: CacheSummaryBody,
    caller: Agent,
) -> TrainingCacheDirectory:
    caller.check_cluster(cluster)
    return await caches.record(project, cluster, body)
