"""``/agents`` and ``/clusters``, and the probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from bdn.core.digest import EMPTY
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.ports import ChunkStore
from bdn.mirror.api.parameters import Agent, Controller
from bdn.mirror.db.database import Database
from bdn.mirror.metrics import Metrics
from bdn.mirror.operations.heartbeats import Membership
from bdn.net.api_server.service import new_router, provided
from bdn.wire.agent_schema import AgentDocument, Cluster, Heartbeat, HeartbeatReply
from bdn.wire.shapes import Items

PROBE_SECONDS = 5.0

_Membership = Annotated[Membership, provided(Membership)]

router = new_router("control")
probes_router = new_router("probes")


@router.get("/agents", summary="Agents: tiers, capacity, use, last heartbeat")
async def agents(membership: _Membership, _: Controller) -> Items[AgentDocument]:
    return await membership.agents()


@router.get("/clusters", summary="Clusters: their agents and space together")
async def clusters(membership: _Membership, _: Controller) -> Items[Cluster]:
    return await membership.clusters()


@router.post("/agents/heartbeat", summary="Agents only: report state, receive members, commands and keys")
async def heartbeat(membership: _Membership, body: Heartbeat, caller: Agent) -> HeartbeatReply:
    caller.check_cluster(body.cluster)
    return await membership.heartbeat(body)


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


_Probes = Annotated[Probes, provided(Probes)]


@probes_router.get("/healthz", summary="The process lives")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@probes_router.get("/readyz", summary="Database and store are reachable")
async def readyz(probes: _Probes) -> dict[str, str]:
    await probes.check()
    return {"status": "ok"}


@probes_router.get("/metrics", summary="Prometheus", response_class=PlainTextResponse)
async def metrics(probes: _Probes) -> Response:
    return Response(await probes.metrics.render(), media_type=CONTENT_TYPE_LATEST)
