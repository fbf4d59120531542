"""CopyProgress of running mirrors, written to the database in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bdn.core.chunk import Digest, chunk_count
from bdn.core.errors import ChecksumMismatchError
from bdn.core.source.upstream import UpstreamFile
from bdn.mirror.db import damaged, identities, mirrors
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.identities import NOT_YET, RAW, Known
from bdn.transfer.under_way import UnderWay

logger = logging.getLogger(__name__)


class ClaimLostError(Exception):
    """The mirror was canceled, or another worker took it over: nothing more is written in its name."""


@dataclass
class SourceCounters:
    """Bytes of one source so far. ``changed``: not yet written to the database. ``under_way`` is never written."""

    transferred: int = 0
    reused: int = 0
    changed: bool = False
    under_way: UnderWay = field(default_factory=UnderWay)


@dataclass
class CopyProgress:
    """Collects on the event loop and writes in batches: a killed worker loses only the last batch.

    Everything reported here is already durable in the store. ``mirror_id`` is None for a repair. With ``has_strays``,
    the set may refer to chunks that the manifest does not name.
    """

    database: Database
    mirror_id: str | None
    claimant: str
    on_transferred: Callable[[int], None]
    counters: dict[int, SourceCounters] = field(default_factory=dict)
    has_strays: bool = False
    _parts: dict[str, tuple[int, bytearray]] = field(default_factory=dict)  # size and chunks of files being copied
    _changed: set[str] = field(default_factory=set)
    _complete: dict[str, Known] = field(default_factory=dict)  # units not yet written
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def begin_file(self, key: str, size: int, half: Known | None) -> None:
        """Begin to copy a large file, of which ``half`` is stored."""
        self._parts[key] = size, bytearray(half.raw if half else NOT_YET * chunk_count(size))

    def chunk_stored(self, key: str, index: int, digest: Digest) -> None:
        self._parts[key][1][index * RAW : (index + 1) * RAW] = digest.to_bytes()
        self._changed.add(key)

    async def unit_complete(self, known: Known) -> None:
        """A file or slab is durable, with the right checksum. On return, every mirror can find it."""
        self._parts.pop(known.key, None)
        self._changed.discard(known.key)
        # Before any await: a caller canceled now has counted the bytes, and the next flush writes both.
        self._complete[known.key] = known
        async with self._flushing:
            if known.key in self._complete:  # or the transaction of another unit recorded it
                await self._tell()

    def transferred(self, position: int, size: int) -> None:
        """Count bytes that arrived from a source's upstream and are durable."""
        counters = self.counters[position]
        counters.transferred += size
        counters.changed = True
        self.on_transferred(size)

    def reused(self, position: int, size: int) -> None:
        """Count bytes that another mirror copied meanwhile; negative if they were counted as held and were not."""
        if size:
            counters = self.counters[position]
            counters.reused += size
            counters.changed = True

    def bytes_under_way(self, position: int, recorded: int) -> int:
        """Bytes of a source that arrived and are not among the ``recorded`` bytes in the database."""
        counters = self.counters.get(position)
        return max(0, counters.transferred - recorded) + counters.under_way.received if counters else 0

    @asynccontextmanager
    async def writing(self, *, canceled_too: bool = False) -> AsyncIterator[WriteSession]:
        """A transaction in the name of this mirror. Raises ``ClaimLostError``: nothing was written."""
        async with self.database.write() as session:
            if self.mirror_id is not None and not await mirrors.is_claimed(
                session, self.mirror_id, self.claimant, canceled_too=canceled_too
            ):
                raise ClaimLostError
            yield session

    async def flush(self) -> None:
        """Write to the database; what fails is retained for the next flush. Raises ``ClaimLostError``."""
        async with self._flushing:
            if not await self._tell():
                raise ClaimLostError

    async def _tell(self) -> bool:
        """Write chunk places and byte counts in one transaction: a byte counts if and only if its place is known.

        Returns False if the claim is lost; then only the places are written, which are hints.
        """
        keys, self._changed = self._changed, set()
        complete, self._complete = self._complete, {}
        changed = {position: counters for position, counters in self.counters.items() if counters.changed}
        known = {key: Known(key, size, None, bytes(raw)) for key, (size, raw) in self._parts.items() if key in keys}
        known |= complete
        if not known and not changed:
            return True
        for counters in changed.values():
            counters.changed = False
        try:
            async with self.database.write() as session:
                is_ours = self.mirror_id is None or await mirrors.is_claimed(
                    session, self.mirror_id, self.claimant, canceled_too=True
                )
                await identities.record(session, known.values())
                if self.mirror_id is not None and is_ours:
                    for position, counters in changed.items():
                        told = {"bytes_transferred": counters.transferred, "bytes_reused": counters.reused}
                        await mirrors.update_source(session, self.mirror_id, position, **told)
        except BaseException:
            self._changed |= keys & self._parts.keys()
            self._complete = complete | self._complete
            for counters in changed.values():
                counters.changed = True
            raise
        return is_ours

    async def drop(self, key: str) -> None:
        """Discard the record of a file: it is wrong, and must not count as part of the right file."""
        self.has_strays = True
        self._parts.pop(key, None)
        self._complete.pop(key, None)
        async with self._flushing, self.database.write() as session:
            await identities.forget(session, [key])

    async def lost(self, key: str, chunk: Digest) -> None:
        """As ``drop``, because the store lost a chunk of the file. The chunk counts as never put from now on."""
        async with self.database.write() as session:
            if (row := await damaged.get(session, chunk)) is not None:
                await damaged.mark(session, chunk, row.id, "it is absent", self.database.now())
        await self.drop(key)

    async def quarantine(
        self, source: str, file: UpstreamFile, key: str, error: ChecksumMismatchError, kept: Sequence[Digest]
    ) -> None:
        """As ``drop``; the content that arrived, or ``kept`` of a small file, stays in the store as evidence."""
        size, raw = self._parts.get(key, (0, bytearray()))
        parts = Known(key, size, None, bytes(raw)).chunks.values()
        async with self.database.write() as session:
            await damaged.keep_wrong_file(
                session,
                [*kept, *parts],
                mirror_id=self.mirror_id or "",
                source=source,
                path=file.path,
                size=file.size,
                expected=error.expected,
                actual=error.actual,
            )
        await self.drop(key)
        facts = {"mirror": self.mirror_id, "source": source, "path": file.path, "expected": error.expected}
        logger.warning("upstream sent a file with wrong content; keeping it as evidence", extra=facts)
