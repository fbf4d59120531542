"""Collections as operators ask for them and see them, and those that come round by themselves."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import BdnError, InternalError
from bdn.core.pace.rounds import is_round_due
from bdn.core.store import KINDS
from bdn.mirror.db import mirrors, operations
from bdn.mirror.db.database import Database
from bdn.mirror.operations.operations import COLLECTION, Operations
from bdn.mirror.retention.collector import Collected, Collector
from bdn.mirror.waiting import Watch
from bdn.wire.operation_schema import CollectedKind, Collection, CollectionRequest
from bdn.wire.shapes import body_of

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0  # between two looks for what another process was asked for
_ASKED: Final = "a collection was asked for"


@dataclass(frozen=True)
class Collections:
    """The service behind ``/collections``. Any process takes the request, one worker carries it out.

    Args:
        grace_seconds: where the request names none.
        period_seconds: after which a collection is begun that nobody asked for; 0 is never.
        on_collected: told the bytes that became free.
    """

    database: Database
    operations: Operations
    collector: Collector
    watch: Watch
    grace_seconds: float
    period_seconds: float
    on_collected: Callable[[int], object]
    clock: Callable[[], float] = time.time

    async def start(self, request: CollectionRequest, wait_seconds: float = 0) -> Collection:
        """Record what a worker is to do."""
        collection_id = await self._begin(request)
        self.watch.notify(_ASKED)
        return await self.get(collection_id, wait_seconds)

    async def _begin(self, request: CollectionRequest) -> str:
        return await self.operations.begin(COLLECTION, request, lambda _: {}, mirror=True)

    async def get(self, collection_id: str, wait_seconds: float = 0) -> Collection:
        """The collection, once it is over or when the time is."""
        operation = await self.operations.get(COLLECTION, collection_id, wait_seconds=wait_seconds)
        kinds = [CollectedKind.model_validate(kind) for kind in operation.all("kinds")]
        return Collection(**operation.document(), kinds=kinds, bytes_freed=sum(kind.bytes for kind in kinds))

    async def work(self) -> None:
        """For ever carry out what was asked for, what is due, and what a killed worker had begun."""
        while True:
            try:
                await self._begin_what_is_due()
                async with self.database.read() as session:
                    asked = await operations.open_of_mirror(session, COLLECTION.name)
                for row in asked:
                    await self._carry_out(row.id)
                if asked:
                    continue  # somebody may have asked meanwhile
            except BdnError as error:  # the database is away: what is open stays open
                logger.warning("nothing can be collected now", extra={"error": str(error)})
            await self.watch.changed(_ASKED, _LOOK_SECONDS)

    async def _begin_what_is_due(self) -> None:
        if not await self._is_due():
            return
        async with self.database.alone("collections"):
            if await self._is_due():
                await self._begin(CollectionRequest())

    async def _is_due(self) -> bool:
        """A period after the last one, or else after the first mirror: before that there is nothing to collect."""
        now = self.clock()
        async with self.database.read() as session:
            since = await operations.newest_collection(session, now) or await mirrors.first_at(session)
        return since is not None and is_round_due(since, self.period_seconds, now)

    async def _carry_out(self, collection_id: str) -> None:
        """A and B see the same request; A carries it out, and B, who waited, sees that it is over."""
        async with self.database.alone("collections"):
            async with self.database.read() as session:
                row = await operations.get(session, collection_id)
            if row is None or row.status != "RUNNING":
                return
            request = CollectionRequest.model_validate(row.request)
            grace = self.grace_seconds if request.grace_seconds is None else request.grace_seconds
            collected, failure = await self._collect(collection_id, grace, dry_run=request.dry_run)
            if not request.dry_run:
                self.on_collected(sum(collected.bytes.values()))
            kinds = [
                CollectedKind(kind=kind, count=collected.counts[kind], bytes=collected.bytes[kind]).model_dump()
                for kind in KINDS
            ]
            await self.operations.answer(collection_id, {"kinds": kinds}, body_of(failure) if failure else None)
        facts: dict[str, object] = {kind: count for kind, count in collected.counts.items() if count}
        logger.info("collected", extra={"collection": collection_id, "dry_run": request.dry_run, **facts})

    async def _collect(
        self, collection_id: str, grace_seconds: float, *, dry_run: bool
    ) -> tuple[Collected, BdnError | None]:
        """What went, or why not. A bug is no reason to end the mirror, nor to try the same again at its next start."""
        try:
            return await self.collector.collect(grace_seconds=grace_seconds, dry_run=dry_run), None
        except BdnError as error:
            return Collected(), error
        except Exception as error:
            logger.exception("a collection failed", extra={"collection": collection_id})
            return Collected(), InternalError(f"{type(error).__name__} while collecting")
