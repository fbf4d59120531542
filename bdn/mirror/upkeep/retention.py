"""What leaves the store: organisations give manifests up or restore them, and collections delete what nothing names any more.

A manifest belongs to every organisation that mirrored it, and goes when the last of them gave it up and had its time to
change its mind. Mirroring it again before that brings it back, and moves no bytes. Nothing is deleted but by a collection,
beside mirrors that run and readers that read: rows first, then chunks.

An object exists before a row says so; so, going away, the row goes first. What a crash leaves between the two is a chunk that
no row names, and the next collection takes it. Who may lose what, and why nobody does:

- A copy puts a chunk, or finds it there and keeps it, and records it later. What was put or kept since the oldest mirror at
  work began is left alone (``collectable_before``); and a chunk that is put or kept after it was seen here is not collected
  (``CollectableStore.collect``). So chunks are looked at before the database is, a piece of the store at a time: whoever counted
  on one earlier than that look is in the database, as a mirror at work or as a row.
- A mirror publishes what the rows say is there. While rows go, nobody writes in a mirror's name; then publishing finds what
  is gone, and the mirror brings it again.
- Somebody restores a manifest. That waits for the rows to go, or they wait for it, and it is one or the other.
- A file whose record is damaged has chunks that nobody can name: none is removed while there is such a record.
- A reader has a chunk open, and reads it to its end; or finds no manifest, which nobody of his organisation may read.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import Fact, NotFoundError
from bdn.core.events import Event
from bdn.core.store import (
    EVIDENCE_SECONDS,
    KINDS,
    CollectableStore,
    Kind,
    StoredChunk,
    collectable_before,
    split_digests,
)
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.db import agents, contents, damaged, events, mirrors, operations, removal
from bdn.mirror.db.database import Database, ReadSession, WriteSession, batches
from bdn.mirror.db.removal import Dropped, Going, Leaving, Rehearsal, Taken
from bdn.wire.operation_schema import EvictCommand, EvictedItem, RestorationRequest, RestoredItem
from bdn.wire.shapes import Items, moment

logger = logging.getLogger(__name__)
CHUNKS_AT_ONCE: Final = 100_000  # in memory, some 600 bytes each, for one look at all rows
_REMOVED_AT_ONCE: Final = 1024  # chunks of one trip to a thread

Remove = Callable[[Sequence[StoredChunk]], Sequence[StoredChunk]]


@dataclass
class Collected:
    """How many of each kind went, or would go, and the bytes of the store that went with them."""

    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    bytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, kind: Kind, count: int, size: int) -> None:
        """Count what went."""
        self.counts[kind] += count
        self.bytes[kind] += size


_Begin = Callable[[WriteSession], Awaitable[bool]]
_Leave = Callable[[ReadSession], Awaitable[Leaving | None]]
_Find = Callable[[ReadSession, Leaving], Awaitable[Going]]
_Some = Callable[[WriteSession], Awaitable[Taken]]


@dataclass
class _Rows:
    """What a collection does with rows: it takes them in short transactions, beside which no mirror writes and nobody restores a manifest.

    In a rehearsal nothing goes: the same steps tell what would. ``unnamed`` are raw names, one after the other, of chunks in rows that
    went, by what these rows were; a rehearsal remembers none, and finds them in the rows.
    """

    database: Database
    now: float
    rehearsal: Rehearsal | None
    collected: Collected = field(default_factory=Collected)
    unnamed: dict[Kind, bytearray] = field(default_factory=lambda: {kind: bytearray() for kind in KINDS})

    @asynccontextmanager
    async def read(self) -> AsyncIterator[ReadSession]:
        if self.rehearsal is not None:
            yield self.rehearsal.session
            return
        async with self.database.read(patient=True) as session:
            yield session

    @asynccontextmanager
    async def look(self) -> AsyncIterator[tuple[ReadSession, Rehearsal | None]]:
        """A session of its own: a large store is listed for minutes, and a transaction that stands open for so long is in others' way."""
        if self.rehearsal is None:
            async with self.read() as session:
                yield session, None
        else:
            async with removal.rehearsal(self.database, self.rehearsal) as again:
                yield again.session, again

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteSession]:
        async with self.database.write(patient=True) as session:
            await mirrors.hold_claims(session)
            yield session

    async def before(self, session: ReadSession, grace_seconds: float) -> float:
        """Until when what nobody needs may go, beside the mirrors that are at work now."""
        return collectable_before(self.now, grace_seconds, await mirrors.oldest_at_work(session, self.now))

    async def take_manifest(self, manifest: str, begin: _Begin) -> None:
        """Take it step by step. Whatever ends this in between, the next collection goes on, or who mirrors it again has it whole."""
        if self.rehearsal is not None:
            await self.rehearsal.doom(manifest)
        else:
            async with self.write() as session:
                if not await begin(session):
                    return

        async def leaving(session: ReadSession) -> Leaving | None:
            is_going = self.rehearsal is not None or await mirrors.is_being_collected(session, manifest)
            return removal.leaving_with(manifest, is_rehearsal=self.rehearsal is not None) if is_going else None

        sizes = [taken.bytes async for taken in self._take_contents(leaving)]
        if self.rehearsal is not None or await self._forget(manifest, sum(sizes)):
            self.collected.add("manifests", 1, 0)

    async def _forget(self, manifest: str, size: int) -> bool:
        """Take what is left of a manifest, whose contents have gone; False when somebody mirrors it again."""
        is_left = True
        while is_left:
            async with self.write() as session:
                if not await mirrors.is_being_collected(session, manifest):
                    return False
                is_left = await removal.forget_names(session, manifest)
                if not is_left:
                    await events.record(session, self.now, [events.event_of("collected", {"bytes": size}, manifest)])
        return True

    async def take_unnamed(self, grace_seconds: float) -> None:
        """Take contents that no manifest names."""

        async def leaving(session: ReadSession) -> Leaving:
            before = await self.before(session, grace_seconds)
            return removal.leaving_unnamed(before, is_rehearsal=self.rehearsal is not None)

        counts = [taken.count async for taken in self._take_contents(leaving)]
        # A rehearsal meets a content in each slab that holds it.
        count = sum(counts) if self.rehearsal is None else await self.rehearsal.unnamed()
        self.collected.add("contents", count, 0)

    async def take_unread_slabs(self, grace_seconds: float) -> None:
        """Take slabs of which nobody reads anything who may read them; they count as contents' bytes."""
        is_rehearsal = self.rehearsal is not None
        async with self.read() as session:
            before = await self.before(session, grace_seconds)
            found = await removal.unread_slabs(session, before, self.now, is_rehearsal=is_rehearsal)
        if self.rehearsal is not None:
            self.rehearsal.dropped.update(dict.fromkeys(found.keys() - self.rehearsal.dropped.keys(), "contents"))
            return
        for some in batches(list(found), removal.SLABS_AT_ONCE):
            async with self.write() as session:
                before = await self.before(session, grace_seconds)
                going = await removal.unread_slabs(session, before, self.now, is_rehearsal=False, among=some)
                await contents.drop_slabs(session, list(going))
            self.unnamed["contents"] += b"".join(map(bytes.fromhex, going))

    async def take_some(self, kind: Kind, some: _Some) -> None:
        """Take rows of which none hangs on another, some at a time, until there are no more."""
        taken: Taken | None = None
        while taken is None or taken.count:
            async with self.write() as session:
                taken = await some(session)
            self.collected.add(kind, taken.count, 0)
            self.unnamed[kind] += b"".join(taken.chunks)

    async def _take_contents(self, leaving: _Leave) -> AsyncIterator[Taken]:
        """A few slabs at a time with what lies in them, then what lies in none."""
        dropped: Dropped = {} if self.rehearsal is None else self.rehearsal.dropped
        async with self.read() as session:
            all_of_them = await leaving(session)
            slabs = await removal.slabs_of(session, all_of_them) if all_of_them is not None else []
        for batch in batches(slabs, removal.SLABS_AT_ONCE):
            step = await self._take(leaving, partial(removal.in_slabs, slabs=batch, dropped=dropped))
            if step is None:
                return
            yield step[1]
        after = ""
        while True:
            step = await self._take(leaving, partial(removal.beside_slabs, after=after))
            if step is None or not step[0].contents:
                return
            yield step[1]
            after = step[0].contents[-1]

    async def _take(self, leaving: _Leave, find: _Find) -> tuple[Going, Taken] | None:
        """One step. None: what was to go is to stay."""
        async with self.read() if self.rehearsal is not None else self.write() as session:
            what = await leaving(session)
            if what is None:
                return None
            going = await find(session, what)
            if self.rehearsal is not None:
                return going, Taken(len(going.contents))
            taken = await removal.objects_of(session, going)
            await removal.forget(WriteSession(session), going)
        self.unnamed[what.kind] += b"".join(taken.chunks)
        return going, taken


@dataclass(frozen=True)
class Collector:
    """One collection at a time, in whatever process."""

    database: Database
    store: CollectableStore
    tombstone_seconds: float
    damages: Damages
    clock: Callable[[], float] = time.time

    async def collect(
        self, *, grace_seconds: float | None, dry_run: bool = False, only_orphans: bool = False
    ) -> Collected:
        """Collect everything that may go, or tell what would.

        Args:
            grace_seconds: how old has to be what nobody gave up explicitly: contents and chunks without a name, half-copied
                files, half-written ones. None: they stay.
            dry_run: changes nothing, and only reads.
            only_orphans: no row goes, and so no chunk but those that no row names, as a crash between a put and its record leaves them.

        Raises:
            StoreUnavailableError: the store is away. What has gone until then has gone, and the next collection goes on.
            RecordDamagedError: what the store should hold cannot be told; likewise.
        """
        async with self.database.alone("collection"):
            now = self.clock()
            # Rows that go while the store is away would leave chunks that are strangers to the next collection.
            await asyncio.to_thread(self.store.check)
            async with removal.rehearsal(self.database) if dry_run else nullcontext() as rehearsal:
                rows = _Rows(self.database, now, rehearsal)
                if not only_orphans:
                    await self._take_expired(rows)
                    if grace_seconds is not None:
                        await self._take_old(rows, grace_seconds)
            if not dry_run:
                await self._forget_damage(rows)
            async with rows.look() as (session, sofar):
                with self.damages.records_noted():
                    await removal.check_records(session, sofar)
            sweep = partial(self._sweep, rows, (lambda chunks: chunks) if dry_run else self.store.collect)
            for kind, raw in rows.unnamed.items():
                # What named them was old enough: they need no grace of their own.
                await sweep(map(Digest.from_bytes, split_digests(bytes(raw))), kind, grace_seconds=0)
            if grace_seconds is not None:
                await sweep(None, "chunks", grace_seconds)
                async with rows.look() as (session, _):
                    before = await rows.before(session, grace_seconds)
                left = await asyncio.to_thread(partial(self.store.drop_leftovers, before, dry_run=dry_run))
                rows.collected.add("incoming", *left)
            return rows.collected

    async def _sweep(
        self, rows: _Rows, remove: Remove, digests: Iterable[Digest] | None, kind: Kind, grace_seconds: float
    ) -> None:
        """Of these chunks, or of all, remove those that no row names, piece by piece: a piece of the store is looked at, then every row.

        They count as ``kind``, or as what their rows are that would go.
        """
        chunks = await asyncio.to_thread(self.store.stored, digests)
        while seen := await asyncio.to_thread(lambda: list(islice(chunks, CHUNKS_AT_ONCE))):
            await self._sweep_piece(rows, remove, seen, kind, grace_seconds)
            seen.clear()  # or two pieces would be in memory

    async def _sweep_piece(
        self, rows: _Rows, remove: Remove, seen: Sequence[StoredChunk], kind: Kind, grace_seconds: float
    ) -> None:
        unnamed = removal.Unnamed.among(seen)
        async with rows.look() as (session, sofar):
            # Before the rows: who ends between the two has recorded what it counted on.
            without_name, before = await rows.before(session, 0), await rows.before(session, grace_seconds)
            with self.damages.records_noted():
                await removal.strike_named(session, unnamed, sofar)
        old = [
            chunk
            for name, chunk in unnamed.left.items()
            if chunk.kept_at < (without_name if name in unnamed.going else before)
        ]
        for some in batches(old, _REMOVED_AT_ONCE):
            for chunk in await asyncio.to_thread(remove, some):
                went = unnamed.going.get(chunk.digest.to_bytes(), kind)
                rows.collected.add(went, int(went == "chunks"), chunk.size)

    async def _take_expired(self, rows: _Rows) -> None:
        before = rows.now - self.tombstone_seconds
        async with rows.read() as session:
            expired = await mirrors.expired(session, before)
        for name in expired:
            begin = partial(mirrors.begin_to_collect, manifest=name, expired_before=before, now=rows.now)
            await rows.take_manifest(name, begin)

    @staticmethod
    async def _take_old(rows: _Rows, grace_seconds: float) -> None:
        async with rows.read() as session:
            before = await rows.before(session, grace_seconds)
            left = await mirrors.left_drafts(session, before)
        evidence_before = rows.now - EVIDENCE_SECONDS
        if rows.rehearsal is not None:
            rows.rehearsal.before, rows.rehearsal.evidence_before = before, evidence_before
        for name in left:
            begin = partial(mirrors.begin_to_collect_draft, manifest=name, before=before, now=rows.now)
            await rows.take_manifest(name, begin)
        await rows.take_unnamed(grace_seconds)
        await rows.take_unread_slabs(grace_seconds)
        if rows.rehearsal is not None:
            rows.collected.add("half_copied", await rows.rehearsal.half_copied(), 0)
            rows.collected.add("evidence", await rows.rehearsal.evidence(), 0)
            return

        async def half_copied(session: WriteSession) -> Taken:
            return await removal.take_half_copied(session, await rows.before(session, grace_seconds))

        await rows.take_some("half_copied", half_copied)
        await rows.take_some("evidence", partial(removal.take_evidence, before=evidence_before))

    @staticmethod
    async def _forget_damage(rows: _Rows) -> None:
        """Of what went. A mirror at work that counted on it before it was found damaged has to hear of that when it records."""
        async with rows.write() as session:
            before = collectable_before(rows.now, 0, await mirrors.oldest_at_work(session, rows.now))
            await damaged.forget_unneeded(session, before)


@dataclass(frozen=True)
class StoreEviction:
    """Evicts manifests from the store, one eviction at a time. With ``tombstone_seconds`` 0 they are collected at once."""

    database: Database
    collector: Collector
    tombstone_seconds: float
    clock: Callable[[], float] = time.time

    async def run(self, command: EvictCommand, organisation: str) -> None:
        """Plan, record and, unless it is a dry run, carry out; not if nobody waits for the mirror's answer any more.

        The plan is made beside all others. What came into use meanwhile, or was published by a mirror that still runs, is refused
        when the plan is carried out. What it takes is recorded with what it does; the caller says when the mirror's part is over.
        """
        async with self.database.alone("eviction"):
            now = self.clock()
            async with removal.rehearsal(self.database) as rehearsal:
                candidates, skipped = await self._candidates(rehearsal.session, command, organisation)
                items = await self._plan(rehearsal, command, organisation, now, candidates)
            async with self.database.write() as session:
                part = await operations.lock_mirrors_part(session, command.id)
                if part is None:
                    return
                if not command.dry_run:
                    items = await self._give_up(session, command, organisation, now, items)
                told = {"skipped_pushed": len(skipped), "skipped_pushed_bytes": sum(skipped.values())}
                part.result = {"items": [item.model_dump(mode="json") for item in items], **told}
            victims = [item for item in items if not item.refused]
            if command.dry_run or not victims:
                return
            facts = {"tier": "mirror", "eviction": command.id, "organisation": organisation}
            size = sum(item.bytes for item in victims)
            logger.info("evicted", extra={**facts, "manifests": len(victims), "bytes": size})
            if command.purge or not self.tombstone_seconds:
                await self.collector.collect(grace_seconds=None)

    async def _give_up(
        self, session: WriteSession, command: EvictCommand, organisation: str, now: float, planned: list[EvictedItem]
    ) -> list[EvictedItem]:
        """Carry out a plan, but for what may no longer go; what was done."""
        # A looks at what mirrors at work have published; B publishes, and is at work; A gives up what B counts on.
        await mirrors.hold_claims(session)
        uses = await self._uses(session, command, organisation, [_hex(item) for item in planned])
        items: list[EvictedItem] = []
        for item in planned:
            held_by, refused = uses[_hex(item)]
            if not refused or item.refused:
                items.append(item)
            elif command.lru_bytes is None:  # which passes over what is in use
                items.append(item.model_copy(update={"refused": True, "holders": held_by, "restorable_until": None}))
        victims = [_hex(item) for item in items if not item.refused]
        if command.purge:  # what was evicted before is evicted again, as long ago as it takes to be collected
            await mirrors.restore(session, organisation, victims)
        await mirrors.give_up(session, organisation, victims, command.id, 0.0 if command.purge else now)
        await events.record(session, now, (_fate(item, command, organisation) for item in items))
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
        self, rehearsal: Rehearsal, command: EvictCommand, organisation: str, now: float, candidates: Sequence[str]
    ) -> list[EvictedItem]:
        """What goes, and what is refused. LRU passes over what is in use."""
        session = rehearsal.session
        uses = await self._uses(session, command, organisation, candidates)
        shared = await mirrors.others_read(session, organisation, candidates)
        is_kept = self.tombstone_seconds and not command.purge
        until = moment(now + self.tombstone_seconds) if is_kept else None
        await rehearsal.doom_dead(but=candidates)
        items: list[EvictedItem] = []
        freed = 0
        for digest in candidates:
            held_by, refused = uses[digest]
            if refused and command.lru_bytes is not None:
                continue
            size = 0 if digest in shared else await rehearsal.freed(digest, is_kept=refused)
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
    async def _uses(
        session: ReadSession, command: EvictCommand, organisation: str, manifests: Sequence[str]
    ) -> dict[str, tuple[list[str], bool]]:
        """Who uses each of these manifests, and whether it is refused for that: a node that leases it, or a mirror that has published it and still runs.

        Such a mirror is never robbed, forced or not: it would become READY with what nobody may read.
        """
        busy = await mirrors.running_with(session, organisation)
        holders = await agents.holders(session, manifests)
        found: dict[str, tuple[list[str], bool]] = {}
        for digest in manifests:
            working = [f"mirror {mirror_id}" for mirror_id in busy.get(digest, [])]
            held_by = working or holders.get(digest, [])
            found[digest] = held_by, bool(working) or (bool(held_by) and not command.force)
        return found

    @staticmethod
    async def _candidates(
        session: ReadSession, command: EvictCommand, organisation: str
    ) -> tuple[list[str], dict[str, int]]:
        """The manifests that the selector names, least recently used first, and the sizes of pushed ones that it skips.

        The organisation may read them, or restore them if they are purged. A pushed manifest has no upstream to mirror it from
        again: it is evicted by its digest or by the ``bt://`` source alone, never by age, with all others, or because an upstream
        holds the same files.
        """
        if command.manifests is None and not command.all and command.lru_bytes is None:
            return [], {}
        own = await mirrors.all_readable(
            session, organisation, or_restorable=command.purge and command.lru_bytes is None
        )
        named = own if command.manifests is None else {name.removeprefix("b3:") for name in command.manifests}
        selected = [digest for digest in own if digest in named]
        if command.manifests is not None and (command.source is None or command.source.startswith("bt://")):
            return selected, {}
        pushed = await mirrors.pushed_manifests(session, organisation)
        skipped = {digest: own[digest][1] for digest in selected if digest in pushed}
        return [digest for digest in selected if digest not in pushed], skipped


def _hex(item: EvictedItem) -> str:
    return item.manifest.removeprefix("b3:")


def _fate(item: EvictedItem, command: EvictCommand, organisation: str) -> Event:
    kind, facts = "tombstoned", dict[str, Fact](eviction=command.id)
    if item.refused:
        kind = "eviction_refused"
        facts |= {"tier": "mirror", "asked_by": command.asked_by, "holders": item.holders}
    else:
        facts["restorable_until"] = item.restorable_until.timestamp() if item.restorable_until else None
    return events.event_of(kind, facts, _hex(item), organisation=organisation)
