"""Every transition of a stage: begun, READY or FAILED, renewed, released. Each is on disk before it is visible."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, DiskFailedError, InternalError
from bdn.core.events import Ending
from bdn.core.layout import Manifest
from bdn.core.pace.rate_limit import TrafficClass
from bdn.disk.threads import in_thread, to_the_end
from bdn.traces import spans
from bdn.wire.shapes import body_of
from bdn.wire.stage_schema import StageState
from node_agent.background_tasks import BackgroundTasks
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.disk.whole_files import ChangedFilesError
from node_agent.fill.provision import FillRequest, Provision
from node_agent.stage.pulled import PulledDirectories
from node_agent.stage.records import Decision, StageRecords, decisions
from node_agent.stage.stage import NodeStage, StageRecord, StageRegistry
from node_agent.stage.view.build import Built
from node_agent.stage.view.hub_folder import HubCommit, HubFolder
from node_agent.stage.view.views import ManifestFiles, Shown, Views
from node_agent.stage.warm import Warmer

logger = logging.getLogger(__name__)
_DRIFT_SECONDS: Final = 1.0  # tolerated between two clocks that were not set
_MEND_AGAIN_SECONDS: Final = 300.0
_LOOKS: Final = 3  # attempts when cached files change while the view is built
_Figures = Mapping[str, object]  # fields of one log line


@dataclass(frozen=True)
class Lifecycle:
    """Moves stages from state to state. Callers hold the stage's lock, except a stage's own task.

    ``clock`` is the time of day, for records and documents; ``elapsed`` is monotonic and decides when a stage
    expires. ``on_ready`` receives the seconds that a stage took. ``settle`` verifies cached files that were changed,
    and repairs or drops them.
    """

    registry: StageRegistry
    background: BackgroundTasks
    provision: Provision
    warmer: Warmer
    views: Views
    records: StageRecords
    clock: Clock
    elapsed: Clock
    on_ready: Callable[[float], None]
    settle: Callable[[Iterable[Digest]], Awaitable[None]]

    @property
    def cache(self) -> NodeCache:
        return self.provision.cache

    @property
    def pulled(self) -> PulledDirectories:
        return PulledDirectories(self.registry, self.cache.files)

    def write_down(self, kind: Decision, record: StageRecord, ending: Ending | None = None) -> None:
        """Record a decision before it is carried out. Blocking."""
        self.cache.events.decided(decisions(kind, record, ending))

    # --- starting and working ---

    def begin(self, stage: NodeStage) -> None:
        """Start a task that works until the stage is READY or FAILED. The record is already on disk."""
        stage.record.state = "STAGING"
        stage.warming = None
        stage.is_ending = False
        self._start_work(stage)

    def mend(self, stage: NodeStage) -> None:
        """Start a task that fetches what a READY stage lacks.

        On failure the stage stays READY, with its view and leases; without a view it becomes FAILED.
        """
        stage.is_mending = True
        self._start_work(stage)

    def is_to_mend(self, stage: NodeStage) -> bool:
        """Whether files were lost or quarantined, or a failed mend is due for a retry.

        Skips a stage whose lock is held, because it may be about to end, and an ending stage, which only a new
        request begins again.
        """
        is_left = not stage.is_working and not stage.lock.locked() and not stage.is_ending
        is_free = stage.record.state == "READY" and is_left and stage.record.destination is None
        is_due = stage.mend_at is None or stage.mend_at <= self.elapsed()
        return is_free and is_due and self.is_lacking(stage)

    def is_changed(self, record: StageRecord) -> bool:
        """Whether cached files that a READY stage shows changed since. Below a read-only mount none can. Blocking."""
        shown = {mount.digest for mount in record.mounts if mount.exposure != "bind" and mount.view == "hardlink"}
        held = shown & set(self.cache.index.manifests())
        return any(self.views.files.changed(self.cache.index.contents_of(manifest)) for manifest in held)

    def is_lacking(self, stage: NodeStage) -> bool:
        """Whether a READY stage is known to have missing or wrong files."""
        return stage.mend_at is not None or not all(map(self.cache.index.is_complete, stage.record.manifests))

    def _start_work(self, stage: NodeStage) -> None:
        stage.stop.clear()
        stage.progress = stage.mend_at = None
        stage.began_at = self.clock()
        stage.task = self.background.start(self._work(stage), f"stage {stage.record.id}")
        stage.notify()

    async def stop(self, stage: NodeStage) -> None:
        """Cancel the stage's tasks and wait for them. The record is unchanged."""
        stage.stop.set()
        if stage.task and stage.is_working:
            stage.task.cancel()
            await asyncio.wait([stage.task])
            stage.is_mending = False
        if stage.warming:
            await stage.warming.stop()

    async def _work(self, stage: NodeStage) -> None:
        record, began = stage.record, time.monotonic()
        give_up = self._keep if stage.is_mending else self._fail
        try:
            await self.release_abandoned()
            with spans.work("stage", stage=record.id, job=record.job_id, mounts=len(record.mounts)) as span:
                await self._bring(stage)
                span.set(**_bytes_by_tier(stage))
            record.ready_at = self.clock()
            came = stage.progress.rate.total if stage.progress else 0
            record.bytes_per_second = came / max(time.monotonic() - began, 1e-3) or None
            record.error = None
            await self._settle(stage, "READY", "arrived")
        except BdnError as error:
            await give_up(stage, error, _figures(stage, began))
            return
        except Exception as error:
            logger.exception("stage failed because of a bug", extra={"stage": record.id})
            await give_up(stage, InternalError(f"{type(error).__name__}: {error}"), _figures(stage, began))
            return
        logger.info("stage ready", extra=_figures(stage, began))
        self.on_ready(time.monotonic() - began)
        if record.destination is not None and not record.hub:  # a snapshot keeps the files of earlier selections
            others = [stage for stage in self.pulled.ready() if stage.record.id != record.id]
            replaced = [stage for stage in others if stage.record.destination == record.destination]
            await self.release_all(replaced, ending="replaced")
        self.warmer.begin(stage)

    async def _bring(self, stage: NodeStage) -> None:
        """Fetch the manifests and publish the view. The caller cleans up after an error."""
        record = stage.record
        wanted = [mount.digest for mount in record.mounts]
        request = FillRequest(wanted, record.grant, record.holder, TrafficClass.STAGE, stage.begin)
        built: dict[str, Built] | None = None
        for _ in range(_LOOKS):
            came = await self.provision.run(request)
            manifests = {mount.mount_location: manifest for mount, manifest in zip(record.mounts, came, strict=True)}
            if record.hub and record.destination is None:
                await self._list(record)
            if stage.is_mending and await in_thread(self._is_whole, stage, manifests):
                return  # healed in place: a job that reads the view must not lose its folder
            try:
                with spans.span("view"):
                    built = await (self._publish if record.destination else self._show)(stage, manifests)
                break
            except ChangedFilesError as error:
                logger.warning(
                    "%s cached files of stage %s were changed; verifying them", len(error.contents), record.id
                )
                await self.settle(error.contents)
        if built is None:
            raise DiskFailedError(
                str(self.views.places.files), "another program keeps changing cached files; find what writes there"
            )
        for mount in record.mounts:
            view = built[mount.mount_location]
            mount.view, mount.view_reason = view.kind, view.reason
            mount.exposure = "none" if record.destination else self.views.kind

    async def _list(self, record: StageRecord) -> None:
        """Have the listing of each commit: a view without the whole would be taken for it."""
        for mount in record.mounts:
            commit = mount.repository.at(mount.commit or "")
            await self.provision.catalogue.tree(mount.digest, commit, record.grant)

    def _is_whole(self, stage: NodeStage, manifests: Mapping[str, Manifest]) -> bool:
        record = stage.record
        if record.destination or any(mount.exposure != self.views.kind for mount in record.mounts):
            return False
        return self.views.is_intact(record.id, self._shown(record, manifests))

    async def _publish(self, stage: NodeStage, manifests: Mapping[str, Manifest]) -> dict[str, Built]:
        """Build and publish the view of a pull.

        A new directory is recorded before it appears, an existing directory after its files are in place. So after a
        kill at any point the next start knows which files are the agent's.
        """
        record, destination = stage.record, self.pulled.at(stage.record)
        ((location, manifest),) = manifests.items()
        with ExitStack() as stack:
            await in_thread(stack.enter_context, destination.claimed())
            try:
                if await in_thread(destination.makes_copies):
                    await self.cache.make_room(manifest.bytes_total, manifest.digest, record.holder)
                built, inode = await in_thread(destination.build, manifest, stage.earlier, stage.stop)
                if not destination.is_in_place:
                    await self._save(stage, {"inode": inode}, None)
                await in_thread(destination.publish, manifest, stage.earlier)
                if destination.is_in_place:
                    await self._save(stage, {"inode": await in_thread(destination.inode)}, None)
                    await in_thread(destination.settle)
            finally:
                await in_thread(destination.clear)
        return {location: built}

    async def _show(self, stage: NodeStage, manifests: Mapping[str, Manifest]) -> dict[str, Built]:
        record = stage.record
        shown = self._shown(record, manifests)
        if any(mount.exposure not in (None, self.views.kind) for mount in record.mounts):
            await in_thread(self.views.drop, record.id, shown)  # exposed with other settings
        built = await in_thread(self.views.publish, record.id, shown, stage.stop)
        await in_thread(self.views.expose, record.id, shown)
        return {mount.mount_location: built[record.shown_at(mount)] for mount in record.mounts}

    def _shown(self, record: StageRecord, manifests: Mapping[str, Manifest]) -> dict[str, Shown]:
        """What a stage shows, by place. ``manifests`` are by mount location."""
        if not record.hub:
            return {location: ManifestFiles(manifest) for location, manifest in manifests.items()}
        found: defaultdict[str, list[HubCommit]] = defaultdict(list)
        for mount in record.mounts:
            commit, manifest = mount.commit or "", manifests[mount.mount_location]
            tree = self.cache.files.records.tree(mount.digest, commit)
            found[record.shown_at(mount)].append(HubCommit(mount.repository, commit, manifest, tree))
        return {place: HubFolder(tuple(commits)) for place, commits in found.items()}

    def recorded(self, record: StageRecord) -> Mapping[str, Shown | None]:
        """The views of a stage by place; None if the cache does not hold a manifest. Blocking. Raises ``DiskFailedError``."""
        load = self.cache.files.records.manifest
        held = {mount.mount_location: load(mount.digest) for mount in record.mounts}
        known = {location: manifest for location, manifest in held.items() if manifest is not None}
        if len(known) == len(held):
            return self._shown(record, known)
        if record.hub:
            return dict.fromkeys(self.places_of(record))
        return {location: ManifestFiles(manifest) if manifest else None for location, manifest in held.items()}

    @staticmethod
    def places_of(record: StageRecord) -> list[str]:
        return list(dict.fromkeys(map(record.shown_at, record.mounts)))

    async def _fail(self, stage: NodeStage, error: BdnError, figures: _Figures) -> None:
        record = stage.record
        stage.is_ending = True
        logger.warning("stage failed", extra={**figures, "code": error.code, "error": str(error)})
        record.error = body_of(error)
        with suppress(BdnError):  # the stage's own error matters more than a failed cleanup
            await in_thread(self._take_down, record)
        await self._give_back(record, self.cache.leave(record.id))
        try:
            await self._settle(stage, "FAILED", "failed")
        except BdnError as failure:
            logger.warning("cannot record the failure of stage %s: %s", record.id, failure)
            record.state = "FAILED"
            stage.notify()

    async def _keep(self, stage: NodeStage, error: BdnError, figures: _Figures) -> None:
        """A failed mend keeps the view of a READY stage, because a job may be reading it."""
        record = stage.record
        if not await in_thread(self._is_shown, record):
            stage.is_mending = False
            await self._fail(stage, error, figures)
            return
        logger.warning("stage lacks files", extra={**figures, "code": error.code, "error": str(error)})
        record.error = body_of(error)
        stage.mend_at = self.elapsed() + _MEND_AGAIN_SECONDS
        await self._give_back(record, self.cache.rest(record.id))
        with suppress(BdnError):  # it is in the log
            await in_thread(self.write_down, "not_mended", record)
        stage.is_mending = False
        stage.notify()
        self.cache.events.changed()

    @staticmethod
    async def _give_back(record: StageRecord, giving: Awaitable[None]) -> None:
        """An error of the disk leaves the space reserved but does not block the transition."""
        try:
            await giving
        except BdnError as failure:
            logger.warning("cannot free the space reserved for stage %s: %s", record.id, failure)

    # --- ending ---

    async def release(
        self,
        stage: NodeStage,
        error: BdnError | None = None,
        *,
        ending: Ending = "released",
        still: Callable[[NodeStage], bool] = lambda _: True,
    ) -> None:
        """Release the stage: exposure, view, lease, in this order.

        Does nothing if it is released already or no longer ``still(stage)``.

        Raises:
            MountFailedError, DiskFailedError: the stage is still there and can be released again.
        """
        async with stage.lock:
            if stage.record.state != "RELEASED" and still(stage):
                await self.stop(stage)
                await to_the_end(self._release(stage, error, ending))

    async def _release(self, stage: NodeStage, error: BdnError | None, ending: Ending) -> None:
        record = stage.record
        stage.is_ending = True
        note = await in_thread(self._take_down, record)
        if note:
            logger.warning("stage %s of job %s: %s", record.id, record.job_id, note)
            record.mounts[0].view_reason = note
        await self.cache.leave(record.id)
        if error:
            record.error = body_of(error)
        await self._settle(stage, "RELEASED", "ended", ending)
        logger.info("stage released", extra={"stage": record.id, "job": record.job_id, "reason": ending})

    async def release_abandoned(self) -> None:
        await self.release_all(await in_thread(self.pulled.abandoned), ending="abandoned")

    async def release_all(
        self,
        stages: Iterable[NodeStage],
        error: BdnError | None = None,
        *,
        ending: Ending = "released",
        still: Callable[[NodeStage], bool] = lambda _: True,
    ) -> None:
        """Release each stage. Failures are logged; the next reap retries."""
        for stage in stages:
            try:
                await self.release(stage, error, ending=ending, still=still)
            except BdnError as failure:
                logger.warning("cannot release stage %s: %s", stage.record.id, failure)

    def _is_shown(self, record: StageRecord) -> bool:
        try:
            return any(self.views.stands(record.id, mount.exposure or self.views.kind) for mount in record.mounts)
        except BdnError as error:  # unknown: a job may be reading it
            logger.warning("cannot check whether the view of stage %s is mounted: %s; keeping it", record.id, error)
            return True

    def _take_down(self, record: StageRecord) -> str | None:
        if record.destination is not None:
            self.pulled.clear(record)
            return None
        return self.views.drop(record.id, self.recorded(record))

    # --- recording ---

    async def renew(self, stage: NodeStage, ttl_seconds: float | None) -> None:
        """Let the stage expire ``ttl_seconds`` from now; None means never.

        A stage that fails meanwhile has released its leases and must not lease again: no later transition would
        release them.
        """
        expires_at = None if ttl_seconds is None else self.clock() + ttl_seconds
        is_news = expires_at != stage.record.expires_at  # a repeated request is not a renewal
        changes = {"expires_at": expires_at, "ttl_seconds": ttl_seconds}
        await self._save(stage, changes, "renewed" if is_news else None)
        self.live_on(stage)
        if not stage.is_ending:
            self.lease_again(stage.record)

    def live_on(self, stage: NodeStage) -> None:
        """Restart the time to live, as at agent start: no client could renew while the agent was down."""
        record, seconds = stage.record, stage.record.ttl_seconds
        stage.deadline = None if seconds is None else self.elapsed() + seconds
        record.expires_at = None if seconds is None else self.clock() + seconds

    def is_over(self, stage: NodeStage) -> bool:
        """Whether the time to live has passed. Updates ``expires_at`` if the wall clock was set meanwhile."""
        if stage.deadline is None or stage.record.state not in ("PENDING", "STAGING", "READY"):
            return False
        left = stage.deadline - self.elapsed()
        expires_at = self.clock() + left
        if abs(expires_at - (stage.record.expires_at or 0)) > _DRIFT_SECONDS:
            stage.record.expires_at = expires_at
        return left <= 0

    def lease_again(self, record: StageRecord) -> None:
        index = self.cache.index
        for manifest in filter(index.holds, record.manifests):
            index.leases.take(manifest, record.holder)

    async def _settle(self, stage: NodeStage, state: StageState, kind: Decision, ending: Ending | None = None) -> None:
        record = stage.record
        for mount, bytes_from in zip(record.mounts, stage.bytes_from(), strict=True):
            mount.bytes_from = bytes_from
        if stage.progress and not stage.is_terminal:
            record.transfer = stage.progress.budget.document()
        changes = {"state": state, "ended_at": None if state == "READY" else self.clock()}
        await self._save(stage, changes, kind, ending)
        stage.is_mending = False
        stage.notify()
        self.cache.events.changed()

    async def _save(
        self, stage: NodeStage, changes: Mapping[str, object], kind: Decision | None, ending: Ending | None = None
    ) -> None:
        """On disk first, then in memory; serialised, so that the disk never returns to an older state."""
        async with stage.saving:
            await in_thread(self._write, stage.record.model_copy(update=changes), kind, ending)
            for name, value in changes.items():
                setattr(stage.record, name, value)

    def _write(self, record: StageRecord, kind: Decision | None, ending: Ending | None) -> None:
        if kind:
            self.write_down(kind, record, ending)
        self.records.save(record)


def _bytes_by_tier(stage: NodeStage) -> dict[str, int]:
    came = stage.bytes_from()
    return {f"from_{tier}": sum(getattr(one, tier) for one in came) for tier in ("node", "cluster", "mirror")}


def _figures(stage: NodeStage, began: float) -> _Figures:
    came = _bytes_by_tier(stage)
    return {
        "stage": stage.record.id,
        "job": stage.record.job_id,
        "bytes": sum(came.values()),
        "seconds": round(time.monotonic() - began, 3),
        **came,
    }
