"""The stages of this node: begun, found again, renewed, released; every transition is made here and recorded on disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.errors import BdnError, CanceledError, InternalError, InvalidRequestError, NotFoundError
from bdn.core.grant import Grant, stage_id_of
from bdn.wire import stage_schema
from bdn.wire.errors import ReportedError, body_of
from bdn.wire.grants import UnknownKeyError
from node_agent.cache import Clock, NodeCache
from node_agent.crew import Crew, in_thread, to_the_end
from node_agent.pulls import Pulls
from node_agent.stage import Stage
from node_agent.stage_record import MountRecord, StageRecord, StageRecords
from node_agent.staging import Staging
from node_agent.trust import Trust
from node_agent.views import Views

logger = logging.getLogger(__name__)
KEEP_SECONDS: Final = 7 * 86400.0


@dataclass(frozen=True)
class StageEvents:
    """Who wants to know."""

    ready: Callable[[float], None]  # seconds from the request to READY
    changed: Callable[[], None]


class Stages:
    """The service. Public methods are safe to call at the same time, for the same stage, too."""

    def __init__(
        self,
        crew: Crew,
        staging: Staging,
        cache: NodeCache,
        views: Views,
        records: StageRecords,
        pulls: Pulls,
        trust: Trust,
        ask_for_keys: Callable[[], Awaitable[None]],
        clock: Clock,
        events: StageEvents,
    ) -> None:
        self._crew = crew
        self._staging = staging
        self._cache = cache
        self._views = views
        self._records = records
        self._pulls = pulls
        self._trust = trust
        self._ask_for_keys = ask_for_keys
        self._clock = clock
        self._events = events
        self._stages: dict[str, Stage] = {}

    # --- asking ---

    def all(self) -> list[Stage]:
        """Every stage that is known, newest first; released ones are known for a week."""
        return sorted(self._stages.values(), key=lambda stage: stage.record.created_at, reverse=True)

    def find(self, stage_id: str) -> Stage:
        """The stage, or ``NotFoundError``."""
        stage = self._stages.get(stage_id)
        if stage is None:
            raise NotFoundError(f"stage {stage_id}")
        return stage

    def document(self, stage: Stage) -> stage_schema.Stage:
        """The stage as the wire shows it."""
        return stage.document(lambda mount: self._path(stage.record, mount))

    async def follow(self, stage_id: str, interval_seconds: float = 0.5) -> AsyncIterator[stage_schema.Stage]:
        """The stage's document again and again, at least every interval, the last time in a terminal state."""
        stage = self.find(stage_id)
        while not await stage.wait(interval_seconds):
            yield self.document(stage)
        yield self.document(stage)

    async def finish(self, stage_id: str) -> stage_schema.Stage:
        """Wait for a stage to be READY.

        Raises:
            BdnError: why it failed, or that it was released.
        """
        stage = self.find(stage_id)
        await stage.wait(None)
        if stage.record.state != "READY":
            raise ReportedError(stage.record.error) if stage.record.error else CanceledError(f"stage {stage_id}")
        return self.document(stage)

    # --- beginning ---

    async def start(self, job_id: str, token: str, ttl_seconds: float | None = None) -> Stage:
        """Stage a grant's files for a job; asking again is asking once. A failed or released stage begins anew.

        Raises:
            GrantInvalidError, GrantExpiredError: nothing was begun.
            DiskFailedError: the stage could not be recorded.
        """
        grant = await self._verify(token)
        return await self._start(self._record(job_id, token, grant, ttl_seconds))

    async def pull(self, token: str, destination: Path) -> Stage:
        """Stage a grant's only manifest and publish it at a directory; the same again, while it is intact, is immediate.

        The directory is the lease's holder: when it is gone, the stage is released.

        Raises:
            InvalidRequestError: the directory holds what is not ours. Nothing was begun.
        """
        grant = await self._verify(token)
        if len(grant.mounts) != 1:
            raise InvalidRequestError(f"a pull takes a grant for one source, not for {len(grant.mounts)}")
        path = await in_thread(destination.resolve)
        record = self._record(f"pull:{path}", token, grant, None)
        record.destination = path
        known = self._stages.get(record.id)
        earlier = await in_thread(self._pulls.earlier, path, [stage.record for stage in self.all()])
        if known and known.record.state == "READY" and await in_thread(self._pulls.is_intact, known.record):
            return known
        if not (known and known.is_working):
            await in_thread(self._pulls.destination(record).check, earlier)
            if known and known.record.state == "READY":
                await self.release(record.id)
        stage = await self._start(record)
        stage.earlier = earlier
        return stage

    async def _verify(self, token: str) -> Grant:
        try:
            return self._trust.verify(token)
        except UnknownKeyError:
            await self._ask_for_keys()
        return self._trust.verify(token)

    def _record(self, job_id: str, token: str, grant: Grant, ttl_seconds: float | None) -> StageRecord:
        now = self._clock()
        return StageRecord(
            id=stage_id_of(job_id, grant.organisation, grant.mounts),
            job_id=job_id,
            organisation=grant.organisation,
            grant=token,
            state="PENDING",
            created_at=now,
            expires_at=now + ttl_seconds if ttl_seconds is not None else None,
            mounts=[
                MountRecord(mount_location=mount.mount_location, manifest=str(mount.manifest), source=mount.source)
                for mount in grant.mounts
            ],
        )

    async def _start(self, record: StageRecord) -> Stage:
        stage = self._stages.setdefault(record.id, Stage(record))
        async with stage.lock:
            if stage.is_working or stage.record.state == "READY":
                stage.record.grant = record.grant  # perhaps a fresher one
                if record.expires_at is not None:
                    await self._renew(stage, record.expires_at)
                return stage
            try:
                await in_thread(self._records.save, record)
            except BdnError:
                if stage.record is record:
                    del self._stages[record.id]
                raise
            stage.record = record
            self._work(stage)
        return stage

    # --- working ---

    def _work(self, stage: Stage) -> None:
        stage.stop.clear()
        stage.progress = None
        stage.record.state = "STAGING"
        stage.task = self._crew.start(self._run(stage), f"stage {stage.record.id}")
        stage.notify()

    async def _run(self, stage: Stage) -> None:
        record, began = stage.record, time.monotonic()
        try:
            await self.release_abandoned()
            await self._staging.run(stage)
            record.ready_at = self._clock()
            record.bytes_per_second = stage.rate.total / max(time.monotonic() - began, 1e-3)
            await self._settle(stage, "READY")
        except BdnError as error:
            await self._fail(stage, error)
        except Exception as error:
            logger.exception("stage %s failed", record.id)
            await self._fail(stage, InternalError(f"{type(error).__name__}: {error}"))
        else:
            self._events.ready(time.monotonic() - began)
            if record.destination is not None:
                await self._release_replaced(record)

    async def _fail(self, stage: Stage, error: BdnError) -> None:
        record = stage.record
        logger.warning("stage %s of job %s failed: %s", record.id, record.job_id, error)
        record.error = body_of(error)
        with suppress(BdnError):  # the stage's error says more than the trouble of clearing up after it
            await in_thread(self._take_down, record)
        await self._cache.leave(record.id)
        try:
            await self._settle(stage, "FAILED")
        except BdnError as failure:
            logger.warning("stage %s could not be recorded as failed: %s", record.id, failure)
            record.state = "FAILED"
            stage.notify()

    async def _settle(self, stage: Stage, state: stage_schema.StageState) -> None:
        """Record a terminal state, then let it be seen."""
        record = stage.record
        if stage.progress:
            for index, mount in enumerate(record.mounts):
                mount.bytes_from = stage.progress.bytes_from(index)
        record.ended_at = None if state == "READY" else self._clock()
        await in_thread(self._records.save, record.model_copy(update={"state": state}))
        record.state = state
        stage.notify()
        self._events.changed()

    # --- ending ---

    async def renew(self, stage_id: str, ttl_seconds: float | None) -> Stage:
        """A new time to live, from now on; None means until it is released."""
        stage = self.find(stage_id)
        async with stage.lock:
            if stage.record.state in ("FAILED", "RELEASED"):
                raise InvalidRequestError(f"stage {stage_id} is {stage.record.state}; stage it again")
            await self._renew(stage, None if ttl_seconds is None else self._clock() + ttl_seconds)
        return stage

    async def _renew(self, stage: Stage, expires_at: float | None) -> None:
        record = stage.record
        await in_thread(self._records.save, record.model_copy(update={"expires_at": expires_at}))
        record.expires_at = expires_at
        for manifest in record.manifests:
            if any(holder.stage_id == record.id for holder in self._cache.index.leases.holders(manifest)):
                self._cache.index.leases.take(manifest, record.holder)

    async def release(self, stage_id: str, error: BdnError | None = None) -> Stage:
        """Take the stage down: exposure, view, lease, in this order. Idempotent. A pulled directory stays; it is the user's.

        Raises:
            MountFailedError, DiskFailedError: it could not be taken down, and is as it was; try again.
        """
        stage = self.find(stage_id)
        async with stage.lock:
            if stage.record.state != "RELEASED":
                await self.stop_work(stage)
                await to_the_end(self._release(stage, error))
        return stage

    async def _release(self, stage: Stage, error: BdnError | None) -> None:
        record = stage.record
        note = await in_thread(self._take_down, record)
        if note:
            logger.warning("stage %s of job %s: %s", record.id, record.job_id, note)
            record.mounts[0].view_reason = note
        await self._cache.leave(record.id)
        if error:
            record.error = body_of(error)
        await self._settle(stage, "RELEASED")

    @staticmethod
    async def stop_work(stage: Stage) -> None:
        """Cancel the stage's task and wait for it."""
        stage.stop.set()
        if stage.task and stage.is_working:
            stage.task.cancel()
            await asyncio.wait([stage.task])

    def _take_down(self, record: StageRecord) -> str | None:
        if record.destination is not None:
            self._pulls.destination(record).clear()
            return None
        return self._views.drop(record.id, [mount.mount_location for mount in record.mounts])
