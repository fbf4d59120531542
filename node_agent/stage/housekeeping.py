"""What happens to stages without anybody asking: they go on after a restart, and end when their time is over."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import BdnError, CanceledError
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.cache.records import ManifestRecords
from node_agent.cluster.tier import ClusterTier
from node_agent.crew import in_thread
from node_agent.stage.book import StageBook
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.pulls import Pulls
from node_agent.stage.record import StageRecord, StageRecords
from node_agent.stage.stage import Stage
from node_agent.view.views import Views

logger = logging.getLogger(__name__)
KEEP_SECONDS: Final = 7 * 86400.0  # released stages are kept so that an eviction by job can find what they used
_TICK_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Housekeeping:
    """Restart and reaping."""

    book: StageBook
    lifecycle: Lifecycle
    records: StageRecords
    manifests: ManifestRecords
    cache: NodeCache
    tier: ClusterTier
    views: Views
    pulls: Pulls
    clock: Clock

    async def resume(self) -> None:
        """After a start: leases first, so that nothing needed is evicted; then rubbish; then the stages' own work.

        READY stages are exposed again before this returns, and then looked through in the background. Stages that were
        being staged go on by themselves, except pulls: those belong to a command, which has ended.
        """
        for record in await in_thread(lambda: list(self.records.load_all())):
            stage = self.book.enter(Stage(record))
            if not stage.is_terminal or record.state == "READY":
                self.lifecycle.lease_again(record)
        await self._tidy()
        for stage in self.book.all():
            await self._resume(stage)
        await self.reap()

    async def _tidy(self) -> None:
        standing = frozenset(
            stage.record.id
            for stage in self.book.all()
            if stage.record.destination is None and stage.record.state in ("PENDING", "STAGING", "READY")
        )
        for path in await in_thread(self.views.drop_others, standing):
            logger.info("removed %s: no stage needs it", path)

    async def _resume(self, stage: Stage) -> None:
        record = stage.record
        is_pull = record.destination is not None
        if record.state in ("PENDING", "STAGING"):
            if is_pull:
                await self.lifecycle.release_all([stage], CanceledError(f"the pull to {record.destination}"))
            else:
                self.lifecycle.begin(stage)
        elif record.state == "READY" and is_pull:
            if await in_thread(self.pulls.is_abandoned, record):
                await self.lifecycle.release_all([stage])
        elif record.state == "READY":
            with suppress(BdnError):  # the look in the background finds out, and mends it
                await in_thread(self.views.expose, record.id, [mount.mount_location for mount in record.mounts])
            stage.task = self.lifecycle.crew.start(self._look_through(stage), f"look through {record.id}")

    async def _look_through(self, stage: Stage) -> None:
        """A READY stage whose view is not what it should be is staged again: its files may be in quarantine."""
        record, index = stage.record, self.cache.index
        is_same_kind = all(mount.exposure == self.views.kind for mount in record.mounts)
        if is_same_kind and all(map(index.is_complete, record.manifests)) and await in_thread(self._is_intact, record):
            self.lifecycle.warmer.begin(stage)
            return
        logger.warning("the view of stage %s is not intact; it is staged again", record.id)
        if not is_same_kind:  # what stands there was exposed under other settings
            with suppress(BdnError):
                await in_thread(self.views.drop, record.id, [mount.mount_location for mount in record.mounts])
        self.lifecycle.begin(stage)

    def _is_intact(self, record: StageRecord) -> bool:
        try:
            held = {mount.mount_location: self.manifests.load(mount.digest) for mount in record.mounts}
        except BdnError:
            return False
        known = {location: manifest for location, manifest in held.items() if manifest is not None}
        return len(known) == len(held) and self.views.is_intact(record.id, known)

    async def reap(self) -> None:
        """Release what has expired or was abandoned, forget what ended long ago, and give back what is over the budget."""
        now = self.clock()
        expired = [
            stage
            for stage in self.book.all()
            if stage.record.state in ("PENDING", "STAGING", "READY")
            and stage.record.expires_at is not None
            and stage.record.expires_at <= now
        ]
        await self.lifecycle.release_all(expired)
        await self.lifecycle.release_abandoned()
        await self._prune()
        await in_thread(self.tier.drop, self.cache.shelf.has_whole)
        await self.cache.trim()
        await in_thread(self.tier.trim)

    async def run(self) -> None:
        """Reap again and again."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                await self.reap()
            except BdnError as error:
                logger.warning("housekeeping: %s", error)
            except Exception:
                logger.exception("housekeeping failed")  # a bug, and no reason to end stages that stand

    async def _prune(self) -> None:
        for stage in self.book.all():
            ended_at = stage.record.ended_at
            if stage.is_terminal and ended_at is not None and ended_at < self.clock() - KEEP_SECONDS:
                await in_thread(self.records.forget, stage.record.id)
                self.book.strike(stage)
