"""Collects what nothing names any more, beside mirrors that run and readers that read: rows first, then chunks.

An object exists before a row says so; so, going away, the row goes first. What a crash leaves between the two is a chunk that
no row names, and the next collection takes it. Who may lose what, and why nobody does:

- A copy puts a chunk, or finds it there and keeps it, and records it later. What was put or kept since the oldest mirror at
  work began is left alone (``collectable_before``); and a chunk that is put or kept after it was seen here is not collected
  (``CollectableStore.collect``). So chunks are looked at before the database is: whoever counted on one earlier than that
  look is in the database, as a mirror at work or as a row.
- A mirror publishes what the rows say is there. While rows go, nobody writes in a mirror's name; then publishing finds what
  is gone, and the mirror brings it again.
- Somebody restores a manifest. That waits for the rows to go, or they wait for it, and it is one or the other.
- A file whose record is damaged has chunks that nobody can name: none is removed while there is such a record.
- A reader has a chunk open, and reads it to its end; or finds no manifest, which nobody of his organisation may read.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, Protocol

from bdn.core.chunk import Digest
from bdn.core.events import Event
from bdn.core.store import EVIDENCE_SECONDS, KINDS, CollectableStore, Kind, StoredChunk, collectable_before
from bdn.mirror.damages import DamagedRecords
from bdn.mirror.db import damaged, events, mirrors, removal
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.db.removal import Taken

_AT_ONCE: Final = 1024  # chunks that one trip to a thread looks at

Remove = Callable[[StoredChunk], bool]


@dataclass
class Collected:
    """How many of each kind went, or would go, and the bytes of the store that went with them."""

    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    bytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, kind: Kind, count: int, size: int) -> None:
        """Count what went."""
        self.counts[kind] += count
        self.bytes[kind] += size


@dataclass
class _Rows:
    """Rows that went, and by which of them each chunk lost a name."""

    collected: Collected = field(default_factory=Collected)
    kinds: dict[bytes, Kind] = field(default_factory=dict)

    def add(self, kind: Kind, taken: Taken) -> None:
        self.collected.add(kind, taken.count, 0)
        for chunk in taken.chunks:
            self.kinds.setdefault(chunk, kind)


@dataclass(frozen=True)
class _Look:
    """Chunks that lost a name, as they were seen first; then every name that is left, and when the oldest at work began."""

    seen: list[StoredChunk]
    named: set[bytes]
    at_work: float | None


class _Sessions(Protocol):
    def read(self) -> AbstractAsyncContextManager[ReadSession]: ...

    def write(self) -> AbstractAsyncContextManager[WriteSession]: ...


@dataclass(frozen=True)
class Collector:
    """One collection at a time, in whatever process."""

    database: Database
    store: CollectableStore
    tombstone_seconds: float
    damaged_records: DamagedRecords
    clock: Callable[[], float] = time.time

    async def collect(self, *, grace_seconds: float, dry_run: bool = False) -> Collected:
        """Collect everything that may go, or tell what would.

        Args:
            grace_seconds: how old has to be what nobody gave up explicitly: contents and chunks without a name, half-copied
                files, half-written ones.
            dry_run: changes nothing; the rows go in a transaction that is taken back.

        Raises:
            StoreUnavailableError: the store is away. What has gone until then has gone, and the next collection goes on.
            RecordDamagedError: what the store should hold cannot be told; likewise.
        """
        async with self.database.alone("collection"):
            now = self.clock()
            await self._check_store()
            async with self._sessions(dry_run=dry_run) as sessions:
                rows = await self._take_expired(sessions, now)
                await self._take_old(sessions, rows, now, grace_seconds)
                await self._forget_damage(sessions, now)
                look = await self._look(sessions, rows, now)
            remove: Remove = _pretend if dry_run else self.store.collect
            await self._sweep(rows, look, now, remove)
            before = collectable_before(now, grace_seconds, look.at_work)
            known = look.named.union(rows.kinds)
            strangers = (chunk for chunk in self.store.stored() if chunk.digest.to_bytes() not in known)
            await _remove(strangers, before, remove, lambda chunk: rows.collected.add("chunks", 1, chunk.size))
            left = await asyncio.to_thread(partial(self.store.drop_leftovers, before, dry_run=dry_run))
            rows.collected.add("incoming", *left)
            return rows.collected

    async def collect_expired(self) -> None:
        """Collect manifests that everybody has given up for long enough, and nothing else."""
        async with self.database.alone("collection"):
            now = self.clock()
            await self._check_store()
            async with self._sessions(dry_run=False) as sessions:
                rows = await self._take_expired(sessions, now)
                await self._forget_damage(sessions, now)
                look = await self._look(sessions, rows, now)
            await self._sweep(rows, look, now, self.store.collect)

    async def _check_store(self) -> None:
        """Raise when it is away: rows that go now would leave chunks that are strangers to the next collection."""
        await asyncio.to_thread(lambda: list(self.store.stored(())))

    @asynccontextmanager
    async def _sessions(self, *, dry_run: bool) -> AsyncIterator[_Sessions]:
        if not dry_run:
            yield _Deeds(self.database)
            return
        async with self.database.rehearsal() as session:
            yield _Rehearsal(session)

    async def _take_expired(self, sessions: _Sessions, now: float) -> _Rows:
        """One manifest at a time, as a whole: others get their turn in between."""
        rows = _Rows()
        while True:
            async with sessions.write() as session:
                manifest = await mirrors.an_expired_manifest(session, now - self.tombstone_seconds)
                if manifest is None:
                    return rows
                taken = await removal.take_manifest(session, manifest, now)
                rows.add("manifests", taken)
                collected = Event.of("collected", {"bytes": taken.bytes}, manifest=f"b3:{manifest}")
                await events.record(session, [collected], now)

    @staticmethod
    async def _take_old(sessions: _Sessions, rows: _Rows, now: float, grace_seconds: float) -> None:
        async with sessions.write() as session:
            before = collectable_before(now, grace_seconds, await mirrors.oldest_at_work(session, now))
            rows.add("contents", await removal.take_unnamed(session, before))
            rows.add("half_copied", await removal.take_half_copied(session, before))
            rows.add("evidence", await removal.take_evidence(session, now - EVIDENCE_SECONDS))

    @staticmethod
    async def _forget_damage(sessions: _Sessions, now: float) -> None:
        """Of what went. A mirror at work that counted on it before it was found damaged has to hear of that when it records."""
        async with sessions.write() as session:
            before = collectable_before(now, 0, await mirrors.oldest_at_work(session, now))
            await damaged.forget_unneeded(session, before)

    async def _look(self, sessions: _Sessions, rows: _Rows, now: float) -> _Look:
        """First at the chunks, then at the database."""
        unnamed = [Digest.from_bytes(raw) for raw in rows.kinds]
        seen = await asyncio.to_thread(lambda: list(self.store.stored(unnamed)))
        async with sessions.read() as session:
            with self.damaged_records.noted():
                return _Look(seen, await removal.named(session), await mirrors.oldest_at_work(session, now))

    @staticmethod
    async def _sweep(rows: _Rows, look: _Look, now: float, remove: Remove) -> None:
        """Chunks that lost a name and have no other. What named them was old enough: they need no grace of their own."""
        unnamed = (chunk for chunk in look.seen if chunk.digest.to_bytes() not in look.named)

        def removed(chunk: StoredChunk) -> None:
            rows.collected.add(rows.kinds[chunk.digest.to_bytes()], 0, chunk.size)

        await _remove(unnamed, collectable_before(now, 0, look.at_work), remove, removed)


@dataclass(frozen=True)
class _Deeds:
    """Transactions beside which no mirror writes anything, and nobody restores a manifest."""

    database: Database

    def read(self) -> AbstractAsyncContextManager[ReadSession]:
        return self.database.read(patient=True)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteSession]:
        async with self.database.write(patient=True) as session:
            await mirrors.hold_claims(session)
            yield session


@dataclass(frozen=True)
class _Rehearsal:
    """One transaction for everything, which somebody else takes back."""

    session: WriteSession

    @asynccontextmanager
    async def read(self) -> AsyncIterator[ReadSession]:
        yield self.session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteSession]:
        yield self.session


async def _remove(
    chunks: Iterable[StoredChunk], before: float, remove: Remove, removed: Callable[[StoredChunk], object]
) -> None:
    """In threads, piece by piece. ``removed`` is told on the event loop of each that went."""
    left = iter(chunks)

    def some() -> tuple[int, list[StoredChunk]]:
        batch = list(islice(left, _AT_ONCE))
        return len(batch), [chunk for chunk in batch if chunk.kept_at < before and remove(chunk)]

    while True:
        count, gone = await asyncio.to_thread(some)
        for chunk in gone:
            removed(chunk)
        if not count:
            return


def _pretend(_: StoredChunk) -> bool:
    return True
