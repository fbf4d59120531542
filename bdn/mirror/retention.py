"""What leaves the store: organisations give manifests up or restore them, and collections delete what nothing names any more.

A manifest belongs to every organisation that mirrored it, and goes when the last of them gave it up and had its time to
change its mind. Mirroring it again before that brings it back, and moves no bytes. Nothing is deleted but by a collection,
beside mirrors that run and readers that read: rows first, then chunks.

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
import logging
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import Fact, NotFoundError
from bdn.core.events import Event
from bdn.core.store import EVIDENCE_SECONDS, KINDS, CollectableStore, Kind, SlabNeeds, StoredChunk, collectable_before
from bdn.mirror.damages import Damages
from bdn.mirror.db import agents, contents, damaged, events, mirrors, operations, removal
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.db.removal import Taken
from bdn.wire.operation_schema import EvictCommand, EvictedItem, RestorationRequest, RestoredItem
from bdn.wire.shapes import Items, moment

logger = logging.getLogger(__name__)
_AT_ONCE: Final = 1024  # chunks that one trip to a thread looks at

Remove = Callable[[StoredChunk], bool]
_Raw = bytes  # a digest, in a class that has a field of the type's name


@dataclass
class Collected:
    """How many of each kind went, or would go, and the bytes of the store that went with them."""

    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    bytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    unnamed: dict[_Raw, Kind] = field(default_factory=dict)  # chunks that lost a name, and by which rows

    def add(self, kind: Kind, count: int, size: int) -> None:
        """Count what went."""
        self.counts[kind] += count
        self.bytes[kind] += size

    def add_rows(self, kind: Kind, taken: Taken) -> None:
        """Count rows that went."""
        self.add(kind, taken.count, 0)
        for chunk in taken.chunks:
            self.unnamed.setdefault(chunk, kind)

    def add_unnamed(self, chunk: StoredChunk) -> None:
        """Count the bytes of a chunk that went after its rows."""
        self.bytes[self.unnamed[chunk.digest.to_bytes()]] += chunk.size


@dataclass(frozen=True)
class _Transactions:
    """Beside which no mirror writes anything and nobody restores a manifest; in a dry run all are one, which is taken back."""

    database: Database
    rehearsal: WriteSession | None

    def read(self) -> AbstractAsyncContextManager[ReadSession]:
        return self.database.read(patient=True) if self.rehearsal is None else nullcontext(self.rehearsal)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteSession]:
        if self.rehearsal is not None:
            yield self.rehearsal
            return
        async with self.database.write(patient=True) as session:
            await mirrors.hold_claims(session)
            yield session


@dataclass(frozen=True)
class Collector:
    """One collection at a time, in whatever process."""

    database: Database
    store: CollectableStore
    tombstone_seconds: float
    damages: Damages
    clock: Callable[[], float] = time.time

    async def collect(self, *, grace_seconds: float | None, dry_run: bool = False) -> Collected:
        """Collect everything that may go, or tell what would.

        Args:
            grace_seconds: how old has to be what nobody gave up explicitly: contents and chunks without a name, half-copied
                files, half-written ones. None: they stay.
            dry_run: changes nothing; the rows go in a transaction that is taken back.

        Raises:
            StoreUnavailableError: the store is away. What has gone until then has gone, and the next collection goes on.
            RecordDamagedError: what the store should hold cannot be told; likewise.
        """
        async with self.database.alone("collection"):
            now = self.clock()
            # Rows that go while the store is away would leave chunks that are strangers to the next collection.
            await asyncio.to_thread(self.store.check)
            async with self.database.rehearsal() if dry_run else nullcontext() as rehearsal:
                transactions = _Transactions(self.database, rehearsal)
                collected = await self._take_expired(transactions, now)
                if grace_seconds is not None:
                    await self._take_old(transactions, collected, now, grace_seconds)
                await self._forget_damage(transactions, now)
                # The chunks that lost a name are looked at before every name that is left.
                unnamed = [Digest.from_bytes(raw) for raw in collected.unnamed]
                seen = await asyncio.to_thread(lambda: list(self.store.stored(unnamed)))
                async with transactions.read() as session:
                    with self.damages.records_noted():
                        named = await removal.named(session)
                    at_work = await mirrors.oldest_at_work(session, now)
            remove: Remove = (lambda _: True) if dry_run else self.store.collect
            # Those that have no other name. What named them was old enough: they need no grace of their own.
            nameless = (chunk for chunk in seen if chunk.digest.to_bytes() not in named)
            await _remove(nameless, collectable_before(now, 0, at_work), remove, collected.add_unnamed)
            if grace_seconds is None:
                return collected
            before = collectable_before(now, grace_seconds, at_work)
            known = named.union(collected.unnamed)
            strangers = (chunk for chunk in self.store.stored() if chunk.digest.to_bytes() not in known)
            await _remove(strangers, before, remove, lambda chunk: collected.add("chunks", 1, chunk.size))
            left = await asyncio.to_thread(partial(self.store.drop_leftovers, before, dry_run=dry_run))
            collected.add("incoming", *left)
            return collected

    async def _take_expired(self, transactions: _Transactions, now: float) -> Collected:
        """One manifest at a time, as a whole: others get their turn in between."""
        collected = Collected()
        while True:
            async with transactions.write() as session:
                manifest = await mirrors.an_expired_manifest(session, now - self.tombstone_seconds)
                if manifest is None:
                    return collected
                taken = await removal.take_manifest(session, manifest, now)
                collected.add_rows("manifests", taken)
                await events.record(session, now, [events.event_of("collected", {"bytes": taken.bytes}, manifest)])

    @staticmethod
    async def _take_old(transactions: _Transactions, collected: Collected, now: float, grace_seconds: float) -> None:
        async with transactions.write() as session:
            before = collectable_before(now, grace_seconds, await mirrors.oldest_at_work(session, now))
            for draft in await contents.left_drafts(session, before):
                collected.add_rows("manifests", await removal.take_manifest(session, draft, now))
            collected.add_rows("contents", await removal.take_unnamed(session, before))
            collected.add_rows("half_copied", await removal.take_half_copied(session, before))
            collected.add_rows("evidence", await removal.take_evidence(session, now - EVIDENCE_SECONDS))

    @staticmethod
    async def _forget_damage(transactions: _Transactions, now: float) -> None:
        """Of what went. A mirror at work that counted on it before it was found damaged has to hear of that when it records."""
        async with transactions.write() as session:
            before = collectable_before(now, 0, await mirrors.oldest_at_work(session, now))
            await damaged.forget_unneeded(session, before)


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


@dataclass(frozen=True)
class StoreEviction:
    """Evicts manifests from the store, one eviction at a time. With ``tombstone_seconds`` 0 they are collected at once."""

    database: Database
    collector: Collector
    tombstone_seconds: float
    clock: Callable[[], float] = time.time

    async def run(self, command: EvictCommand, organisation: str) -> None:
        """Plan, record and, unless it is a dry run, carry out; not if nobody waits for the mirror's answer any more.

        What the plan takes is recorded with what it does; the caller says when the mirror's part is over.
        """
        async with self.database.alone("eviction"):
            async with self.database.write() as session:
                part = await operations.lock_mirrors_part(session, command.id)
                if part is None:
                    return
                if not command.dry_run:
                    # A looks at what mirrors at work have published; B publishes, and is at work; A gives up what B counts on.
                    await mirrors.hold_claims(session)
                now = self.clock()
                items = await self._purged(session, command, organisation, now)
                part.result = {"items": [item.model_dump(mode="json") for item in items]}
                victims = [item.manifest.removeprefix("b3:") for item in items if not item.refused]
                if not command.dry_run:
                    given_up_at = 0.0 if command.purge else now  # as long ago as it takes to be collected
                    await mirrors.give_up(session, organisation, victims, command.id, given_up_at)
                    await events.record(session, now, (_fate(item, command, organisation) for item in items))
            if not command.dry_run and victims:
                facts = {"tier": "mirror", "eviction": command.id, "organisation": organisation}
                size = sum(item.bytes for item in items if not item.refused)
                logger.info("evicted", extra={**facts, "manifests": len(victims), "bytes": size})
            if not command.dry_run and victims and (command.purge or not self.tombstone_seconds):
                await self.collector.collect(grace_seconds=None)

    async def _purged(
        self, session: WriteSession, command: EvictCommand, organisation: str, now: float
    ) -> list[EvictedItem]:
        """The plan. To purge what was evicted before is to restore it, and to evict it again; a dry run takes that back."""
        if not command.purge or command.lru_bytes is not None:
            return await self._plan(session, command, organisation, now)
        savepoint = await session.begin_nested()
        evicted = await mirrors.restorable(session, organisation)
        named = (
            evicted if command.all else evicted.keys() & {one.removeprefix("b3:") for one in command.manifests or ()}
        )
        await mirrors.restore(session, organisation, sorted(named))
        items = await self._plan(session, command, organisation, now)
        await (savepoint.rollback() if command.dry_run else savepoint.commit())
        return items

    async def restore(self, request: RestorationRequest, organisation: str) -> Items[RestoredItem]:
        """Let the organisation read again all of what was named.

        Raises:
            InvalidRequestError: the selectors do not go together.
            NotFoundError: nothing of that was evicted, or it is collected.
        """
        request.check()
        async with self.database.write() as session:
            # A collection goes first, and then there is nothing to restore, or it waits.
            await mirrors.hold_claims(session)
            named = await mirrors.named_manifests(session, organisation, request.manifest, request.source)
            restored = sorted(await mirrors.restore(session, organisation, named))
            await contents.touch(session, restored, self.clock())
            told = (events.event_of("restored", {}, digest, organisation=organisation) for digest in restored)
            await events.record(session, self.clock(), told)
            sources = await mirrors.sources_by_manifest(session, organisation, restored)
        if not restored:
            raise NotFoundError(f"{request.manifest or request.source} among what was evicted and is not collected yet")
        return Items[RestoredItem](
            items=[RestoredItem(manifest=f"b3:{digest}", sources=sources.get(digest, [])) for digest in restored]
        )

    async def _plan(
        self, session: ReadSession, command: EvictCommand, organisation: str, now: float
    ) -> list[EvictedItem]:
        """What goes, and what is refused because a node leases it, or a mirror that still runs has published it.

        Such a mirror is never robbed, forced or not: it would become READY with what nobody may read.
        """
        busy = await mirrors.running_with(session, organisation)
        candidates = await self._candidates(session, command, organisation)
        holders = await agents.holders(session, candidates)
        shared = await mirrors.others_read(session, organisation, candidates)
        is_kept = self.tombstone_seconds and not command.purge
        until = moment(now + self.tombstone_seconds) if is_kept else None
        items: list[EvictedItem] = []
        weights = EvictionWeights()
        freed = 0
        for digest in candidates:
            working = [f"mirror {mirror_id}" for mirror_id in busy.get(digest, [])]
            held_by = working or holders.get(digest, [])
            refused = bool(working) or (bool(held_by) and not command.force)
            if refused and command.lru_bytes is not None:
                continue  # LRU passes over what is in use
            size = 0 if digest in shared else await weights.take(session, digest, is_kept=refused)
            items.append(
                EvictedItem(
                    tier="mirror",
                    manifest=f"b3:{digest}",
                    bytes=size,
                    refused=refused,
                    holders=held_by,
                    restorable_until=None if refused else until,
                )
            )
            freed += 0 if refused else size
            if command.lru_bytes is not None and freed >= command.lru_bytes:
                break
        return items

    @staticmethod
    async def _candidates(session: ReadSession, command: EvictCommand, organisation: str) -> list[str]:
        """The manifests that the organisation may read and the selector names, least recently used first."""
        if command.manifests is None and not command.all and command.lru_bytes is None:
            return []
        own = await mirrors.all_readable(session, organisation)
        named = own if command.manifests is None else {name.removeprefix("b3:") for name in command.manifests}
        return [digest for digest in own if digest in named]


def _fate(item: EvictedItem, command: EvictCommand, organisation: str) -> Event:
    kind, facts = "tombstoned", dict[str, Fact](eviction=command.id)
    if item.refused:
        kind = "eviction_refused"
        facts |= {"tier": "mirror", "asked_by": command.asked_by, "holders": item.holders}
    else:
        facts["restorable_until"] = item.restorable_until.timestamp() if item.restorable_until else None
    return events.event_of(kind, facts, item.manifest.removeprefix("b3:"), organisation=organisation)


@dataclass
class EvictionWeights:
    """Counts down, manifest by manifest, who still needs each content and each slab. The dead need nothing.

    A content's own bytes are freed with the last manifest that names it, a slab's when the last content goes that needs
    it. So the last of several manifests that share a slab frees all of it, and the others nothing.
    """

    _names: dict[str, int] = field(default_factory=dict)  # of each content, how many manifests that stay name it
    _needs: SlabNeeds = field(default_factory=SlabNeeds)

    async def take(self, session: ReadSession, manifest: str, *, is_kept: bool) -> int:
        """The bytes that the manifest frees; ``is_kept`` only asks, and takes nothing."""
        names = ChainMap({}, self._names) if is_kept else self._names
        await self._look_at_slabs(session, manifest)
        freed = 0
        unnamed: list[str] = []
        for content, size, manifests in await removal.contents_of(session, manifest):
            names[content] = names.get(content, manifests) - 1
            if not names[content]:
                unnamed.append(content)
                freed += size
        gone = self._needs.going(unnamed) if is_kept else self._needs.take(unnamed)
        return freed + self._needs.size(gone)

    async def _look_at_slabs(self, session: ReadSession, manifest: str) -> None:
        slabs = [slab for slab in await removal.slabs_of(session, manifest) if not self._needs.knows(slab)]
        inside = await removal.add_slabs(session, self._needs, slabs)
        living = await mirrors.living_contents(session, inside)
        self._needs.take([content for content in inside if content not in living])
