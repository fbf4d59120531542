"""Recorded events: what agents and the mirror itself have decided, for as long as they are kept."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import BdnError, single_error
from bdn.mirror.db import events
from bdn.mirror.db.database import Database
from bdn.mirror.db.events import Wanted
from bdn.wire.event_schema import EventDocument, NodeEvent

logger = logging.getLogger(__name__)
_EXPIRE_SECONDS: Final = 600.0  # between two looks for what is too old
_AHEAD_SECONDS: Final = 86400.0  # that an agent's clock may be ahead of ours, and is still believed


@dataclass(frozen=True)
class Events:
    """The service behind ``/events``."""

    database: Database
    keep_seconds: float
    clock: Callable[[], float]

    async def record(self, cluster: str, node: str, reported: Sequence[NodeEvent]) -> None:
        """Keep the events of an agent; they are durable when this returns.

        An event from a clock that is far off is not refused, because the agent would report it for ever: it is dated anew.
        """
        if reported:
            now = self.clock()
            dated = [event.model_copy(update={"at": _believable(event.at, now)}) for event in reported]
            async with self.database.write() as session:
                await events.record_of_node(session, cluster, node, dated)

    async def page(
        self, organisation: str, wanted: Wanted, before: tuple[float, str] | None, limit: int
    ) -> tuple[list[EventDocument], tuple[float, str] | None]:
        """What the organisation may see, newest first, and where the next page begins (None on the last one)."""
        async with self.database.read() as session:
            found = await events.page(session, organisation, wanted, before=before, limit=limit + 1)
        seen = [one for event in found[:limit] if (one := event.seen_by(organisation)) is not None]
        last = found[limit - 1] if len(found) > limit else None
        return [EventDocument.of(one) for one in seen], (last.at, last.id) if last else None

    @asynccontextmanager
    async def expiring(self) -> AsyncIterator[None]:
        """In the background, delete events that are older than they are kept, a few at a time."""

        async def expire() -> None:
            while True:
                try:
                    await self.expire()
                except BdnError as error:
                    logger.warning("old events cannot be deleted now", extra={"error": str(error)})
                await asyncio.sleep(_EXPIRE_SECONDS)

        with single_error():
            async with asyncio.TaskGroup() as group:
                task = group.create_task(expire())
                yield
                task.cancel()

    async def expire(self) -> None:
        """Delete what is too old now. What would become so later than all that is decided from now on is dated anew."""
        is_more, now = True, self.clock()
        async with self.database.write() as session:
            await events.redate(session, now + self.keep_seconds, now)
        while is_more:
            async with self.database.write() as session:
                is_more = await events.delete_older(session, self.clock() - self.keep_seconds)


def _believable(at: float, now: float) -> float:
    """When it was, by a clock that is about right; by others now, or when time began."""
    return max(at, 0.0) if at <= now + _AHEAD_SECONDS else now
