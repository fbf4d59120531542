"""The mirror's own part of an eviction: rows first, then chunks, with a record between them that survives a crash.

An object exists before a row says so; so, going away, the row goes first. Between the two no worker may begin a copy: it
could find a doomed chunk in the store, count on it, and lose it. While ``doomed`` is set, nothing is claimed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.groups import single_error
from bdn.core.ports import ChunkStore
from bdn.mirror.database import Database, ReadSession
from bdn.mirror.eviction.weights import EvictionWeights
from bdn.mirror.mirroring.worker import NEW_WORK
from bdn.mirror.repository import agents, contents, evictions, mirrors, removal
from bdn.mirror.watch import Watch
from bdn.wire.eviction_schema import EvictCommand, EvictedItem

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 30.0
_DELETED: Final = 256  # chunks that one trip to a thread deletes


@dataclass(frozen=True)
class _Plan:
    """What an eviction reports, and what goes with its victims because nothing else names or needs it."""

    items: list[EvictedItem]
    contents: list[str]
    slabs: list[str]

    @property
    def victims(self) -> list[str]:
        return [item.manifest.removeprefix("b3:") for item in self.items if not item.refused]


@dataclass(frozen=True)
class StoreEviction:
    """Evicts manifests from the store, one eviction at a time."""

    database: Database
    store: ChunkStore
    watch: Watch

    async def run(self, command: EvictCommand, organisation: str) -> None:
        """Plan, record and, unless it is a dry run, carry out."""
        async with self.database.alone("eviction"):
            async with self.database.write() as session:
                row = await evictions.change(session, command.id)
                if row is None:
                    return
                await mirrors.hold_claims(session)
                plan = await self._plan(session, command, organisation)
                row.items = [*row.items, *(item.model_dump() for item in plan.items)]
                if not command.dry_run and plan.victims:
                    doomed = await removal.remove(session, plan.victims, plan.contents, plan.slabs)
                    row.doomed = [raw.hex() for raw in doomed]
            await self._sweep()

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[None]:
        """In the background, delete what recorded evictions have doomed and a crash or a failing store left behind.

        Not only at start: so long as chunks are doomed, nobody can mirror anything.
        """

        async def sweep() -> None:
            while True:
                try:
                    async with self.database.alone("eviction"):
                        await self._sweep()
                except BdnError as error:
                    logger.warning("evicted chunks cannot be deleted yet", extra={"error": str(error)})
                await asyncio.sleep(SWEEP_SECONDS)

        with single_error():
            async with asyncio.TaskGroup() as group:
                task = group.create_task(sweep())
                yield
                task.cancel()

    async def _sweep(self) -> None:
        """One at a time: A and B delete the same chunks, A is done, a copy begins and counts on a chunk that B deletes."""
        async with self.database.read() as session:
            unswept = await evictions.unswept(session)
        for row in unswept:
            doomed = [Digest(digest) for digest in row.doomed or []]
            for start in range(0, len(doomed), _DELETED):
                await asyncio.to_thread(self._delete, doomed[start : start + _DELETED])
            async with self.database.write() as session:
                fresh = await evictions.change(session, row.id)
                if fresh is not None:
                    fresh.doomed = None
        if unswept:
            self.watch.notify(NEW_WORK)

    def _delete(self, chunks: list[Digest]) -> None:
        for chunk in chunks:
            self.store.delete(chunk)

    async def _plan(self, session: ReadSession, command: EvictCommand, organisation: str) -> _Plan:
        """What goes, and what is refused because a node leases it.

        A running mirror is never robbed, forced or not: it would publish what is not there.
        """
        busy = await mirrors.any_running(session, time.time())
        holders = await _holders(session)
        items: list[EvictedItem] = []
        weights = EvictionWeights()
        freed = 0
        for digest in await self._candidates(session, command, organisation):
            held_by = [f"mirror {mirror_id}" for mirror_id in busy] or holders.get(digest, [])
            refused = bool(busy) or (bool(held_by) and not command.force)
            if refused and command.lru_bytes is not None:
                continue  # LRU passes over what is in use
            size = await weights.take(session, digest, is_kept=refused)
            items.append(
                EvictedItem(tier="mirror", manifest=f"b3:{digest}", bytes=size, refused=refused, holders=held_by)
            )
            freed += 0 if refused else size
            if command.lru_bytes is not None and freed >= command.lru_bytes:
                break
        return _Plan(items, weights.contents, weights.slabs)

    @staticmethod
    async def _candidates(session: ReadSession, command: EvictCommand, organisation: str) -> list[str]:
        """The organisation's published manifests that the selector names, least recently used first."""
        own = await mirrors.sources_by_manifest(session, organisation)
        held = [digest for digest, *_ in await contents.manifests(session) if digest in own]
        if command.manifests is None:
            return held if command.all or command.lru_bytes is not None else []
        wanted = {manifest.removeprefix("b3:") for manifest in command.manifests}
        return [digest for digest in held if digest in wanted]


async def _holders(session: ReadSession) -> dict[str, list[str]]:
    """Who leases which manifest, from the agents' last heartbeats."""
    found: dict[str, list[str]] = {}
    for row in await agents.all_agents(session):
        for holding in row.holdings:
            if holding["held_by"]:
                names = [f"{holder} on {row.node}" for holder in holding["held_by"]]
                found.setdefault(holding["manifest"].removeprefix("b3:"), []).extend(names)
    return found
