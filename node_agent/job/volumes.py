"""Job volumes: bounded directories that a rank writes on this node, with space reserved before they exist.

A volume is a folder with a record. Its scratch is removed when its run ends, its checkpoints after they are pushed.
A reboot ends all runs of the machine.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from bdn.core.errors import BdnError, DiskFailedError, InvalidRequestError, NotFoundError, ScratchFullError
from bdn.disk.durable import disk_errors, make_folder, sync_folder, write_durably
from bdn.wire.grants import PushGrant
from bdn.wire.job_schema import Bound, CacheFolders, JobVolumeRequest
from node_agent.background_tasks import BackgroundTasks, in_thread, to_the_end
from node_agent.cache.node_cache import Clock
from node_agent.disk.cache_directory import boot_id
from node_agent.disk.trash import Trash
from node_agent.job.shared_caches import OpenedCaches, SharedCaches
from node_agent.job.volume import Volume, VolumeRecord, VolumeSpace
from node_agent.job.volume_sync import VolumeSync
from node_agent.stage.view.exposure import mounts_below, unbind

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
_PASSABLE: Final = 0o711  # search without list: only a process that knows the id gets in
_RECORD: Final = "volume.json"
_TRASH: Final = ".trash"


@dataclass
class JobVolumes:
    """The service behind ``/job-volumes``.

    ``verify`` checks a push grant. ``open_sync`` creates the syncer of a volume with checkpoints. ``keep`` receives
    the organisation's grant to read the newest checkpoint of an ended run.
    """

    root: Path
    space: VolumeSpace
    background: BackgroundTasks
    bound: Bound
    scratch_bytes: int
    unsynced_seconds: float
    is_node: bool
    clock: Clock
    verify: Callable[[str], Awaitable[PushGrant]]
    open_sync: Callable[[Volume], VolumeSync]
    keep: Callable[[str, str], Awaitable[None]]
    caches: SharedCaches
    _volumes: dict[str, Volume] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.trash = Trash(self.root / _TRASH)

    # --- queries ---

    def all(self) -> list[Volume]:
        """Newest first."""
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
            CacheTooSmallError, CacheFullError, DiskFailedError: nothing was created.
        """
        if not self.is_node:
            raise InvalidRequestError(
                "this agent creates no job volumes (BDN_AGENT_ROLES has no 'node'); send the request to the agent of the job's node"
            )
        if (request.push_grant is None) != (request.checkpoint_bytes is None):
            raise InvalidRequestError("give both checkpoint_bytes and push_grant, or neither")
        uid = _user(request, caller)
        granted = None if request.push_grant is None else await self.verify(request.push_grant)
        cache = None if request.cache_grant is None else await self.caches.granted(request.cache_grant)
        async with self._lock:
            key = request.run_id, request.rank
            here = (one for one in self._volumes.values() if one.key == key and one.state == "OPEN" and one.is_usable)
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
        """Give the new grant to all volumes of the job whose grant expires much sooner, also after their runs ended.

        Not to every volume: a restarted syncer waits for checkpoints to settle again.
        """
        for volume in self.all():
            is_its = volume.pushes_as == _pushes_as(granted)
            if is_its and await self._is_much_longer(granted, volume.record.push_grant):
                renewed = volume.record.model_copy(update={"push_grant": grant})
                await in_thread(_save, volume.folder, renewed)
                volume.record = renewed
                if volume.sync is not None:
                    volume.sync.begin_anew()

    async def _is_much_longer(self, granted: PushGrant, other: str | None) -> bool:
        now = self.clock()
        try:
            known = await self.verify(other or "")
        except BdnError:
            return True
        return known.expires_at - now < (granted.expires_at - now) / 2

    async def _create(self, request: JobVolumeRequest, granted: PushGrant | None, uid: int | None) -> Volume:
        record = VolumeRecord(
            id=f"jv_{secrets.token_hex(12)}",
            run_id=request.run_id,
            rank=request.rank,
            organisation=granted.organisation if granted else None,
            bound=self.bound,
            scratch_bytes=request.scratch_bytes or self.scratch_bytes,
            checkpoint_bytes=request.checkpoint_bytes,
            job=str(granted.job) if granted else None,
            team=granted.team if granted else None,
            push_grant=request.push_grant,
            uid=uid,
            gid=request.gid,
            created_at=self.clock(),
            boot=boot_id(),
        )
        volume = Volume(record, self.root / record.id)
        try:
            if request.cache_grant is not None:
                opened = await self.caches.mount(request.cache_grant, record.id, huggingface=request.huggingface)
                record.caches = _folders(opened)
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
            volume.sync = self.open_sync(volume)
            self.background.start(self._sync(volume, volume.sync), f"sync {record.id}")

    async def _sync(self, volume: Volume, sync: VolumeSync) -> None:
        for earlier in self.all():
            is_before = earlier.age < volume.age and earlier.pushes_as == volume.pushes_as and earlier.is_usable
            while is_before and not earlier.is_gone:
                await earlier.changed.wait()
        await sync.run()
        if sync.kept is not None:
            with suppress(BdnError):  # the checkpoint is then fetched when it is staged
                await self.keep(volume.record.id, sync.kept)
        if sync.left:
            facts = {"volume": volume.record.id, "job": volume.record.job, "checkpoints": ", ".join(sync.left)}
            logger.warning("dropped checkpoints that were never complete", extra=facts)
        try:
            await self._remove(volume)
        except BdnError as error:
            logger.warning(
                "cannot remove job volume %s; retrying at the next start of the agent: %s", volume.record.id, error
            )

    async def end(self, volume: Volume) -> None:
        """End the run: remove scratch now, and the volume once its checkpoints are pushed. Idempotent.

        Raises ``DiskFailedError``; then the call can be repeated.
        """
        async with self._lock:
            if not (volume.is_gone or volume.is_ended):
                await to_the_end(self._end(volume))

    async def _end(self, volume: Volume) -> None:
        await self._note_end(volume)
        self.caches.release(volume.record.id)
        await in_thread(self._discard_scratch, volume)
        self.space.aside.end(volume.record.id)
        if volume.checkpoints is None:
            await self._remove(volume)
            return
        self.space.aside.begin(volume.record.id, volume.size, volume.occupied)
        if volume.sync is None:
            volume.error = DiskFailedError(
                str(volume.folder),
                "the agent cannot open its checkpoints; it keeps them for BDN_AGENT_UNSYNCED_SECONDS, and retries at its next start",
            )
            volume.notify()
            raise volume.error
        volume.sync.drain()
        volume.is_ended = True
        volume.notify()

    async def _note_end(self, volume: Volume) -> None:
        if volume.record.ended_at is None:
            ended = volume.record.model_copy(update={"ended_at": self.clock()})
            await in_thread(_save, volume.folder, ended)
            volume.record, volume.error = ended, None

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
        record = volume.record
        is_over = record.ended_at is not None or record.boot != boot_id()
        if is_over:
            await self._note_end(volume)
            await in_thread(self._discard_scratch, volume)  # not needed any more, so it need not be mountable
            if volume.checkpoints is None:
                await self._remove(volume)
                return
        await in_thread(volume.open)
        self._begin(volume)
        if is_over:
            await self._end(volume)

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
        if ended_at is not None and self.clock() - ended_at > self.unsynced_seconds:
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
        if volume.sync is not None:
            volume.sync.give_up()
        elif not volume.is_gone:
            await self._remove(volume)


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


def _folders(opened: OpenedCaches) -> CacheFolders:
    paths = opened.paths
    huggingface = None if paths.huggingface is None else str(paths.huggingface)
    return CacheFolders(
        project_id=opened.grant.project, project=str(paths.project), team=str(paths.team), huggingface=huggingface
    )


def _save(folder: Path, record: VolumeRecord) -> None:
    path = folder / _RECORD
    with disk_errors(path):
        write_durably(path, record.model_dump_json().encode())
