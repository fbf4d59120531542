"""One job volume: its record, its directories, and the space that it takes."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError
from bdn.disk.durable import disk_errors
from bdn.disk.threads import in_thread
from bdn.wire.job_schema import (
    LEAST_BYTES,
    Bound,
    BoundedDirectory,
    CacheFolders,
    CheckpointDirectory,
    JobVolume,
    VolumeState,
)
from bdn.wire.shapes import body_of
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.space import SetAside
from node_agent.job.bounds import BoundedFolder, VolumeOwner
from node_agent.job.journal import VolumeJournal
from node_agent.job.syncing import Syncer

_CHECKPOINT_BYTES: Final = 100 * 1024**3


class VolumeRecord(BaseModel):
    """The file contains a grant, so it must stay private. Times are seconds since the epoch."""

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
    push_grant_expires_at: float = 0.0
    caches: CacheFolders | None = None
    team: str | None = None  # of the job's project
    uid: int | None = None  # owner and group of the directories; None: the agent's
    gid: int | None = None
    ended_at: float | None = None


@dataclass(eq=False)
class Volume:
    record: VolumeRecord
    folder: Path
    syncer: Syncer | None = None
    is_gone: bool = False
    error: BdnError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # the syncer pushes what the run left, then stops
    given_up: asyncio.Event = field(default_factory=asyncio.Event)  # the syncer stops

    def __post_init__(self) -> None:
        record = self.record
        self.journal = VolumeJournal(self.folder / "journal")  # of what was pushed
        owner, size = VolumeOwner(record.uid, record.gid), record.checkpoint_bytes
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
        if self.is_gone:
            return "ENDED"
        return "OPEN" if self.record.ended_at is None else "DRAINING"

    @property
    def is_usable(self) -> bool:
        """False if the checkpoints could not be opened at start, so no syncer pushes them."""
        return self.checkpoints is None or self.syncer is not None

    @property
    def unsynced_bytes(self) -> int:
        """Bytes of checkpoints that only this node has; before the first scan, all bytes that they occupy."""
        if self.checkpoints is None or self.is_gone:
            return 0
        if self.syncer is None or self.syncer.unsynced is None:
            return min(self.checkpoints.size, self.checkpoints.occupied())
        return self.syncer.unsynced_bytes

    @property
    def age(self) -> tuple[float, str]:
        return self.record.created_at, self.record.id

    @property
    def pushes_as(self) -> tuple[str | None, str | None, str | None]:
        """Organisation, team and job: job names are unique within a team only."""
        record = self.record
        return record.organisation, record.team, record.job

    @property
    def key(self) -> tuple[str, int]:
        return self.record.run_id, self.record.rank

    @property
    def folders(self) -> list[BoundedFolder]:
        scratch = [self.scratch] if self.state == "OPEN" else []
        return scratch + ([self.checkpoints] if self.checkpoints and not self.is_gone else [])

    @property
    def size(self) -> int:
        return sum(folder.size for folder in self.folders)

    def open(self) -> None:
        """Open the folders and the journal. Blocking. Raises ``DiskFailedError``."""
        for folder in self.folders:
            folder.open()
        if self.checkpoints is not None:
            self.journal.open()

    def occupied(self) -> int:
        """Bytes allocated on the disk, at most ``size``."""
        return sum(min(folder.size, folder.occupied()) for folder in self.folders)

    def notify(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def document(self) -> JobVolume:
        own = {
            "state": self.state,
            "scratch": _shown(self.scratch) if self.scratch in self.folders else None,
            "checkpoints": self._checkpoints(),
            "caches": self.record.caches if self.state == "OPEN" else None,
            "error": None if self.error is None else body_of(self.error),
        }
        return JobVolume.model_validate({**dict(self.record), **own})

    def _checkpoints(self) -> CheckpointDirectory | None:
        syncer = self.syncer
        if self.checkpoints is None or syncer is None:
            return None
        return CheckpointDirectory(
            **dict(_shown(self.checkpoints)),
            job=str(syncer.job),
            sync_status="COMPLETED" if syncer.unsynced == [] else "SYNCING",
            unsynced_bytes=syncer.unsynced_bytes,
            pushed=self.journal.names,
            left=list(syncer.left),
            error=body_of(syncer.error) if syncer.error else None,
        )


def _shown(folder: BoundedFolder) -> BoundedDirectory:
    return BoundedDirectory(path=str(folder.place), bytes=folder.size, bound=folder.bound, used_bytes=folder.used)


@dataclass
class VolumeSpace:
    """Space for volumes on the disk of ``root``; counted together with the cache if both share that disk."""

    cache: NodeCache
    root: Path
    headroom_of: Callable[[int], int]  # of a disk of so many bytes
    is_shared: bool = True  # whether the cache is on the same disk
    _aside: SetAside = field(default_factory=SetAside)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def look(self) -> None:
        """Set ``is_shared``. Blocking. Call once, before any space is reserved. Raises ``DiskFailedError``."""
        with disk_errors(self.root):
            self.is_shared = self.root.stat().st_dev == self.cache.files.places.root.stat().st_dev

    @property
    def aside(self) -> SetAside:
        return self.cache.space.aside if self.is_shared else self._aside

    def default_checkpoint_bytes(self) -> int:
        """Of a job that names no size: an eighth of the disk, at most 100 GiB and a quarter of what is free.

        Blocking. Raises ``DiskFailedError``.
        """
        with disk_errors(self.root):
            disk = os.statvfs(self.root)
        share = min(disk.f_blocks // 8, disk.f_bavail // 4) * disk.f_frsize
        return min(_CHECKPOINT_BYTES, max(LEAST_BYTES, share))

    async def take(self, volume: Volume) -> None:
        """Reserve the volume's bytes.

        Raises ``CacheTooSmallError``, ``CacheFullError``, ``DiskFailedError``: none is reserved.
        """
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
        most = total - self.headroom_of(total)
        promised = self.aside.promised
        free = disk.f_bavail * disk.f_frsize - (total - most) - (promised - self.aside.occupied)
        if size > most:
            raise CacheTooSmallError(size, most)
        if size > free:
            raise CacheFullError(size, max(0, free), promised, most)
