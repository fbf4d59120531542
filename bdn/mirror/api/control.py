"""``/evictions``, ``/prefetches``, ``/agents``, ``/clusters``, and the probes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Response
from prometheus_client import CONTENT_TYPE_LATEST

from bdn.core.digest import EMPTY
from bdn.core.errors import NotFoundError
from bdn.core.ports import ChunkStore
from bdn.mirror.access import Access
from bdn.mirror.api.mirrors import WaitSeconds
from bdn.mirror.cluster.membership import Membership
from bdn.mirror.database import Database
from bdn.mirror.eviction.evictions import Evictions
from bdn.mirror.metrics import Metrics
from bdn.mirror.prefetching.prefetches import Prefetches
from bdn.wire.agent_schema import Agents, Clusters, Heartbeat, HeartbeatReply
from bdn.wire.eviction_schema import Eviction, EvictionRequest
from bdn.wire.prefetch_schema import Prefetch, PrefetchRequest
from bdn.wire.service import Bearer

PrefetchId = Annotated[str, Path(pattern=r"^pre_[0-9a-f]{24}$")]
EvictionId = Annotated[str, Path(pattern=r"^evi_[0-9a-f]{24}$")]


def build_control_router(
    evictions: Evictions, prefetches: Prefetches, membership: Membership, access: Access
) -> APIRouter:
    """Evictions, prefetches and agents."""
    router = APIRouter(tags=["control"])

    @router.post("/evictions", status_code=202, summary="Evict, or plan it with dry_run")
    async def evict(body: EvictionRequest, bearer: Bearer, wait: WaitSeconds = 0) -> Eviction:
        eviction = await evictions.start(body, access.caller(bearer).organisation)
        return await evictions.get(eviction.id, wait)

    @router.get("/evictions/{eviction_id}", summary="A recorded eviction")
    async def eviction(eviction_id: EvictionId, bearer: Bearer, wait: WaitSeconds = 0) -> Eviction:
        access.caller(bearer)
        return await evictions.get(eviction_id, wait)

    @router.post("/prefetches", status_code=202, summary="Place READY manifests on nodes")
    async def prefetch(body: PrefetchRequest, bearer: Bearer, wait: WaitSeconds = 0) -> Prefetch:
        organisation = access.caller(bearer).organisation
        begun = await prefetches.start(body, organisation)
        return await prefetches.get(begun.id, organisation, wait)

    @router.get("/prefetches/{prefetch_id}", summary="A recorded prefetch, node by node")
    async def prefetched(prefetch_id: PrefetchId, bearer: Bearer, wait: WaitSeconds = 0) -> Prefetch:
        return await prefetches.get(prefetch_id, access.caller(bearer).organisation, wait)

    @router.get("/agents", summary="Agents: tiers, capacity, use, last heartbeat")
    async def agents(bearer: Bearer) -> Agents:
        access.caller(bearer)
        return await membership.agents()

    @router.get("/clusters", summary="Clusters: their agents and space together")
    async def clusters(bearer: Bearer) -> Clusters:
        access.caller(bearer)
        return await membership.clusters()

    @router.post("/agents/heartbeat", summary="Agents only: report state, receive members, commands and keys")
    async def heartbeat(body: Heartbeat, bearer: Bearer) -> HeartbeatReply:
        access.caller(bearer)
        return await membership.heartbeat(body)

    return router


@dataclass(frozen=True)
class Probes:
    """Liveness, readiness and numbers, without authentication: orchestrators have no tokens."""

    database: Database
    store: ChunkStore
    metrics: Metrics

    async def check(self) -> None:
        """Raise when the database or the store is not reachable."""
        await self.database.check_version()
        try:
            (await asyncio.to_thread(self.store.open, EMPTY)).close()
        except NotFoundError:
            return  # it answered

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(tags=["probes"])

        @router.get("/healthz", summary="The process lives")
        async def healthz() -> dict[str, str]:
            return {"status": "ok"}

        @router.get("/readyz", summary="Database and store are reachable")
        async def readyz() -> dict[str, str]:
            await self.check()
            return {"status": "ok"}

        @router.get("/metrics", summary="Prometheus")
        async def metrics() -> Response:
            return Response(await self.metrics.render(), media_type=CONTENT_TYPE_LATEST)

        return router
