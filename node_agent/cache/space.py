"""Budgets of the two tiers in bytes, from the operator's limits and the disk's free space."""

import errno
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bdn.core.cache.index import SpaceLedger
from bdn.core.errors import DiskFailedError
from bdn.core.units import format_size
from bdn.disk.durable import disk_errors
from bdn.disk.threads import in_thread
from node_agent.disk.cache_directory import CacheDirectory
from node_agent.settings import AgentSettings

logger = logging.getLogger(__name__)
_CLUSTER_PART: Final = 10  # one tenth with both roles, as whole files of the nodes contain most chunks of a cluster


@dataclass(frozen=True, slots=True)
class TierBudgets:
    """Maximum bytes of each tier, committed and reserved together."""

    node: int
    cluster: int


NOTHING: Final = TierBudgets(node=0, cluster=0)


def tier_limits(roles: Collection[str], limit: int, cluster_limit: int | None, there: int) -> TierBudgets:
    """The maximum of each tier, even on an empty disk.

    Args:
        roles: ``node``, ``cluster`` or both. A tier without its role holds nothing.
        limit: the operator's limit for the cache.
        cluster_limit: the operator's limit for the cluster tier. None: all of ``limit`` without another tier,
            otherwise a tenth of what the cache can have.
        there: bytes that the disk has for the cache.
    """
    if "cluster" not in roles:
        return TierBudgets(node=limit, cluster=0)
    if "node" not in roles:
        return TierBudgets(node=0, cluster=limit if cluster_limit is None else cluster_limit)
    tenth = max(0, min(limit, there)) // _CLUSTER_PART
    return TierBudgets(node=limit, cluster=tenth if cluster_limit is None else cluster_limit)


def kept(used: TierBudgets, limits: TierBudgets, disk: int, percent: int) -> TierBudgets:
    """Bytes that each tier holds on to under foreign disk pressure: at most ``percent`` of its limit.

    A limit beyond the ``disk``, in bytes, counts as the whole disk; otherwise such a cache would never shrink.
    """
    return TierBudgets(
        node=min(used.node, min(limits.node, disk) * percent // 100),
        cluster=min(used.cluster, min(limits.cluster, disk) * percent // 100),
    )


def share(there: int, limits: TierBudgets, keep: TierBudgets = NOTHING) -> TierBudgets:
    """Split ``there`` bytes of disk between the tiers (negative if other data took them).

    The cluster tier's room is separate, so the tiers reserve without coordination. It shrinks last: a chunk in the
    cluster tier saves the whole cluster a read of the mirror, a node's file saves that read for one node.

    No tier goes below ``keep``. It then holds more than the disk has for it, evicts no more under foreign pressure, and
    admits only as much as it evicts.
    """
    cluster = min(limits.cluster, max(keep.cluster, there - keep.node))
    return TierBudgets(node=min(limits.node, max(keep.node, there - cluster)), cluster=cluster)


@dataclass(frozen=True, slots=True)
class Room:
    """What the tiers may hold now, their upper limits, and the bytes held against foreign pressure (``pressed``)."""

    budgets: TierBudgets
    limits: TierBudgets
    pressed: TierBudgets

    @property
    def is_pressed(self) -> bool:
        return self.pressed.node > 0 or self.pressed.cluster > 0


def _limit_of(settings: AgentSettings, disk: os.statvfs_result) -> int:
    allowed = settings.cache_bytes
    return allowed if allowed is not None else disk.f_blocks * disk.f_frsize * 9 // 10


def _headroom_of(settings: AgentSettings, disk: os.statvfs_result) -> int:
    return settings.headroom_of(disk.f_blocks * disk.f_frsize)


def new_budgets(settings: AgentSettings, disk: os.statvfs_result) -> TierBudgets:
    """The budgets that an empty cache would have on this disk."""
    there = disk.f_bavail * disk.f_frsize - _headroom_of(settings, disk)
    limits = tier_limits(settings.roles, _limit_of(settings, disk), settings.cluster_cache_bytes, there)
    return share(max(0, there), limits)


class SetAside:
    """Bytes of the disk reserved for job volumes, by name. Thread-safe.

    Bytes that a volume occupies already are not free on the disk; only its remaining bytes still have to be.
    """

    def __init__(self) -> None:
        self._promised: dict[str, tuple[int, Callable[[], int]]] = {}

    def begin(self, name: str, size: int, occupied: Callable[[], int]) -> None:
        """``occupied`` returns the bytes already in use. It may be called by any thread, and raises nothing."""
        self._promised[name] = size, occupied

    def end(self, name: str) -> None:
        self._promised.pop(name, None)

    @property
    def promised(self) -> int:
        return sum(size for size, _ in list(self._promised.values()))

    @property
    def occupied(self) -> int:
        return sum(min(size, occupied()) for size, occupied in list(self._promised.values()))


class Space:
    """Budgets of one cache directory. ``node`` and ``cluster`` are the ledgers of its tiers. Methods block.

    Bytes set ``aside`` are subtracted before both.
    """

    def __init__(
        self, settings: AgentSettings, disk: CacheDirectory, *, node: SpaceLedger, cluster: SpaceLedger
    ) -> None:
        self.node = node
        self.cluster = cluster
        self.aside = SetAside()
        self._settings = settings
        self._root = disk.places.root
        self._filling = disk.places.filling
        self._unnamed = disk.unnamed
        self._most = 0  # the most bytes that the disk had for the cache since the start
        self._is_told = False

    def room(self, padding: int = 0) -> Room:
        """What each tier may hold now, less ``padding`` bytes that new files will waste in their last blocks."""
        used = TierBudgets(self.node.used_bytes, self.cluster.used_bytes)
        disk, there = self._look()
        self._most = max(self._most, there)
        size, aside = disk.f_blocks * disk.f_frsize, self.aside.promised
        there -= aside - self.aside.occupied
        allowed = self._settings
        limit = max(0, self._limit(disk) - aside)
        limits = tier_limits(allowed.roles, limit, allowed.cluster_cache_bytes, self._most)
        keep = kept(used, limits, size - self._headroom(disk), allowed.keep_percent)
        mine, plain = share(there - padding, limits, keep), share(max(0, there), limits)
        return Room(mine, limits, TierBudgets(max(0, mine.node - plain.node), max(0, mine.cluster - plain.cluster)))

    def most(self) -> int:
        """Bytes that content and set-aside data could occupy together on an empty disk."""
        with disk_errors(self._root):
            disk = os.statvfs(self._root)
        return min(self._limit(disk), disk.f_blocks * disk.f_frsize - self._headroom(disk))

    def padding(self, sizes: Collection[int]) -> int:
        """Bytes that files of these sizes waste in their last blocks: significant for a million small files."""
        with disk_errors(self._root):
            block = os.statvfs(self._root).f_frsize
        return sum(-size % block for size in sizes)

    def free_files(self) -> int | None:
        """Files that can be created beyond those already reserved. None if the file system has no limit."""
        with disk_errors(self._root):
            disk = os.statvfs(self._root)
        return max(0, disk.f_favail - self.node.reserved_count) if disk.f_files else None

    def free(self) -> int:
        """Bytes of the disk that any program could write now."""
        with disk_errors(self._root):
            disk = os.statvfs(self._root)
        return disk.f_bavail * disk.f_frsize

    def others(self) -> int:
        """Bytes of the disk in use by anything but the cache's content."""
        disk, there = self._look()
        ours = there + self._headroom(disk) - disk.f_bavail * disk.f_frsize + self.aside.occupied
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize - ours

    def tell(self, room: Room) -> None:
        """Log once when foreign data starts to press on the cache, and once when it stops."""
        if room.is_pressed and not self._is_told:
            size = format_size(room.pressed.node + room.pressed.cluster)
            logger.warning(
                "disk of %s: other data takes up cache space (%s over budget). The cache evicts nothing more for it, and new "
                "stages evict only for themselves; free the disk",
                self._root,
                size,
            )
        elif self._is_told and not room.is_pressed:
            logger.info("disk of %s: other data no longer takes up cache space", self._root)
        self._is_told = room.is_pressed

    def _look(self) -> tuple[os.statvfs_result, int]:
        """The disk, and the bytes it has for the cache: held on it + available - headroom.

        A fill that ends meanwhile counts once or not at all, never twice: committed bytes are read first, then the
        parts, then the free space. An eviction does not count twice, either: committed bytes are read again afterwards,
        and the smaller sum counts.
        """
        with disk_errors(self._root):
            before = self._committed()
            under_way = self._parts() + self._unnamed.size
            disk = os.statvfs(self._root)
            held = min(before, self._committed()) + under_way
        return disk, held + disk.f_bavail * disk.f_frsize - self._headroom(disk)

    def _limit(self, disk: os.statvfs_result) -> int:
        return _limit_of(self._settings, disk)

    def _headroom(self, disk: os.statvfs_result) -> int:
        return _headroom_of(self._settings, disk)

    def _committed(self) -> int:
        return self.node.committed_bytes + self.cluster.committed_bytes

    def _parts(self) -> int:
        occupied = 0
        with os.scandir(self._filling) as entries:
            for entry in entries:
                try:
                    occupied += entry.stat().st_blocks * 512
                except FileNotFoundError:
                    continue  # committed or evicted meanwhile
        return occupied


def check_fitness(folder: Path) -> None:
    """Raises ``DiskFailedError`` if the disk does not respond, is read-only, or has no block or inode left. Blocks."""
    with disk_errors(folder):
        disk = os.statvfs(folder)
        if disk.f_flag & os.ST_RDONLY:
            raise DiskFailedError(str(folder), "it is mounted read-only")
        blocks, inodes = (disk.f_bfree, disk.f_ffree) if os.geteuid() == 0 else (disk.f_bavail, disk.f_favail)
        if blocks == 0 or (disk.f_files and inodes == 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@asynccontextmanager
async def blaming(space: Space) -> AsyncIterator[None]:
    """Around fills with reserved room: a full disk raises with the bytes that other data has taken meanwhile.

    Reserved room that is missing is a neighbour's doing or a bug in BDN; the error shows which.
    """
    before = await in_thread(space.others)
    try:
        yield
    except DiskFailedError as error:
        if not error.is_full:
            raise
        found = error
        with suppress(DiskFailedError):  # the disk does not even respond
            taken = await in_thread(space.others) - before
            found = replace(error, others_bytes=max(0, taken))
        raise found from error
