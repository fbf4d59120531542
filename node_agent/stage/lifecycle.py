"""Every transition of a stage: begun, READY or FAILED, renewed, released. Each is recorded on disk before it is seen."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from bdn.core.errors import BdnError, InternalError
from bdn.wire.errors import body_of
from bdn.wire.stage_schema import StageState
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.crew import Crew, in_thread, to_the_end
from node_agent.stage.pulls import Pulls
from node_agent.stage.record import StageRecord, StageRecords
from node_agent.stage.stage import Stage
from node_agent.stage.staging import Staging
from node_agent.stage.warm import Warmer
from node_agent.view.views import Views

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lifecycle:
    """Moves stages from state to state. Callers hold the stage's lock, except where a stage's own task is at work.

    ``on_ready`` gets the seconds that a stage took; ``on_change`` is called when leases changed.
    """

    crew: Crew
    staging: Staging
    warmer: Warmer
    cache: NodeCache
    views: Views
    records: StageRecords
    pulls: Pulls
    clock: Clock
    on_ready: Callable[[float], None]
    on_change: Callable[[], None]

    # --- beginning and working ---

    def begin(self, stage: Stage) -> None:
        """Let a task work on the stage until it is READY or FAILED. Its record is on disk already."""
        stage.stop.clear()
        stage.progress = stage.effort = stage.warming = None
        stage.record.state = "STAGING"
        stage.task = self.crew.start(self._work(stage), f"stage {stage.record.id}")
        stage.notify()

    async def stop(self, stage: Stage) -> None:
        """Cancel the stage's tasks, if any, and wait for them. The record stays as it is."""
        stage.stop.set()
        if stage.task and stage.is_working:
            stage.task.cancel()
            await asyncio.wait([stage.task])
        if stage.warming:
            await stage.warming.stop()

    async def _work(self, stage: Stage) -> None:
        record, began = stage.record, time.monotonic()
        try:
            await self.release_abandoned()
            await self.staging.run(stage)
            record.ready_at = self.clock()
            record.bytes_per_second = stage.rate.total / max(time.monotonic() - began, 1e-3) or None
            await self._settle(stage, "READY")
        except BdnError as error:
            await self._fail(stage, error)
            return
        except Exception as error:
            logger.exception("stage %s failed", record.id)
            await self._fail(stage, InternalError(f"{type(error).__name__}: {error}"))
            return
        self.on_ready(time.monotonic() - began)
        if record.destination is not None:
            await self.release_all(self.pulls.replaced_by(record))
        self.warmer.begin(stage)

    async def _fail(self, stage: Stage, error: BdnError) -> None:
        record = stage.record
        logger.warning("stage %s of job %s failed: %s", record.id, record.job_id, error)
        record.error = body_of(error)
        with suppress(BdnError):  # the stage's own error says more than the trouble of clearing up after it
            await in_thread(self._take_down, record)
        await self.cache.leave(record.id)
        try:
            await self._settle(stage, "FAILED")
        except BdnError as failure:
            logger.warning("the failure of stage %s could not be recorded: %s", record.id, failure)
            record.state = "FAILED"
            stage.notify()

    # --- ending ---

    async def release(self, stage: Stage, error: BdnError | None = None) -> None:
        """Take the stage down: exposure, view, lease, in this order. A released stage stays as it is.

        Raises:
            MountFailedError, DiskFailedError: it could not be taken down; it is still there, and can be released again.
        """
        async with stage.lock:
            if stage.record.state != "RELEASED":
                await self.stop(stage)
                await to_the_end(self._release(stage, error))

    async def _release(self, stage: Stage, error: BdnError | None) -> None:
        record = stage.record
        note = await in_thread(self._take_down, record)
        if note:
            logger.warning("stage %s of job %s: %s", record.id, record.job_id, note)
            record.mounts[0].view_reason = note
        await self.cache.leave(record.id)
        if error:
            record.error = body_of(error)
        await self._settle(stage, "RELEASED")

    async def release_abandoned(self) -> None:
        """Release the pulled stages whose directories are gone."""
        await self.release_all(await in_thread(self.pulls.abandoned))

    async def release_all(self, stages: Iterable[Stage], error: BdnError | None = None) -> None:
        """Release each, for whatever reason of our own; one that cannot be taken down now is tried again later."""
        for stage in stages:
            try:
                await self.release(stage, error)
            except BdnError as failure:
                logger.warning("stage %s could not be released: %s", stage.record.id, failure)

    def _take_down(self, record: StageRecord) -> str | None:
        if record.destination is not None:
            self.pulls.destination(record).clear()  # what was published there is the user's, and stays
            return None
        return self.views.drop(record.id, [mount.mount_location for mount in record.mounts])

    # --- recording ---

    async def renew(self, stage: Stage, expires_at: float | None) -> None:
        """Another time at which the stage ends by itself; None means never."""
        await self._save(stage, {"expires_at": expires_at})
        self.lease_again(stage.record)

    def lease_again(self, record: StageRecord) -> None:
        """Make the leases say what the record says."""
        index = self.cache.index
        for manifest in record.manifests.keys() & set(index.manifests()):
            index.leases.take(manifest, record.holder)

    async def _settle(self, stage: Stage, state: StageState) -> None:
        record = stage.record
        if stage.progress:
            for position, mount in enumerate(record.mounts):
                mount.bytes_from = stage.progress.bytes_from(position)
        if stage.effort and not stage.is_terminal:
            record.transfer = stage.effort.document()
        await self._save(stage, {"state": state, "ended_at": None if state == "READY" else self.clock()})
        stage.notify()
        self.on_change()

    async def _save(self, stage: Stage, changes: dict[str, StageState | float | None]) -> None:
        """On disk first, then in memory; one at a time, so that the disk never goes back to an older state."""
        async with stage.saving:
            await in_thread(self.records.save, stage.record.model_copy(update=changes))
            for name, value in changes.items():
                setattr(stage.record, name, value)
