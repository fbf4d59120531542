"""``/agents``, ``/clusters``, the recorded operations (``/evictions``, ``/prefetches``, …), and the probes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Path, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from bdn.core.chunk import EMPTY
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.store import ChunkStore
from bdn.mirror.access import check_may_evict, check_may_verify
from bdn.mirror.api.parameters import Agent, Controller, Operator, WaitSeconds
from bdn.mirror.db.database import Database
from bdn.mirror.metrics import Metrics
from bdn.mirror.operations.collections import Collections
from bdn.mirror.operations.evictions import EvictionService
from bdn.mirror.operations.heartbeats import Membership
from bdn.mirror.operations.prefetches import Prefetches
from bdn.mirror.operations.verifications import VerificationService
from bdn.mirror.retention.store_eviction import Restorations
from bdn.net.api_server import new_router, provided
from bdn.wire.access_schema import Caller, Role
from bdn.wire.operation_schema import (
    AgentDocument,
    Cluster,
    Collection,
    CollectionRequest,
    Eviction,
    EvictionRequest,
    Heartbeat,
    HeartbeatReply,
    Prefetch,
    PrefetchRequest,
    RestorationRequest,
    RestoredItem,
    Verification,
    VerificationRequest,
)
from bdn.wire.shapes import Items

PROBE_SECONDS = 5.0

PrefetchId = Annotated[str, Path(pattern=r"^pre_[0-9a-f]{24}$")]
EvictionId = Annotated[str, Path(pattern=r"^evi_[0-9a-f]{24}$")]
VerificationId = Annotated[str, Path(pattern=r"^ver_[0-9a-f]{24}$")]
CollectionId = Annotated[str, Path(pattern=r"^col_[0-9a-f]{24}$")]

_Membership = Annotated[Membership, provided(Membership)]
_EvictionService = Annotated[EvictionService, provided(EvictionService)]
_Prefetches = Annotated[Prefetches, provided(Prefetches)]
_VerificationService = Annotated[VerificationService, provided(VerificationService)]
_Collections = Annotated[Collections, provided(Collections)]
_Restorations = Annotated[Restorations, provided(Restorations)]

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


@router.post("/evictions", status_code=202, summary="Evict, or plan it with dry_run")
async def evict(
    evictions: _EvictionService, body: EvictionRequest, caller: Controller, wait: WaitSeconds = 0
) -> Eviction:
    check_may_evict(caller, body)
    return _shown(caller, await evictions.start(body, caller.organisation, wait))


@router.get("/evictions/{eviction_id}", summary="A recorded eviction")
async def eviction(
    evictions: _EvictionService, eviction_id: EvictionId, caller: Controller, wait: WaitSeconds = 0
) -> Eviction:
    return _shown(caller, await evictions.get(eviction_id, caller.organisation, wait))


@router.post("/prefetches", status_code=202, summary="Place READY manifests on nodes")
async def prefetch(
    prefetches: _Prefetches, body: PrefetchRequest, caller: Controller, wait: WaitSeconds = 0
) -> Prefetch:
    return await prefetches.start(body, caller.organisation, wait)


@router.get("/prefetches/{prefetch_id}", summary="A recorded prefetch, node by node")
async def prefetched(
    prefetches: _Prefetches, prefetch_id: PrefetchId, caller: Controller, wait: WaitSeconds = 0
) -> Prefetch:
    return await prefetches.get(prefetch_id, caller.organisation, wait)


def _shown(caller: Caller, eviction: Eviction) -> Eviction:
    return eviction if caller.role is Role.OPERATOR else eviction.without_holders()


@router.post("/verifications", status_code=202, summary="Read what is held again, and repair what is wrong")
async def verify(
    verifications: _VerificationService, body: VerificationRequest, caller: Controller, wait: WaitSeconds = 0
) -> Verification:
    check_may_verify(caller, body)
    return await verifications.start(body, caller.organisation, wait)


@router.get("/verifications/{verification_id}", summary="A recorded verification")
async def verification(
    verifications: _VerificationService, verification_id: VerificationId, caller: Controller, wait: WaitSeconds = 0
) -> Verification:
    return await verifications.get(verification_id, caller.organisation, wait)


@router.post("/collections", status_code=202, summary="Collect what nothing names, or plan it with dry_run")
async def collect(collections: _Collections, body: CollectionRequest, _: Operator, wait: WaitSeconds = 0) -> Collection:
    return await collections.start(body, wait)


@router.get("/collections/{collection_id}", summary="A recorded collection")
async def collection(
    collections: _Collections, collection_id: CollectionId, _: Operator, wait: WaitSeconds = 0
) -> Collection:
    return await collections.get(collection_id, wait)


@router.post("/restorations", summary="Bring back what was evicted from the mirror and is not collected yet")
async def restore(restorations: _Restorations, body: RestorationRequest, caller: Controller) -> Items[RestoredItem]:
    return await restorations.restore(body, caller.organisation)


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
