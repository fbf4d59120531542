"""``/evictions``, ``/prefetches``, ``/agents``, ``/clusters``, and the probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from bdn.core.caller import Caller, Role
from bdn.core.digest import EMPTY
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.ports import ChunkStore
from bdn.mirror.access.access import check_may_evict
from bdn.mirror.api.callers import Agent, Controller
from bdn.mirror.api.mirrors import WaitSeconds
from bdn.mirror.db.database import Database
from bdn.mirror.metrics import Metrics
from bdn.mirror.operations.evictions import Evictions
from bdn.mirror.operations.heartbeats import Membership
from bdn.mirror.operations.prefetches import Prefetches
from bdn.wire.agent_schema import Agents, Clusters, Heartbeat, HeartbeatReply
from bdn.wire.eviction_schema import Eviction, EvictionRequest
from bdn.wire.prefetch_schema import Prefetch, PrefetchRequest

PROBE_SECONDS = 5.0

PrefetchId = Annotated[str, Path(pattern=r"^pre_[0-9a-f]{24}$")]
EvictionId = Annotated[str, Path(pattern=r"^evi_[0-9a-f]{24}$")]


def build_control_router(evictions: Evictions, prefetches: Prefetches, membership: Membership) -> APIRouter:
    """Evictions, prefetches and agents."""
    router = APIRouter(tags=["control"])

    @router.post("/evictions", status_code=202, summary="Evict, or plan it with dry_run")
    async def evict(body: EvictionRequest, caller: Controller, wait: WaitSeconds = 0) -> Eviction:
        check_may_evict(caller, body)
        return _shown(caller, await evictions.start(body, caller.organisation, wait))

    @router.get("/evictions/{eviction_id}", summary="A recorded eviction")
    async def eviction(eviction_id: EvictionId, caller: Controller, wait: WaitSeconds = 0) -> Eviction:
        return _shown(caller, await evictions.get(eviction_id, caller.organisation, wait))

    @router.post("/prefetches", status_code=202, summary="Place READY manifests on nodes")
    async def prefetch(body: PrefetchRequest, caller: Controller, wait: WaitSeconds = 0) -> Prefetch:
        return await prefetches.start(body, caller.organisation, wait)

    @router.get("/prefetches/{prefetch_id}", summary="A recorded prefetch, node by node")
    async def prefetched(prefetch_id: PrefetchId, caller: Controller, wait: WaitSeconds = 0) -> Prefetch:
        return await prefetches.get(prefetch_id, caller.organisation, wait)

    @router.get("/agents", summary="Agents: tiers, capacity, use, last heartbeat")
    async def agents(_: Controller) -> Agents:
        return await membership.agents()

    @router.get("/clusters", summary="Clusters: their agents and space together")
    async def clusters(_: Controller) -> Clusters:
        return await membership.clusters()

    @router.post("/agents/heartbeat", summary="Agents only: report state, receive members, commands and keys")
    async def heartbeat(body: Heartbeat, caller: Agent) -> HeartbeatReply:
        caller.check_cluster(body.cluster)
        return await membership.heartbeat(body)

    return router


def _shown(caller: Caller, eviction: Eviction) -> Eviction:
    return eviction if caller.role is Role.OPERATOR else eviction.without_holders()


@asynccontextmanager
async def _in_time(what: str) -> AsyncIterator[None]:
    """An orchestrator that gets no answer learns nothing; what is behind a broken network never answers."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            yield
    except TimeoutError:
        raise StoreUnavailableError(f"{what} has not answered for {PROBE_SECONDS:g} s") from None


@dataclass(frozen=True)
class Probes:
    """Liveness, readiness and numbers, without authentication: orchestrators have no tokens."""

    database: Database
    store: ChunkStore
    metrics: Metrics

    async def check(self) -> None:
        """Raise ``StoreUnavailableError``, which says which, when the database or the store does not answer in time."""
        async with _in_time("the database"):
            await self.database.check_version()
        self.database.check_writable(PROBE_SECONDS)
        async with _in_time("the store"):
            with suppress(NotFoundError):  # it answered
                (await asyncio.to_thread(self.store.open, EMPTY)).close()

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

        @router.get("/metrics", summary="Prometheus", response_class=PlainTextResponse)
        async def metrics() -> Response:
            return Response(await self.metrics.render(), media_type=CONTENT_TYPE_LATEST)

        return router
