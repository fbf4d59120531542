"""Job volumes: bounded directories that a rank writes on this node, with space reserved before they exist.

A volume is a folder with a record. Its scratch is removed when its run ends, its checkpoints after they are pushed.
A reboot ends all runs of the machine.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Semaphore
from typing import Final

from pydantic import ValidationError

from bdn.core.errors import (
    BdnError,
    DiskFailedError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    ScratchFullError,
)
from bdn.core.source.uri import CheckpointUri, parse_source
from bdn.disk.binding import mounts_below, unbind
from bdn.disk.durable import disk_errors, make_folder, sync_folder, write_durably
from bdn.disk.syscalls import prefer_others
from bdn.disk.threads import in_thread, to_the_end
from bdn.net.api_clients import MirrorClient
from bdn.net.client import OutageRetry
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities
from bdn.transfer.byte_threads import ByteThreads, pacer
from bdn.wire.grants import PushGrant
from bdn.wire.job_schema import Bound, JobVolumeRequest
from bdn.wire.stage_schema import ExposureKind
from node_agent.background_tasks import BackgroundTasks, happens_within
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.disk.cache_directory import boot_id
from node_agent.disk.trash import Trash
from node_agent.job.bounds import can_make_images
from node_agent.job.pushing import NAMERS, Pusher
from node_agent.job.shared_caches import SharedCaches
from node_agent.job.syncing import AGAIN_SECONDS, Syncer
from node_agent.job.tree import JobDirectory
from node_agent.job.volume import Volume, VolumeRecord, VolumeSpace
from node_agent.settings import AgentSettings

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
_PASSABLE: Final = 0o711  # search without list: only a process that knows the id gets in
_RECORD: Final = "volume.json"
_TRASH: Final = ".trash"
_SENDERS: Final = 4
_WALKS: Final = 2  # at once, over all volumes: in a directory of the deepest kind each holds 128 of 1,024 descriptors


@dataclass
class JobVolumes:
    """The service behind ``/job-volumes``.

    ``verify`` checks a push grant. ``new_syncer`` creates the syncer of a volume with checkpoints. ``keep`` receives
    the organisation's grant to read the newest checkpoint of an ended run.
    """

    settings: AgentSettings
    space: VolumeSpace
    background: BackgroundTasks
    clock: Clock
    verify: Callable[[str], Awaitable[PushGrant]]
    new_syncer: Callable[[Volume], Syncer]
    keep: Callable[[str, str], Awaitable[None]]
    caches: SharedCaches
    bound: Bound = "watch"
    _volumes: dict[str, Volume] = field(default_factory=dict)
    _creating: asyncio.Lock = field(default_factory=asyncio.Lock)  # so that two requests of a rank get one volume
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # for changes of volumes; taken after ``_creating``

    def __post_init__(self) -> None:
        self.root = self.space.root
        self.trash = Trash(self.root / _TRASH)

    # --- queries ---

    def all(self) -> list[Volume]:
        return sorted(self._volumes.values(), key=lambda one: one.age, reverse=True)

    def find(self, volume_id: str) -> Volume:
        if (found := self._volumes.get(volume_id)) is None:
            raise NotFoundError(f"job volume {volume_id}")
        return found

    async def wait(self, volume: Volume, seconds: float) -> None:
        """Wait until the volume's state or error changes, at most ``seconds``."""
        state, error = volume.state, volume.error
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (volume.state, volume.error) == (state, error) and not volume.is_gone:
                    await volume.changed.wait()

    @property
    def unsynced_bytes(self) -> int:
        """Bytes of checkpoints that only this node has."""
        return sum(one.unsynced_bytes for one in self._volumes.values())

    def state(self) -> dict[str, object]:
        return {
            "volume_id": self.caches.volume_id,
            "unsynced_bytes": self.unsynced_bytes,
            "caches": self.caches.mounted(),
        }

    # --- commands ---

    async def create(self, request: JobVolumeRequest, caller: int | None = None) -> Volume:
        """Create the volume of a rank, or return its existing volume. ``caller`` is the requesting user, if known.

        Raises:
            InvalidRequestError: a volume with other sizes, user, job or cache exists; checkpoint_bytes or push_grant is
                given without the other; the agent lacks the role node or may not create directories for that user.
            GrantInvalidError, GrantExpiredError: ``push_grant`` or ``cache_grant``.
            CacheNotSharedError: the grant names another volume of training caches.
            ServiceUnreachableError, StoreUnavailableError: the mirror did not record the mount of the caches.
            CacheTooSmallError, CacheFullError, DiskFailedError: nothing was created.
        """
        if "node" not in self.settings.roles:
            raise InvalidRequestError(
                "this agent creates no job volumes (BDN_AGENT_ROLES has no 'node'); send the request to the agent of the job's node"
            )
        if (request.push_grant is None) != (request.checkpoint_bytes is None):
            raise InvalidRequestError("give both checkpoint_bytes and push_grant, or neither")
        uid = _user(request, caller)
        granted = None if request.push_grant is None else await self.verify(request.push_grant)
        cache = None if request.cache_grant is None else await self.caches.granted(request.cache_grant)
        async with self._creating:
            async with self._lock:
                key = request.run_id, request.rank
                here = (
                    one for one in self._volumes.values() if one.key == key and one.state == "OPEN" and one.is_usable
                )
                known = next(here, None)
                if granted is not None and request.push_grant is not None:
                    await self._renew(granted, request.push_grant)
            if known is None:
                return await to_the_end(self._create(request, granted, uid))
        record = known.record
        sizes = request.scratch_bytes or record.scratch_bytes, request.checkpoint_bytes
        if sizes != (record.scratch_bytes, record.checkpoint_bytes):
            raise InvalidRequestError(f"{_whose(known)} has a volume of other sizes; remove {record.id} first")
        is_root = request.uid is None and caller == 0  # root may use volumes of all users
        if record.uid not in (None, uid) and not is_root:
            raise InvalidRequestError(
                f"{_whose(known)} has a volume of user {record.uid}, not of user {uid}; remove {record.id} first, or request it with that uid"
            )
        wanted = _pushes_as(granted), cache.project if cache else None
        if wanted != (known.pushes_as, record.caches.project_id if record.caches else None):
            raise InvalidRequestError(
                f"{_whose(known)} has a volume for another job or another training cache; remove {record.id} first"
            )
        return known

    async def _renew(self, granted: PushGrant, grant: str) -> None:
        """Give the new grant to all volumes of the job whose grant expires sooner, also after their runs ended."""
        for volume in self.all():
            if volume.pushes_as == _pushes_as(granted) and volume.record.push_grant_expires_at < granted.expires_at:
                await self._change(volume, push_grant=grant, push_grant_expires_at=granted.expires_at)
                if volume.syncer is not None:
                    volume.syncer.pusher.mirror.bearer = grant

    async def _change(self, volume: Volume, **changes: object) -> None:
        changed = volume.record.model_copy(update=changes)
        await in_thread(_save, volume.folder, changed)
        volume.record = changed

    async def _create(self, request: JobVolumeRequest, granted: PushGrant | None, uid: int | None) -> Volume:
        record = VolumeRecord(
            id=f"jv_{secrets.token_hex(12)}",
            run_id=request.run_id,
            rank=request.rank,
            organisation=granted.organisation if granted else None,
            bound=self.bound,
            scratch_bytes=request.scratch_bytes or self.settings.scratch_bytes,
            checkpoint_bytes=request.checkpoint_bytes,
            job=str(granted.job) if granted else None,
            team=granted.team if granted else None,
            push_grant=request.push_grant,
            push_grant_expires_at=granted.expires_at if granted else 0.0,
            uid=uid,
            gid=request.gid,
            created_at=self.clock(),
            boot=boot_id(),
        )
        volume = Volume(record, self.root / record.id)
        try:
            if request.cache_grant is not None:  # waits for the mirror, while volumes of other jobs can end
                record.caches = await self.caches.mount(request.cache_grant, record.id, huggingface=request.huggingface)
            async with self._lock:
                await self.space.take(volume)
                await in_thread(self._make, volume)
                self._begin(volume)
        except BaseException:
            await in_thread(self._discard, volume)
            self.space.aside.end(record.id)
            self.caches.release(record.id)
            raise
        logger.info("job volume created", extra={"volume": record.id, "run": record.run_id, "rank": record.rank})
        return volume

    def _begin(self, volume: Volume) -> None:
        """Register the volume and start its syncer, which waits for earlier volumes of the same job."""
        record = volume.record
        self._volumes[record.id] = volume
        if volume.checkpoints is not None:
            volume.syncer = self.new_syncer(volume)
            self.background.start(self._sync(volume, volume.syncer), f"sync {record.id}")

    async def _sync(self, volume: Volume, syncer: Syncer) -> None:
        async with syncer.pusher.mirror:
            with closing(volume.journal):
                for earlier in self.all():
                    is_before = earlier.age < volume.age and earlier.pushes_as == volume.pushes_as
                    while is_before and earlier.is_usable and not earlier.is_gone:
                        await earlier.changed.wait()
                while not volume.given_up.is_set() and not await self._pushed(volume, syncer):
                    pass
        if self.settings.keep_checkpoint and syncer.newest is not None and syncer.newest[1] is not None:
            with suppress(BdnError):  # logged; the checkpoint is then fetched when it is staged
                await self.keep(volume.record.id, syncer.newest[1])
        if syncer.left:
            facts = {"volume": volume.record.id, "job": volume.record.job, "checkpoints": ", ".join(syncer.left)}
            logger.warning("dropped checkpoints that were never complete", extra=facts)
        while not volume.is_gone:
            try:
                async with self._lock:  # ``_renew`` writes into the folders of all volumes of a job
                    await self._remove(volume)
            except BdnError as error:
                logger.warning("cannot remove job volume %s; retrying in a minute: %s", volume.record.id, error)
                await asyncio.sleep(AGAIN_SECONDS)

    async def _pushed(self, volume: Volume, syncer: Syncer) -> bool:
        """Push until the run ends, and at the next call what the run left; True when nothing is left to push.

        After a reboot no process writes any more, and only checkpoints that had settled before are pushed.
        """
        is_over = volume.ended.is_set()
        try:
            if is_over:
                await syncer.drain(volume.given_up, is_after_restart=volume.record.boot != boot_id())
            else:
                await syncer.run(volume.ended)
        except Exception as error:
            if isinstance(error, BdnError):
                syncer.error = error
                logger.warning("cannot push checkpoints of %s; retrying in a minute: %s", syncer.job, error)
            else:  # a bug triggered by one job's files must not stop other jobs
                syncer.error = InternalError(type(error).__name__)
                logger.exception("cannot push checkpoints of %s; retrying in a minute", syncer.job)
            await happens_within(AGAIN_SECONDS, volume.given_up if is_over else volume.ended)
            return False
        syncer.error = None
        return is_over

    async def end(self, volume: Volume) -> None:
        """End the run: remove scratch now, and the volume once its checkpoints are pushed. Idempotent.

        Raises ``DiskFailedError``; then the call can be repeated.
        """
        async with self._lock:
            if not (volume.is_gone or volume.ended.is_set()):
                await to_the_end(self._end(volume))

    async def _end(self, volume: Volume) -> None:
        await self._end_run(volume)
        if volume.is_gone:
            return
        if volume.syncer is None:
            volume.error = DiskFailedError(
                str(volume.folder),
                "the agent cannot open its checkpoints; it keeps them for BDN_AGENT_UNSYNCED_SECONDS, and retries at its next start",
            )
            volume.notify()
            raise volume.error
        volume.ended.set()
        volume.notify()

    async def _end_run(self, volume: Volume) -> None:
        if volume.record.ended_at is None:
            await self._change(volume, ended_at=self.clock())
            volume.error = None
        self.caches.release(volume.record.id)
        await in_thread(self._discard_scratch, volume)
        self.space.aside.end(volume.record.id)
        if volume.checkpoints is None:
            await self._remove(volume)
        else:
            self.space.aside.begin(volume.record.id, volume.size, volume.occupied)

    async def _remove(self, volume: Volume) -> None:
        self.caches.release(volume.record.id)
        await in_thread(self._discard, volume)
        self.space.aside.end(volume.record.id)
        volume.is_gone = True
        self._volumes.pop(volume.record.id, None)
        volume.notify()
        logger.info("job volume removed", extra={"volume": volume.record.id, "run": volume.record.run_id})

    # --- on disk ---

    def _make(self, volume: Volume) -> None:
        with disk_errors(volume.folder):
            make_folder(volume.folder, _PASSABLE)
            _save(volume.folder, volume.record)
            sync_folder(self.root)
        volume.open()

    def _discard_scratch(self, volume: Volume) -> None:
        volume.scratch.close()
        for path in (volume.scratch.image, volume.scratch.place):
            self.trash.discard(path)

    def _discard(self, volume: Volume) -> None:
        volume.journal.close()
        volume.scratch.close()
        if volume.checkpoints is not None:
            volume.checkpoints.close()
        self.trash.discard(volume.folder)

    # --- background ---

    def make(self) -> None:
        with disk_errors(self.root):
            make_folder(self.root.parent)
            make_folder(self.root, _PASSABLE)
        self.space.look()

    def load(self) -> list[VolumeRecord]:
        """Load the records. Removes folders without a record and unmounts leftover mounts. Blocking."""
        found = list(self._records())
        for mounted in mounts_below(self.root):
            if mounted.parent not in {self.root / record.id for record in found}:
                unbind(mounted)
        return found

    def _records(self) -> Iterator[VolumeRecord]:
        for folder in sorted(self.root.iterdir()):
            if folder.name == _TRASH:
                continue
            try:
                yield VolumeRecord.model_validate_json((folder / _RECORD).read_bytes())
            except (OSError, ValidationError) as error:
                logger.warning("removing %s: not a job volume (%s)", folder, type(error).__name__)
                for mounted in mounts_below(folder):
                    unbind(mounted)
                self.trash.discard(folder)

    async def resume(self) -> None:
        """Reopen volumes at start, before other space is reserved.

        A volume that cannot be opened is left unchanged until the next start.
        """
        for record in sorted(
            await in_thread(self.load), key=lambda one: (one.created_at, one.id)
        ):  # earlier volumes of a job push first
            volume = Volume(record, self.root / record.id)
            self.space.aside.begin(record.id, volume.size, volume.occupied)
            if record.caches is not None and volume.state == "OPEN":
                self.caches.hold(record.caches.project_id, record.id)
            try:
                await self._resume(volume)
            except BdnError as error:
                volume.error = error
                self._volumes[record.id] = volume
                logger.warning(
                    "cannot open job volume %s; retrying at the next start of the agent: %s", record.id, error
                )

    async def _resume(self, volume: Volume) -> None:
        is_over = volume.record.ended_at is not None or volume.record.boot != boot_id()
        if is_over:
            await self._end_run(volume)  # before it opens: scratch need not be mountable any more
        if volume.is_gone:
            return
        await in_thread(volume.open)
        if is_over:
            volume.ended.set()
        self._begin(volume)

    async def run(self) -> None:
        """Measure watched folders periodically, and give up checkpoints that could not be pushed for too long."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for volume in self.all():
                try:
                    await self._look(volume)
                except BdnError as error:
                    logger.warning("cannot measure job volume %s; retrying: %s", volume.record.id, error)

    async def _look(self, volume: Volume) -> None:
        ended_at = volume.record.ended_at
        if ended_at is not None and self.clock() - ended_at > self.settings.unsynced_seconds:
            await self._give_up(volume)
        for folder in volume.folders if volume.is_usable else ():
            await in_thread(folder.look)
        over = next((folder for folder in volume.folders if folder.is_exceeded), None)
        if over is not None and over.bound == "watch" and volume.error is None and volume.state == "OPEN":
            volume.error = ScratchFullError(str(over.place), over.used, over.size)
            logger.warning("%s: %s", _whose(volume), volume.error)
            volume.notify()

    async def _give_up(self, volume: Volume) -> None:
        """Also removes a volume that could not be opened and so has no syncer."""
        if volume.syncer is None:
            async with self._lock:
                await self._remove(volume)
        elif not volume.given_up.is_set():
            facts = {"job": volume.record.job, "bytes": volume.unsynced_bytes, "error": str(volume.syncer.error)}
            logger.warning("dropping checkpoints that could not be pushed for too long", extra=facts)
            volume.given_up.set()
            volume.ended.set()


def _user(request: JobVolumeRequest, caller: int | None) -> int:
    """The owner of the directories.

    Raises ``InvalidRequestError``: only root may create them for another user, or for a group.
    """
    own = os.geteuid()
    caller = own if caller is None or caller == 0 else caller  # root may use volumes of all users
    uid = caller if request.uid is None else request.uid
    if own and (uid, request.gid) not in ((own, None), (own, os.getegid())):
        raise InvalidRequestError(
            f"this agent runs as user {own} and creates job volumes only for that user, not for user {uid} or group {request.gid}: run the "
            f"agent as root, or the job as user {own} (uid {own})"
        )
    return uid


def _pushes_as(granted: PushGrant | None) -> tuple[str | None, str | None, str | None]:
    return (granted.organisation, granted.team, str(granted.job)) if granted else (None, None, None)


def _whose(volume: Volume) -> str:
    return f"rank {volume.record.rank} of run {volume.record.run_id}"


def _save(folder: Path, record: VolumeRecord) -> None:
    path = folder / _RECORD
    with disk_errors(path):
        write_durably(path, record.model_dump_json().encode())


async def open_volumes(
    stack: AsyncExitStack,
    settings: AgentSettings,
    cache: NodeCache,
    exposure: ExposureKind,
    *,
    pool: ConnectionPool,
    authorities: Authorities,
    outages: OutageRetry,
    verify: Callable[[str], Awaitable[PushGrant]],
    until_idle: Callable[[], Awaitable[None]],
    keep: Callable[[str, str], Awaitable[None]],
    caches: SharedCaches,
    clock: Clock,
) -> JobVolumes:
    """Open the job volumes, including the volumes of the last run. Raises ``DiskFailedError``.

    Pushes wait for ``until_idle``, so stages come first. Volumes are mounted where views are: both need the same
    rights, and jobs see both by the same mount propagation.
    """
    namers = ByteThreads(NAMERS, "agent-naming", on_start=prefer_others)
    stack.push_async_callback(in_thread, namers.close)
    senders = ByteThreads(_SENDERS, "agent-push", on_start=prefer_others)
    stack.push_async_callback(in_thread, senders.close)
    pace, walks = pacer(settings.sync_rate), Semaphore(_WALKS)

    def new_syncer(volume: Volume) -> Syncer:
        record, checkpoints = volume.record, volume.checkpoints
        job = parse_source(record.job or "")
        assert isinstance(job, CheckpointUri)  # noqa: S101 - from a verified push grant
        assert checkpoints is not None  # noqa: S101 - called for volumes with checkpoints only
        mirror = MirrorClient(
            settings.url, record.push_grant, agent_token=settings.shown_token, authorities=authorities
        )
        return Syncer(
            JobDirectory(checkpoints.place, walks=walks),
            job,
            Pusher(mirror, pool, namers, senders, outages, pace, until_idle),
            volume.journal,
            settle_seconds=settings.settle_seconds,
            is_noting=True,
            most_bytes=checkpoints.size,
        )

    volumes = JobVolumes(
        settings=settings,
        space=VolumeSpace(cache, settings.effective_scratch_dir.absolute(), settings.headroom_of),
        background=await stack.enter_async_context(BackgroundTasks()),
        clock=clock,
        verify=verify,
        new_syncer=new_syncer,
        keep=keep,
        caches=caches,
    )
    if "node" in settings.roles:
        await in_thread(volumes.make)
        if exposure == "bind" and await in_thread(can_make_images, volumes.root):
            volumes.bound = "image"
        await asyncio.to_thread(stack.enter_context, volumes.trash)
        await volumes.resume()
        volumes.background.start(volumes.run(), "job volumes")
    return volumes
