"""``/evictions``, ``/prefetches``, ``/verifications``, ``/collections`` and ``/restorations``: recorded operations."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from bdn.core.caller import Caller, Role
from bdn.mirror.access.access import check_may_evict, check_may_verify
from bdn.mirror.api.parameters import Controller, Operator, WaitSeconds
from bdn.mirror.operations.collections import Collections
from bdn.mirror.operations.evictions import EvictionService
from bdn.mirror.operations.prefetches import Prefetches
from bdn.mirror.operations.verifications import VerificationService
from bdn.mirror.retention.restorations import Restorations
from bdn.net.api_server.service import new_router, provided
from bdn.wire.operation_schema import (
    Collection,
    CollectionRequest,
    Eviction,
    EvictionRequest,
    Prefetch,
    PrefetchRequest,
    RestorationRequest,
    RestoredItem,
    Verification,
    VerificationRequest,
)
from bdn.wire.shapes import Items

PrefetchId = Annotated[str, Path(pattern=r"^pre_[0-9a-f]{24}$")]
EvictionId = Annotated[str, Path(pattern=r"^evi_[0-9a-f]{24}$")]
VerificationId = Annotated[str, Path(pattern=r"^ver_[0-9a-f]{24}$")]
CollectionId = Annotated[str, Path(pattern=r"^col_[0-9a-f]{24}$")]

_EvictionService = Annotated[EvictionService, provided(EvictionService)]
_Prefetches = Annotated[Prefetches, provided(Prefetches)]
_VerificationService = Annotated[VerificationService, provided(VerificationService)]
_Collections = Annotated[Collections, provided(Collections)]
_Restorations = Annotated[Restorations, provided(Restorations)]

router = new_router("control")


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
