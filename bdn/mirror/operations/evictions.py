"""EvictionService across tiers: agents decide about their caches and report, the mirror decides about its store."""

from dataclasses import dataclass

from bdn.core.errors import BdnError
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.operations.operations import EVICTION, Operations, OperationState, asks_mirror
from bdn.mirror.retention.store_eviction import StoreEviction
from bdn.wire.operation_schema import EvictCommand, EvictedItem, Eviction, EvictionRequest
from bdn.wire.shapes import body_of


@dataclass(frozen=True)
class EvictionService:
    """The service behind ``/evictions``."""

    database: Database
    operations: Operations
    store_eviction: StoreEviction

    async def start(self, request: EvictionRequest, organisation: str, wait_seconds: float = 0) -> Eviction:
        """Record the eviction, carry out the mirror's part, and tell the agents theirs.

        Raises:
            InvalidRequestError: the selectors do not go together.
            NotFoundError: no such source or manifest was mirrored, or no agent of that name was ever heard of.
        """
        request.check()
        manifests = await self._manifests(request, organisation)

        def command(eviction_id: str) -> EvictCommand:
            return EvictCommand(
                id=eviction_id,
                tier=request.tier,
                manifests=manifests,
                job=request.job,
                lru_bytes=request.lru_bytes,
                all=request.all,
                dry_run=request.dry_run,
                force=request.force,
                asked_by=f"an operator of {organisation}",
                organisation=organisation,
            )

        # What is named by its age or by a job is in the caches of nodes, unless the mirror's tier is named as well.
        is_spared = request.tier is None and (request.lru_bytes is not None or request.job is not None)
        is_for_mirror = asks_mirror(request) and not is_spared
        eviction_id = await self.operations.begin(
            EVICTION,
            request,
            lambda new_id: command(new_id).model_dump(),
            organisation=organisation,
            agents=await self.operations.agents_asked(request),
            mirror=is_for_mirror,
        )
        if is_for_mirror:
            try:
                await self.store_eviction.run(command(eviction_id), organisation)
            except BdnError as error:
                await self.operations.answer(eviction_id, None, body_of(error))
                raise
            await self.operations.answer(eviction_id, None)
        return await self.get(eviction_id, organisation, wait_seconds)

    async def _manifests(self, request: EvictionRequest, organisation: str) -> list[str] | None:
        """What a selector by source or manifest names; None for the other selectors."""
        if request.manifest is None and request.source is None:
            return None
        async with self.database.read() as session:
            found = await mirrors.named_manifests(session, organisation, request.manifest, request.source)
        return [f"b3:{digest}" for digest in found]

    async def get(self, eviction_id: str, organisation: str, wait_seconds: float = 0) -> Eviction:
        """The eviction, once it is over or when the time is; ``NotFoundError`` also when it is another organisation's."""
        return await self._document(await self.operations.get(EVICTION, eviction_id, organisation, wait_seconds))

    async def _document(self, operation: OperationState) -> Eviction:
        items = [EvictedItem.model_validate(item) for item in operation.all("items")]
        manifests = [item.manifest.removeprefix("b3:") for item in items]
        organisation = operation.row.organisation or ""
        async with self.database.read() as session:
            sources = await mirrors.sources_by_manifest(session, organisation, manifests) if items else {}
        for item, manifest in zip(items, manifests, strict=True):
            item.sources = sources.get(manifest, [])
        freed = sum(item.bytes for item in items if not item.refused)
        return Eviction(**operation.document(), items=items, bytes_freed=freed)
