"""Wrong records of the database are kept as evidence and written right again: from themselves, from agents, from the upstream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest, digest_of
from bdn.core.errors import BdnError, ChecksumMismatchError
from bdn.core.manifest import Manifest
from bdn.core.store.damage import manifest_fault
from bdn.core.store.layout import FileLayout
from bdn.mirror.damages import Damages
from bdn.mirror.db import origins, quarantine, records
from bdn.mirror.db.database import Database
from bdn.mirror.db.quarantine import WrongFile
from bdn.mirror.db.records import Record
from bdn.mirror.scrub.record_sources import RecordSource
from bdn.mirror.scrub.repair import AGAIN_SECONDS
from bdn.mirror.suspects import Suspects

logger = logging.getLogger(__name__)
SOURCE = "the mirror's database"  # of the evidence


@dataclass(frozen=True)
class RecordMending:
    """Mends one record at a time; the ``sources`` are asked in their order. ``on_repaired`` counts."""

    database: Database
    damages: Damages
    suspects: Suspects
    sources: Sequence[RecordSource]
    clock: Callable[[], float]
    on_repaired: Callable[[], None]
    _tried_at: dict[Record, float] = field(default_factory=dict)

    def leave(self, record: Record, fault: str) -> None:
        """Somebody asked not to repair this: for a while it is left as it is."""
        self.suspects.add(record, fault)
        self._tried_at[record] = self.clock()

    async def mend_next(self) -> bool:
        """One that waits, if its last attempt is a while ago; False when none does."""
        for record in self.suspects.found:
            tried_at = self._tried_at.get(record)
            if tried_at is None or not 0 <= self.clock() - tried_at < AGAIN_SECONDS:
                await self.run(record)
                return True
        return False

    async def run(self, record: Record) -> str | None:
        """None once it is right, or gone; otherwise why it could not be had.

        Raises:
            StoreUnavailableError: the database or the store is away.
        """
        self._tried_at[record] = self.clock()
        async with self.database.read() as session:
            found = await records.fault(session, record)
        if found is not None:
            await self._keep(record, *found)
            if not await (self._manifest if record.kind == "manifest" else self._content)(record.digest):
                self.suspects.add(record, found[0])
                logger.warning("a damaged record cannot be repaired", extra={"record": str(record)})
                return "neither an agent nor a READY source has it"
            logger.info("a record of the database is repaired", extra={"record": str(record)})
            self.on_repaired()
        self.suspects.found.pop(record, None)
        self._tried_at.pop(record, None)
        return None

    async def _keep(self, record: Record, fault: str, raw: bytes) -> None:
        """What was wrong, as evidence in the store, beside files that came wrong: once, however often it is tried."""
        pieces = [raw[start : start + CHUNK_SIZE] for start in range(0, len(raw), CHUNK_SIZE)]
        names = tuple(map(digest_of, pieces))
        wrong = WrongFile(
            SOURCE, str(record), len(raw), ChecksumMismatchError(str(record), str(record.digest), fault), names
        )
        async with self.database.read() as session:
            if await quarantine.is_kept(session, wrong):
                return
        for name, piece in zip(names, pieces, strict=True):
            await asyncio.to_thread(self.damages.store.put, name, bytearray(piece))
        async with self.database.write() as session:
            await quarantine.keep(session, "", wrong)

    async def _manifest(self, digest: Digest) -> bool:
        for source in self.sources:
            canonical = await source.manifest(digest)
            if canonical is not None and manifest_fault(digest, canonical) is None:
                async with self.database.write() as session:
                    await records.restore_manifest(session, digest, canonical)
                return True
        return False

    async def _content(self, digest: Digest) -> bool:
        layout = await self._from_itself(digest)
        for source in self.sources:
            if layout is None:
                layout = await source.content(digest)
        if layout is None or layout.digest != digest:
            return False
        async with self.database.write() as session:
            await records.restore_content(session, layout)
        return True

    async def _from_itself(self, digest: Digest) -> FileLayout | None:
        """A file of one chunk is named like it, and a manifest tells its size."""
        async with self.database.read() as session:
            for name in await records.naming(session, digest):
                canonical = await origins.canonical(session, name)
                size = None if canonical is None else await asyncio.to_thread(_size_in, canonical, digest)
                if size is not None and 0 < size <= CHUNK_SIZE and await self._is_stored(digest):
                    return FileLayout(digest, size, (digest,))
        return None

    async def _is_stored(self, digest: Digest) -> bool:
        try:
            return await asyncio.to_thread(self.damages.store.keep, digest)
        except BdnError:
            return False


def _size_in(canonical: bytes, digest: Digest) -> int | None:
    return next((file.size for file in Manifest.parse(canonical).files if file.digest == digest), None)
