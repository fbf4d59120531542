"""Background work on stages: resuming them after a restart, and releasing them when their time to live ends."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import BdnError, CanceledError
from bdn.disk.threads import in_thread
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.stage import NodeStage, StageRecord

logger = logging.getLogger(__name__)
_TICK_SECONDS: Final = 10.0
# ended stages stay on record, so that an eviction by job finds the manifests that the job used
KEPT_SECONDS: Final = 7 * 86400.0
KEPT: Final = 10_000  # each costs 1 KiB of memory and a file; a node with short jobs ends thousands per hour


@dataclass(frozen=True)
class Housekeeping:
    lifecycle: Lifecycle
    is_rebooted: bool

    async def resume(self) -> None:
        """Run at start: leases first, so that nothing needed is evicted; then cleanup; then the stages.

        Before this returns, READY stages are exposed again; their views are then checked in the background. After a
        reboot they are staged again instead: no job runs yet, and views are not synced. Stages that were being staged
        resume, except pulls: the command of a pull has ended.
        """
        for record in await in_thread(lambda: list(self.lifecycle.records.load_all())):
            stage = self.lifecycle.registry.enter(NodeStage(record))
            if not stage.is_terminal or record.state == "READY":
                self.lifecycle.live_on(stage)
                self.lifecycle.lease_again(record)
        await self._tidy()
        for stage in self.lifecycle.registry.all():
            await self._resume(stage)
        try:
            await self.reap()
        except BdnError as error:
            # On a full or read-only disk the cache is still served, and the next reap retries.
            logger.warning("housekeeping: %s", error)

    async def _tidy(self) -> None:
        standing = frozenset(
            stage.record.id
            for stage in self.lifecycle.registry.all()
            if stage.record.destination is None and stage.record.state in ("PENDING", "STAGING", "READY")
        )
        for path in await in_thread(self.lifecycle.views.drop_others, standing):
            logger.info("removed %s: no stage needs it", path)

    async def _resume(self, stage: NodeStage) -> None:
        record = stage.record
        is_pull = record.destination is not None
        if record.state in ("PENDING", "STAGING"):
            if is_pull:
                error = CanceledError(f"the pull to {record.destination}")
                await self.lifecycle.release_all([stage], error, ending="interrupted")
            else:
                await in_thread(self.lifecycle.write_down, "resumed", record)
                self.lifecycle.begin(stage)
        elif record.state == "READY" and is_pull:
            if await in_thread(self.lifecycle.pulled.is_abandoned, record):
                await self.lifecycle.release_all([stage], ending="abandoned")
        elif record.state == "READY" and self.is_rebooted:
            await in_thread(self.lifecycle.write_down, "resumed", record)
            self.lifecycle.begin(stage)
        elif record.state == "READY":
            with suppress(BdnError):  # the background check detects and mends it
                await in_thread(self.lifecycle.views.expose, record.id, self.lifecycle.places_of(record))
            stage.task = self.lifecycle.background.start(self._look_through(stage), f"look through {record.id}")

    async def _look_through(self, stage: NodeStage) -> None:
        """Mend a READY stage that lacks files, e.g. quarantined ones, or whose view is of another kind."""
        record, index = stage.record, self.lifecycle.cache.index
        is_same_kind = all(mount.exposure == self.lifecycle.views.kind for mount in record.mounts)
        if is_same_kind and all(map(index.is_complete, record.manifests)) and await in_thread(self._is_intact, record):
            self.lifecycle.warmer.begin(stage)
            return
        logger.warning("the view of stage %s is not intact; staging it again", record.id)
        with suppress(BdnError):  # already logged
            await in_thread(self.lifecycle.write_down, "resumed", record)
        self.lifecycle.mend(stage)

    def _is_intact(self, record: StageRecord) -> bool:
        try:
            shown = self.lifecycle.recorded(record)
        except BdnError:
            return False
        known = {place: one for place, one in shown.items() if one is not None}
        return len(known) == len(shown) and self.lifecycle.views.is_intact(record.id, known)

    async def reap(self) -> None:
        """Release expired and abandoned stages, remove old records, and trim the cache to its budget.

        Retries READY stages that could not be mended.
        """
        expired = list(filter(self.lifecycle.is_over, self.lifecycle.registry.all()))
        await self.lifecycle.release_all(expired, ending="expired", still=self.lifecycle.is_over)
        await self.lifecycle.release_abandoned()
        await self._prune()
        cache = self.lifecycle.cache
        await in_thread(cache.chunks.tier.drop, cache.chunks.has_whole)
        await cache.trim()
        await in_thread(cache.chunks.tier.trim)
        for stage in filter(self.lifecycle.is_to_mend, self.lifecycle.registry.all()):
            self.lifecycle.mend(stage)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                await self.reap()
            except BdnError as error:
                logger.warning("housekeeping: %s", error)
            except Exception:
                logger.exception("housekeeping failed")  # a bug must not end running stages

    async def _prune(self) -> None:
        stages = {stage.record.id: stage for stage in self.lifecycle.registry.all() if stage.is_terminal}
        ended_at = {key: stage.record.ended_at for key, stage in stages.items() if stage.record.ended_at is not None}
        for stage_id in to_forget(ended_at, self.lifecycle.clock()):
            stage = stages[stage_id]
            async with stage.lock:  # its job may be requesting the stage again
                if stage.is_terminal and stage.record.ended_at == ended_at[stage_id]:
                    await in_thread(self.lifecycle.records.forget, stage_id)
                    self.lifecycle.registry.strike(stage)


def to_forget(ended_at: Mapping[str, float], now: float) -> list[str]:
    """The stages to remove, oldest first. ``ended_at``: seconds since the epoch by stage id."""
    by_age = sorted(ended_at, key=lambda stage: (ended_at[stage], stage))
    surplus = max(0, len(by_age) - KEPT)
    return by_age[:surplus] + [stage for stage in by_age[surplus:] if ended_at[stage] < now - KEPT_SECONDS]
