"""``/collections`` and ``/restorations``: what goes out of the mirror's store, and what is brought back before it does."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from bdn.mirror.api.callers import Controller, Operator
from bdn.mirror.api.mirrors import WaitSeconds
from bdn.mirror.operations.collections import Collections
from bdn.mirror.retention.restorations import Restorations
from bdn.wire.collection_schema import Collection, CollectionRequest, Restoration, RestorationRequest

CollectionId = Annotated[str, Path(pattern=r"^col_[0-9a-f]{24}$")]


def build_collections_router(collections: Collections, restorations: Restorations) -> APIRouter:
    """The routes for any such services. The store is everybody's, so collecting is the operator's."""
    router = APIRouter(tags=["control"])

    @router.post("/collections", status_code=202, summary="Collect what nothing names, or plan it with dry_run")
    async def collect(body: CollectionRequest, _: Operator, wait: WaitSeconds = 0) -> Collection:
        return await collections.start(body, wait)

    @router.get("/collections/{collection_id}", summary="A recorded collection")
    async def collection(collection_id: CollectionId, _: Operator, wait: WaitSeconds = 0) -> Collection:
        return await collections.get(collection_id, wait)

    @router.post("/restorations", summary="Bring back what was evicted from the mirror and is not collected yet")
    async def restore(body: RestorationRequest, caller: Controller) -> Restoration:
        return await restorations.restore(body, caller.organisation)

    return router
