"""What leaves the store: collections drop what nothing may read any more, and delete the chunks that nothing refers to.

A collection trusts rows alone, and lists no store. It runs beside mirrors, readers and other collections, and no mirror or push delays it:

- A manifest is dropped in one transaction, which looks again whether it is dead. Who publishes or restores it waits for that
  transaction, or that one waits, and then it is one or the other.
- A chunk is let go where its own row counts no reference; who refers to it changes that row, too (``bdn.mirror.db.chunks``).
- A row that was let go stays until its object is gone. What a crash leaves between the two is let go again, and deleted again.
- A reader has a chunk open, and reads it to its end; or finds no manifest, which nobody of his organisation may read.
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
    """How many of each kind went, or would go, and the bytes of the store that went with them: those of a manifest went with its chunks."""

    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    bytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, kind: Kind, count: int, size: int = 0) -> None:
        """Count what went."""
        self.counts[kind] += count
        self.bytes[kind] += size


@dataclass(frozen=True)
class Collector:
    """Collects what was given up ``tombstone_seconds`` ago, and what is old."""

    database: Database
    store: MirrorStore
    tombstone_seconds: float
    clock: Callable[[], float] = time.time

    async def collect(
        self, *, grace_seconds: float | None, dry_run: bool = False, only_orphans: bool = False
    ) -> Collected:
        """Collect everything that may go, or tell what would.

        Args:
            grace_seconds: for how long nothing has referred to a chunk that goes; what only expired manifests referred to needs no
                grace. None: nothing else goes.
            dry_run: changes nothing, and only reads.
            only_orphans: no row goes, and so no chunk but those that have none, as a power loss leaves them that takes a
                database's last commits. This alone lists the store.

        Raises:
            StoreUnavailableError: some chunks may not be gone: the next collection deletes them. What has gone has gone.
        """
        await asyncio.to_thread(self.store.check)  # while it is away, nothing shall begin to leave
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
        """Take the references of all dead sets away."""
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
        """The store is listed before its rows are looked at, and a row is committed before its object is put."""
        listed, failure = self.store.listed(), None
        while some := await asyncio.to_thread(lambda: dict(islice(listed, AT_ONCE))):
            async with self.database.read() as session:
                known = await chunks.of(session, chunks.have_rows, some)
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
        """Delete objects, then their rows; those that may not be gone keep their rows, and the failure says why.

        Raises ``StoreUnavailableError`` when none of them is known to be gone: the store is away.
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
