"""One job volume: what is on record of it, its directories, and the room that it takes."""

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError
from bdn.disk.durable import disk_errors
from bdn.wire.job_schema import Bound, BoundedDirectory, CacheFolders, CheckpointDirectory, JobVolume, VolumeState
from bdn.wire.shapes import body_of, moment
from node_agent.background_tasks import in_thread
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.space import SetAside
from node_agent.job.bounds import BoundedFolder, Owner
from node_agent.job.volume_sync import VolumeSync


class VolumeRecord(BaseModel):
    """One volume. Times are seconds since the epoch. The grant makes the file private."""

    id: str
    run_id: str
    rank: int
    organisation: str | None
    bound: Bound
    scratch_bytes: int
    checkpoint_bytes: int | None
    job: str | None
    push_grant: str | None
    created_at: float
    boot: str
    caches: CacheFolders | None = None
    team: str | None = None  # whose the project of the job is
    uid: int | None = None  # the user and the group of the directories; None: the agent's
    gid: int | None = None
    ended_at: float | None = None


@dataclass(eq=False)
class Volume:
    """State in memory."""

    record: VolumeRecord
    folder: Path
    sync: VolumeSync | None = None
    is_gone: bool = False
    is_ended: bool = False  # all of its end is done, but for checkpoints that are being pushed
    error: BdnError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        record = self.record
        owner, size = Owner(record.uid, record.gid), record.checkpoint_bytes
        self.scratch = BoundedFolder(
            self.folder / "scratch", record.scratch_bytes, record.bound, is_kept=False, owner=owner
        )
        self.checkpoints = (
            None
            if size is None
            else BoundedFolder(self.folder / "checkpoints", size, record.bound, is_kept=True, owner=owner)
        )

    @property
    def state(self) -> VolumeState:
        """Where it is."""
        if self.is_gone:
            return "ENDED"
        return "OPEN" if self.record.ended_at is None else "DRAINING"

    @property
    def is_usable(self) -> bool:
        """Whether somebody pushes its checkpoints; nobody does where these could not be opened at a start."""
        return self.checkpoints is None or self.sync is not None

    @property
    def unsynced_bytes(self) -> int:
        """Bytes of checkpoints that are here alone; all that they take, before somebody has looked at what that is."""
        if self.checkpoints is None or self.is_gone:
            return 0
        found = self.sync.unsynced_bytes if self.sync is not None else None
        return min(self.checkpoints.size, self.checkpoints.occupied()) if found is None else found

    @property
    def age(self) -> tuple[float, str]:
        """Sorts the oldest first."""
        return self.record.created_at, self.record.id

    @property
    def pushes_as(self) -> tuple[str | None, str | None, str | None]:
        """Whose job's checkpoints are here: organisation, team and job. Others may have one of the same name."""
        record = self.record
        return record.organisation, record.team, record.job

    @property
    def key(self) -> tuple[str, int]:
        """Whose it is."""
        return self.record.run_id, self.record.rank

    @property
    def folders(self) -> list[BoundedFolder]:
        """Those that there are now."""
        scratch = [self.scratch] if self.state == "OPEN" else []
        return scratch + ([self.checkpoints] if self.checkpoints and not self.is_gone else [])

    @property
    def size(self) -> int:
        """Bytes that are set aside for it."""
        return sum(folder.size for folder in self.folders)

    def open(self) -> None:
        """Let its directories appear, or find them. Blocking."""
        for folder in self.folders:
            folder.open()

    def occupied(self) -> int:
        """Bytes of the disk that it has taken."""
        return sum(min(folder.size, folder.occupied()) for folder in self.folders)

    def notify(self) -> None:
        """Wake who waits for a change of state."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def document(self) -> JobVolume:
        """As the wire shows it."""
        record, shown = self.record, self.folders
        scratch, checkpoints, sync = self.scratch, self.checkpoints, self.sync
        return JobVolume(
            id=record.id,
            run_id=record.run_id,
            rank=record.rank,
            uid=record.uid,
            gid=record.gid,
            state=self.state,
            created_at=moment(record.created_at),
            ended_at=None if record.ended_at is None else moment(record.ended_at),
            scratch=_shown(scratch) if scratch in shown else None,
            checkpoints=CheckpointDirectory(**_shown(checkpoints).model_dump(), **sync.figures())
            if sync is not None and checkpoints is not None
            else None,
            caches=record.caches if self.state == "OPEN" else None,
            error=None if self.error is None else body_of(self.error),
        )


def _shown(folder: BoundedFolder) -> BoundedDirectory:
    return BoundedDirectory(path=str(folder.place), bytes=folder.size, bound=folder.bound, used_bytes=folder.used)


@dataclass
class VolumeSpace:
    """The bytes of volumes on the disk of ``root``: in one sum with the cache, where that is on the same disk."""

    cache: NodeCache
    root: Path
    headroom_bytes: int | None
    is_shared: bool = True  # with the cache; see ``look``
    _aside: SetAside = field(default_factory=SetAside)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def look(self) -> None:
        """Find out whether the cache is on the same disk. Blocking, once, before anything is taken. Raises ``DiskFailedError``."""
        with disk_errors(self.root):
            self.is_shared = self.root.stat().st_dev == self.cache.files.places.root.stat().st_dev

    @property
    def aside(self) -> SetAside:
        """Where they are counted."""
        return self.cache.space.aside if self.is_shared else self._aside

    async def take(self, volume: Volume) -> None:
        """Set its bytes aside. Raises ``CacheTooSmallError``, ``CacheFullError``, ``DiskFailedError``: none are."""
        if self.is_shared:
            await self.cache.set_aside(volume.record.id, volume.size, volume.occupied)
            return
        async with self._lock:
            await in_thread(self._check, volume.size)
            self.aside.begin(volume.record.id, volume.size, volume.occupied)

    def _check(self, size: int) -> None:
        with disk_errors(self.root):
            disk = os.statvfs(self.root)
        total = disk.f_blocks * disk.f_frsize
        most = total - (total // 20 if self.headroom_bytes is None else self.headroom_bytes)
        promised = self.aside.promised
        free = disk.f_bavail * disk.f_frsize - (total - most) - (promised - self.aside.occupied)
        if size > most:
            raise CacheTooSmallError(size, most)
        if size > free:
            raise CacheFullError(size, max(0, free), promised, most)
