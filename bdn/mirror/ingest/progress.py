"""What mirrors at work have copied: found again, shared in this process while it is new, and told to the database in batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from bdn.core.chunk import Digest, FileLayout, Slab
from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.store import ChunkStore
from bdn.mirror.db import contents, damaged, mirrors
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.waiting import SingleFlight
from bdn.transfer.under_way import UnderWay

logger = logging.getLogger(__name__)


_TOLD_AT_ONCE: Final = 2000  # files, and as many chunks
_UNTOLD: Final = 10 * _TOLD_AT_ONCE  # files, about 20 MB


class CopiesInProgress(SingleFlight[str, FileLayout]):
    """Copies by identity key. A result stays until a mirror has recorded it in the database."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: list[tuple[str, set[str]]] = []

    def recorded(self, keys: Collection[str], mirror: str) -> None:
        """A mirror has recorded these copies in the database, or never will."""
        self.forget(keys)
        own = sum(listener == mirror for listener, _ in self._listeners)
        for listener, others in self._listeners:
            if listener != mirror or own > 1:  # a mirror's only source knows what it copied itself
                others.update(keys)

    @contextmanager
    def recorded_by_others(self, mirror: str) -> Iterator[set[str]]:
        """The keys that others record during the block: what a survey inside it may have missed."""
        listener: tuple[str, set[str]] = mirror, set()
        self._listeners.append(listener)
        try:
            yield listener[1]
        finally:
            self._listeners = [other for other in self._listeners if other is not listener]


@dataclass(frozen=True)
class StoredContents:
    """Contents that are recorded, for a copy that is about to count on them: kept in the store from now on, or not there.

    A looks at the rows, finds a file complete, and counts on its chunks; a collection, which saw that no manifest names the
    file, forgets it and deletes the chunks; A records the file again, and publishes what is not there. So whoever counts on a
    chunk that it did not put itself keeps it first, and looks at rows before, never after: see ``CollectableStore.collect``.

    What is known by identity alone, in a survey, needs no such care: publishing looks whether it is still recorded.
    """

    database: Database
    store: ChunkStore
    clock: Callable[[], float] = time.time

    async def layout(self, identity: Identity) -> FileLayout | None:
        """The complete content that an identity maps to."""
        async with self.database.read() as session:
            found = await contents.layout_by_identity(session, identity)
        return found if found is not None and await self.keep(found) else None

    async def parts(self, identity_key: str) -> dict[int, Digest]:
        """The chunks of a half-copied file that is about to be resumed."""
        async with self.database.read() as session:
            recorded = (await contents.half_copied(session, [identity_key])).get(identity_key, {})
        if recorded:
            async with self.database.write() as session:
                await contents.renew_chunks(session, identity_key, self.clock())
        kept = await asyncio.to_thread(self.store.keep, list(recorded.values()))
        return {index: digest for index, digest in recorded.items() if digest in kept}

    async def keep(self, layout: FileLayout) -> bool:
        """Whether every object in which the content lies is kept now."""
        objects = layout.chunks if layout.slice is None else (layout.slice.slab,)
        return await asyncio.to_thread(self.store.keep, objects) >= set(objects)


class ClaimLostError(Exception):
    """Somebody canceled the mirror, or another worker took it over: nothing more is written in its name."""


@dataclass
class SourceCounters:
    """Bytes of one source so far; ``changed`` says that the database does not know yet. It never hears of ``under_way``."""

    transferred: int = 0
    reused: int = 0
    changed: bool = False
    under_way: UnderWay = field(default_factory=UnderWay)


@dataclass
class Progress:
    """Collects on the event loop and writes in batches: a killed worker loses the last batch and nothing else.

    Everything reported here is durable in the store already, so the database never knows more than the store holds. That
    stays true only while the worker has its claim: without it the chunks may have been collected meanwhile.
    """

    database: Database
    mirror_id: str
    claimant: str
    on_flushed: Callable[[list[str]], None]
    on_transferred: Callable[[int], None]
    counters: dict[int, SourceCounters] = field(default_factory=dict)
    _chunks: list[tuple[str, int, Digest]] = field(default_factory=list)
    _slabs: dict[tuple[Digest, str], Slab] = field(default_factory=dict)  # two sources may pack the same in two scopes
    _complete: dict[str, FileLayout] = field(default_factory=dict)
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def chunk_stored(self, position: int, identity_key: str, index: int, digest: Digest, size: int) -> None:
        """A chunk came from the upstream and is durable."""
        self._chunks.append((identity_key, index, digest))
        self._transferred(position, size)

    def packed(self, position: int, slab: Slab, size: int) -> None:
        """``size`` bytes, one whole file, came from the upstream and are durable in a slab."""
        self.lies_in(slab)
        self._transferred(position, size)

    def _transferred(self, position: int, size: int) -> None:
        counters = self.counters[position]
        counters.transferred += size
        counters.changed = True
        self.on_transferred(size)

    def bytes_under_way(self, position: int, recorded: int) -> int:
        """What has come of a source and is not among the ``recorded`` bytes that the database knows."""
        counters = self.counters.get(position)
        return max(0, counters.transferred - recorded) + counters.under_way.received if counters else 0

    def lies_in(self, slab: Slab) -> None:
        """A slab that completed files lie in, whoever packed it: that one may tell the database later than we do."""
        self._slabs[slab.digest, slab.scope] = slab

    def reused(self, position: int, size: int) -> None:
        """Count bytes that somebody else copied meanwhile; negative for what was thought to be held and was not."""
        if size:
            counters = self.counters[position]
            counters.reused += size
            counters.changed = True

    def file_complete(self, identity_key: str, layout: FileLayout) -> None:
        """All chunks of a file are durable and its checksum is right."""
        self._complete[identity_key] = layout

    @asynccontextmanager
    async def writing(self, *, canceled_too: bool = False) -> AsyncIterator[WriteSession]:
        """A transaction in the name of this mirror.

        Args:
            canceled_too: allow it also while a canceled mirror comes to its end, for the record of what was stored.

        Raises ``ClaimLostError``: nothing was written.
        """
        async with self.database.write() as session:
            status = await mirrors.claimed_status(session, self.mirror_id, self.claimant, self.database.now())
            if status != "SYNCING" and not (canceled_too and status is not None):
                raise ClaimLostError
            yield session

    async def keep_up(self) -> None:
        """Wait while far more is complete than was told: it is in memory until then."""
        if len(self._complete) > _UNTOLD:
            await self.flush()

    async def flush(self) -> None:
        """Tell the database, in short transactions. What could not be told is kept for the next time."""
        async with self._flushing:
            for _ in range(1 + max(len(self._chunks), len(self._complete)) // _TOLD_AT_ONCE):
                await self._flush_some()

    async def _flush_some(self) -> None:
        chunks, self._chunks = self._chunks[:_TOLD_AT_ONCE], self._chunks[_TOLD_AT_ONCE:]
        complete = dict(islice(self._complete.items(), _TOLD_AT_ONCE))
        for key in complete:
            del self._complete[key]
        slabs, self._slabs = self._slabs, {}
        changed = {position: counters for position, counters in self.counters.items() if counters.changed}
        if not (chunks or complete or changed):
            return
        try:
            async with self.writing(canceled_too=True) as session:
                now = self.database.now()
                await contents.record_chunks(session, [chunk for chunk in chunks if chunk[0] not in complete], now)
                await contents.record_slabs(session, slabs.values())
                await contents.record_contents(session, complete, now)
                whole = [key for key, layout in complete.items() if not layout.slice]
                await contents.forget_chunks(session, whole)
                for position, counters in changed.items():
                    counters.changed = False
                    await mirrors.update_source(
                        session,
                        self.mirror_id,
                        position,
                        bytes_transferred=counters.transferred,
                        bytes_reused=counters.reused,
                    )
        except BaseException:
            self._chunks = chunks + self._chunks
            self._complete = complete | self._complete
            self._slabs = slabs | self._slabs
            for counters in changed.values():
                counters.changed = True
            raise
        self.on_flushed(list(complete))

    async def drop(self, identity_key: str) -> None:
        """What was recorded of a file is wrong: nothing of it may be taken for a part of the right one."""
        async with self._flushing:
            self._chunks = [chunk for chunk in self._chunks if chunk[0] != identity_key]
            async with self.writing(canceled_too=True) as session:
                await contents.forget_chunks(session, [identity_key])

    async def quarantine(
        self, source: str, file: UpstreamFile, expected: str, actual: str, kept: Sequence[Digest]
    ) -> str:
        """As ``drop``, and what came stays in the store as evidence, of which this is the name."""
        identity_key = file.identity.key
        async with self._flushing:
            own = {index: digest for key, index, digest in self._chunks if key == identity_key}
            async with self.writing(canceled_too=True) as session:
                own |= (await contents.half_copied(session, [identity_key])).get(identity_key, {})
                name = await damaged.keep_wrong_file(
                    session,
                    (*kept, *(own[index] for index in sorted(own))),
                    mirror_id=self.mirror_id,
                    source=source,
                    path=file.path,
                    size=file.size,
                    expected=expected,
                    actual=actual,
                )
                await contents.forget_chunks(session, [identity_key])
            self._chunks = [chunk for chunk in self._chunks if chunk[0] != identity_key]
        facts = {"mirror": self.mirror_id, "source": source, "path": file.path, "expected": expected}
        logger.warning("wrong content is kept as evidence", extra=facts)
        return name

    async def narrow(self, evidence: str, layout: FileLayout) -> None:
        """The file came right after all: of what is kept, its right chunks are no evidence."""
        async with self.writing(canceled_too=True) as session:
            await damaged.narrow_evidence(session, evidence, layout.chunks)

    def abandon(self) -> None:
        """The end: what could not be told never will be, and nobody may build on it."""
        self.on_flushed(list(self._complete))
