"""Garbage collection of the store: drops manifests that no organisation may read, deletes chunks without references.

A collection decides by database rows alone and does not list the store, except for orphans. It runs beside mirrors,
readers and other collections, and no mirror or push delays it:

- One transaction drops a manifest, after checking again that the manifest is dead. A concurrent publish or restore
  comes before or after that transaction, never in between.
- A chunk is let go when its own row counts no references. A new reference changes the same row
  (``bdn.mirror.db.chunks``).
- The row of a chunk that was let go stays until the object is deleted. After a crash between the two, the next
  collection deletes the object again.
- A reader that has a chunk open reads it to the end. Any later reader finds no manifest that its organisation may read.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from bdn.core.store import EVIDENCE_SECONDS, KINDS, Kind, MirrorStore, NotDeletedError
from bdn.mirror.db import chunks, collection, identities
from bdn.mirror.db.chunks import AT_ONCE, PUT_SECONDS, StoredChunk
from bdn.mirror.db.database import Database
from bdn.store.boot_clock import since_boot


@dataclass
class Collected:
    """Counts and bytes by kind. The bytes of a dropped manifest are counted when its chunks are deleted."""

    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    bytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, kind: Kind, count: int, size: int = 0) -> None:
        self.counts[kind] += count
        self.bytes[kind] += size


@dataclass(frozen=True)
class Collector:
    """Collects manifests that were evicted ``tombstone_seconds`` ago, chunks without references, and old evidence."""

    database: Database
    store: MirrorStore
    tombstone_seconds: float
    clock: Callable[[], float] = time.time

    async def collect(
        self, *, grace_seconds: float | None, dry_run: bool = False, only_orphans: bool = False
    ) -> Collected:
        """Collect everything that may go, or with ``dry_run`` only count it.

        Args:
            grace_seconds: how long a chunk must have been without references; chunks of expired manifests need no
                grace. None: collect only expired manifests and their chunks.
            dry_run: only read.
            only_orphans: delete only objects without a row, which remain when a power loss takes a database's last
                commits. Only this lists the store.

        Raises:
            StoreUnavailableError: some objects may remain; the next collection deletes them.
        """
        await asyncio.to_thread(self.store.check)  # raises while the store is away, before any row is let go
        collected = Collected()
        if only_orphans:
            await self._collect_orphans(collected, dry_run=dry_run)
        else:
            await self._collect(collected, grace_seconds, dry_run=dry_run)
        if grace_seconds is not None:
            before = self.clock() - max(grace_seconds, PUT_SECONDS)
            left = await asyncio.to_thread(partial(self.store.drop_leftovers, before, dry_run=dry_run))
            collected.add("incoming", *left)
        return collected

    async def _collect(self, collected: Collected, grace_seconds: float | None, *, dry_run: bool) -> None:
        now = self.clock()
        grace = now if grace_seconds is None else grace_seconds
        before, evidence_before = now - self.tombstone_seconds, now - EVIDENCE_SECONDS
        async with collection.plan(self.database) as plan:
            expired = await collection.expired(plan.session, before)
            sizes = {manifest: await plan.freed(manifest) for manifest in expired}
            if dry_run:
                collected.add("manifests", len(sizes))
                if grace_seconds is not None:
                    collected.add("evidence", await plan.add_evidence(evidence_before))
                collected.add("chunks", *await plan.chunks(grace, now))
                return
        for manifest, size in sizes.items():
            async with self.database.write(patient=True) as session:
                is_dropped = await collection.drop(session, manifest, before, now, size)
            collected.add("manifests", int(is_dropped))
        if grace_seconds is not None:
            await self._drop_evidence(collected, evidence_before)
        await self._take_apart()
        await self._collect_chunks(collected, grace)

    async def _drop_evidence(self, collected: Collected, before: float) -> None:
        count = None
        while count != 0:
            async with self.database.write(patient=True) as session:
                count = await collection.drop_evidence(session, before)
            collected.add("evidence", count)

    async def _take_apart(self) -> None:
        count = None
        while count != 0:
            async with self.database.write(patient=True) as session:
                count = await chunks.of(session, chunks.take_apart)

    async def _collect_chunks(self, collected: Collected, grace_seconds: float) -> None:
        failure: NotDeletedError | None = None
        while True:
            began, now = since_boot(), self.clock()
            async with self.database.write(patient=True) as session:
                going = await chunks.of(session, chunks.collect, grace_seconds, now)
            if not going:
                break
            failure = await self._delete(collected, going, began, now) or failure
        if failure is not None:
            raise failure

    async def _collect_orphans(self, collected: Collected, *, dry_run: bool) -> None:
        """Lists the store before reading rows. A row is committed before its object is put, so no new chunk is an orphan."""
        listed, failure = self.store.listed(), None
        while some := await asyncio.to_thread(lambda: dict(islice(listed, AT_ONCE))):
            async with self.database.read() as session:
                known = await chunks.of(session, chunks.known, some)
            orphans = {digest: size for digest, size in some.items() if digest not in known}
            if dry_run:
                collected.add("chunks", len(orphans), sum(orphans.values()))
            elif orphans:
                began, now = since_boot(), self.clock()
                async with self.database.write(patient=True) as session:
                    going = await chunks.of(session, chunks.let_orphans_go, orphans, now)
                failure = await self._delete(collected, going, began, now) or failure
        if failure is not None:
            raise failure

    async def _delete(
        self, collected: Collected, going: Sequence[StoredChunk], began: float, let_go_at: float
    ) -> NotDeletedError | None:
        """Delete objects, then their rows. Objects that may remain keep their rows; the returned error names them.

        Raises ``StoreUnavailableError`` if no object is known to be deleted: the store is away.
        """
        failure: NotDeletedError | None = None
        gone = going
        try:
            await asyncio.to_thread(partial(self.store.delete, [chunk.digest for chunk in going], began=began))
        except NotDeletedError as error:
            failure = error
            gone = [chunk for chunk in going if chunk.digest not in error.left]
            if not gone:
                raise
        async with self.database.write(patient=True) as session:
            await chunks.of(session, chunks.forget, gone, let_go_at)
            await identities.prune(session, [chunk.digest for chunk in gone])
        collected.add("chunks", len(gone), sum(chunk.size for chunk in gone))
        return failure
