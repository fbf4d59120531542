"""The store's keeper: repairs of what was found and verifications that somebody waits for, in turns, and else the scrub.

One process at a time: others wait, and one of them takes over when this one is gone. How far a verification and the scrub are
is recorded, so that whoever takes over goes on there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.groups import single_error
from bdn.core.pace.rounds import is_round_due
from bdn.mirror.damages import DAMAGE
from bdn.mirror.db import contents, objects
from bdn.mirror.db.database import Database
from bdn.mirror.scrub.reading import StoreReading
from bdn.mirror.scrub.repair import Repair
from bdn.mirror.scrub.store_verification import StoreVerification
from bdn.mirror.waiting import Watch

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0  # at what other processes have found, or ask for
_AWAY_SECONDS: Final = 5.0  # after a failure of the store or the database


@dataclass(frozen=True)
class Keeper:
    """Works in the background. ``period_seconds`` 0: no scrub."""

    database: Database
    reading: StoreReading
    repair: Repair
    verification: StoreVerification
    watch: Watch
    period_seconds: float
    clock: Callable[[], float]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until the block ends."""
        with single_error():
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._keep())
                yield
                task.cancel()

    async def _keep(self) -> None:
        while True:
            try:
                async with self.database.alone("store keeper"):
                    while True:
                        await self._turn()
            except BdnError as error:
                logger.warning("the store cannot be verified now", extra={"error": str(error)})
            except Exception:
                logger.exception("verifying the store failed")
            await asyncio.sleep(_AWAY_SECONDS)

    async def _turn(self) -> None:
        """A verification of a large store takes hours, for which no repair shall wait; nor it for repairs, which may be many."""
        has_repaired = await self._repair_next()
        has_verified = await self.verification.go_on()
        if not has_repaired and not has_verified and not await self._scrub():
            await self.watch.changed(DAMAGE, LOOK_SECONDS)

    async def _repair_next(self) -> bool:
        """What a scrub or a reader has found, or an earlier attempt could not repair."""
        async with self.database.read() as session:
            rows = await contents.all_damaged(session)
        due = next((digest for row in rows if self.repair.is_due(digest := Digest(row.digest))), None)
        if due is not None:
            await self.repair.run(due)
        return due is not None

    async def _scrub(self) -> bool:
        """A part of a round, if it is time."""
        async with self.database.read() as session:
            row = await objects.scrub_state(session)
        now = self.clock()
        is_under_way = row is not None and row.cursor is not None
        is_due = is_under_way or is_round_due(row.started_at if row else None, self.period_seconds, now)
        if not is_due or not self.period_seconds:
            return False
        part = await self.reading.part(row.cursor if row else None, None)
        started_at = row.started_at if row and is_under_way else now
        completed_at = row.completed_at if row else None
        if part.cursor is None:
            completed_at = self.clock()
        async with self.database.write() as session:
            await objects.save_scrub_state(
                session, started_at=started_at, completed_at=completed_at, cursor=part.cursor
            )
        return True
