"""What happens to stages without anybody asking: they go on after a restart, and end when their time is over."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import BdnError, CanceledError
from node_agent.background_tasks import in_thread
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.stage import NodeStage, StageRecord

logger = logging.getLogger(__name__)
_TICK_SECONDS: Final = 10.0
KEPT_SECONDS: Final = 7 * 86400.0  # ended stages are remembered, so that an eviction by job can find what they used
KEPT: Final = 10_000  # each takes 1 KiB of memory and a file; a node of short jobs ends thousands in an hour


@dataclass(frozen=True)
class Housekeeping:
    """Restart and reaping."""

    lifecycle: Lifecycle
    is_rebooted: bool

    async def resume(self) -> None:
        """After a start: leases first, so that nothing needed is evicted; then rubbish; then the stages' own work.

        READY stages are exposed again before this returns, and then looked through in the background; when the machine was
        started anew, they are staged again instead: no job runs there yet, and views are not synced. Stages that were being
        staged go on by themselves, except pulls: those belong to a command, which has ended.
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
            # Of a disk that is full or read-only: what it holds is served, and this is tried again.
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
            if await in_thread(self.lifecycle.is_abandoned, record):
                await self.lifecycle.release_all([stage], ending="abandoned")
        elif record.state == "READY" and self.is_rebooted:
            await in_thread(self.lifecycle.write_down, "resumed", record)
            self.lifecycle.begin(stage)
        elif record.state == "READY":
            with suppress(BdnError):  # the look in the background finds out, and mends it
                await in_thread(
                    self.lifecycle.views.expose, record.id, [mount.mount_location for mount in record.mounts]
                )
            stage.task = self.lifecycle.background.start(self._look_through(stage), f"look through {record.id}")

    async def _look_through(self, stage: NodeStage) -> None:
        """What a READY stage lacks is brought again: its files may be in quarantine, or its view be of another kind."""
        record, index = stage.record, self.lifecycle.cache.index
        is_same_kind = all(mount.exposure == self.lifecycle.views.kind for mount in record.mounts)
        if is_same_kind and all(map(index.is_complete, record.manifests)) and await in_thread(self._is_intact, record):
            self.lifecycle.warmer.begin(stage)
            return
        logger.warning("the view of stage %s is not intact; it is staged again", record.id)
        with suppress(BdnError):  # it is in the log
            await in_thread(self.lifecycle.write_down, "resumed", record)
        self.lifecycle.mend(stage)

    def _is_intact(self, record: StageRecord) -> bool:
        load = self.lifecycle.cache.files.records.manifest
        try:
            held = {mount.mount_location: load(mount.digest) for mount in record.mounts}
        except BdnError:
            return False
        known = {location: manifest for location, manifest in held.items() if manifest is not None}
        return len(known) == len(held) and self.lifecycle.views.is_intact(record.id, known)

    async def reap(self) -> None:
        """Release what has expired or was abandoned, forget what ended long ago, and give back what is over the budget.

        READY stages that could not be mended are tried again.
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
        stages = {stage.record.id: stage for stage in self.lifecycle.registry.all() if stage.is_terminal}
        ended_at = {key: stage.record.ended_at for key, stage in stages.items() if stage.record.ended_at is not None}
        for stage_id in to_forget(ended_at, self.lifecycle.clock()):
            stage = stages[stage_id]
            async with stage.lock:  # its job may be asking for it again
                if stage.is_terminal and stage.record.ended_at == ended_at[stage_id]:
                    await in_thread(self.lifecycle.records.forget, stage_id)
                    self.lifecycle.registry.strike(stage)


def to_forget(ended_at: Mapping[str, float], now: float) -> list[str]:
    """Of stages by id, with the seconds since the epoch when each ended: those to forget, the oldest first."""
    by_age = sorted(ended_at, key=lambda stage: (ended_at[stage], stage))
    surplus = max(0, len(by_age) - KEPT)
    return by_age[:surplus] + [stage for stage in by_age[surplus:] if ended_at[stage] < now - KEPT_SECONDS]
