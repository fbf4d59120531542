"""What a running mirror has done since it last told the database: chunks, complete files, counters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from bdn.core.digest import Digest
from bdn.core.store.layout import FileLayout, Slab
from bdn.mirror.db import contents, mirrors, quarantine
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.quarantine import WrongFile

logger = logging.getLogger(__name__)


class ClaimLostError(Exception):
    """Somebody canceled the mirror, or another worker took it over: nothing more is written in its name."""


@dataclass
class SourceCounters:
    """Bytes of one source so far; ``changed`` says that the database does not know yet."""

    transferred: int = 0
    reused: int = 0
    changed: bool = False


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
        counters = self.counters[position]
        counters.transferred += size
        counters.changed = True
        self.on_transferred(size)

    def packed(self, position: int, slab: Slab, size: int) -> None:
        """``size`` bytes, one whole file, came from the upstream and are durable in a slab."""
        self.lies_in(slab)
        counters = self.counters[position]
        counters.transferred += size
        counters.changed = True
        self.on_transferred(size)

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

        Raises:
            ClaimLostError: nothing was written.
        """
        async with self.database.write() as session:
            status = await mirrors.claimed_status(session, self.mirror_id, self.claimant, time.time())
            if status != "SYNCING" and not (canceled_too and status is not None):
                raise ClaimLostError
            yield session

    async def flush(self) -> None:
        """Tell the database, in one transaction. What could not be told is kept for the next time."""
        async with self._flushing:
            chunks, self._chunks = self._chunks, []
            complete, self._complete = self._complete, {}
            slabs, self._slabs = self._slabs, {}
            changed = {position: counters for position, counters in self.counters.items() if counters.changed}
            if not (chunks or complete or changed):
                return
            try:
                async with self.writing(canceled_too=True) as session:
                    now = time.time()
                    await contents.record_chunks(session, [chunk for chunk in chunks if chunk[0] not in complete], now)
                    await contents.record_slabs(session, slabs.values())
                    await contents.record_contents(session, complete, now)
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

    async def quarantine(self, identity_key: str, wrong: WrongFile) -> str:
        """As ``drop``, and what came stays in the store as evidence, of which this is the name."""
        async with self._flushing:
            own = {index: digest for key, index, digest in self._chunks if key == identity_key}
            async with self.writing(canceled_too=True) as session:
                own |= await contents.copied_chunks(session, identity_key)
                chunks = (*wrong.chunks, *(own[index] for index in sorted(own)))
                name = await quarantine.keep(session, self.mirror_id, replace(wrong, chunks=chunks))
                await contents.forget_chunks(session, [identity_key])
            self._chunks = [chunk for chunk in self._chunks if chunk[0] != identity_key]
        facts = {"source": wrong.source, "path": wrong.path, "expected": wrong.error.expected}
        logger.warning("wrong content is kept as evidence", extra={"mirror": self.mirror_id, **facts})
        return name

    async def narrow(self, evidence: str, layout: FileLayout) -> None:
        """The file came right after all: of what is kept, its right chunks are no evidence."""
        async with self.writing(canceled_too=True) as session:
            await quarantine.narrow(session, evidence, layout.chunks)

    def abandon(self) -> None:
        """The end: what could not be told never will be, and nobody may build on it."""
        self.on_flushed(list(self._complete))
