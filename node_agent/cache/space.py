"""How many bytes the two tiers may hold: what the operator allows, and what the disk really has."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from bdn.core.ledger import SpaceLedger
from bdn.core.tier_budgets import TierBudgets, share, tier_limits
from node_agent.disk.aside import Aside
from node_agent.disk.durable import disk_errors
from node_agent.disk.places import Places


@dataclass(frozen=True)
class Allowed:
    """What the operator allows, in bytes."""

    cache: int | None = None  # None: 90 % of the disk
    headroom: int | None = None  # to be left to others; None: 5 % of the disk
    cluster: int | None = None  # None: as ``tier_limits`` says


@dataclass(frozen=True)
class Space:
    """The budgets of one cache directory. ``node`` and ``cluster`` are the ledgers of its tiers. Methods block."""

    places: Places
    aside: Aside
    allowed: Allowed
    roles: Collection[str]
    node: SpaceLedger
    cluster: SpaceLedger

    def budgets(self) -> TierBudgets:
        """What each tier may hold now."""
        return share(self._there(), self.limits)

    def cluster_budget(self) -> int:
        """What the cluster tier may hold now."""
        return self.budgets().cluster

    @cached_property
    def limits(self) -> TierBudgets:
        """The most that each may ever hold: from what is there when this is asked first, which is once all is counted."""
        with disk_errors(self.places.root):
            disk = os.statvfs(self.places.root)
        limit = self.allowed.cache if self.allowed.cache is not None else disk.f_blocks * disk.f_frsize * 9 // 10
        return tier_limits(self.roles, limit, self.allowed.cluster, self._there())

    def _there(self) -> int:
        """Held on disk + available - headroom.

        A fill that ends meanwhile counts once or not at all, never twice: what is committed is read first, then come the
        parts, then what is free. Neither does an eviction: what it frees is read again afterwards, and the smaller sum counts.
        """
        with disk_errors(self.places.root):
            before = self._committed()
            under_way = self._parts() + self.aside.size
            disk = os.statvfs(self.places.root)
            held = min(before, self._committed()) + under_way
        headroom = self.allowed.headroom if self.allowed.headroom is not None else disk.f_blocks * disk.f_frsize // 20
        return held + disk.f_bavail * disk.f_frsize - headroom

    def _committed(self) -> int:
        return self.node.committed_bytes + self.cluster.committed_bytes

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
