"""How many bytes the cache may hold: what the operator allows, and what the disk really has."""

from __future__ import annotations

import os
from dataclasses import dataclass

from node_agent.disk.durable import disk_errors
from node_agent.disk.places import Places


@dataclass(frozen=True)
class Space:
    """The budget of one cache directory. ``limit`` and ``headroom`` are bytes; None means 90 % and 5 % of the disk."""

    places: Places
    limit: int | None
    headroom: int | None

    def budget(self, committed: int) -> int:
        """``min(limit, held on disk + available - headroom)``. Blocking.

        The order of looking makes a fill that runs meanwhile count once or not at all, never twice: ``committed`` was
        read before, then come the parts, then what is free.
        """
        with disk_errors(self.places.root):
            held = committed + self._parts()
            disk = os.statvfs(self.places.root)
        total = disk.f_blocks * disk.f_frsize
        limit = self.limit if self.limit is not None else total * 9 // 10
        headroom = self.headroom if self.headroom is not None else total // 20
        return max(0, min(limit, held + disk.f_bavail * disk.f_frsize - headroom))

    def _parts(self) -> int:
        """Bytes that files in progress occupy already."""
        occupied = 0
        with os.scandir(self.places.filling) as entries:
            for entry in entries:
                try:
                    occupied += entry.stat().st_blocks * 512
                except FileNotFoundError:
                    continue  # it was committed, or evicted, since
        return occupied
