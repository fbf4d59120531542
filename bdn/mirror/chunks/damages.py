"""What the store holds wrongly: a row first, then the wrong bytes are set aside. What the database says wrongly is refused.

So a crash between the two leaves wrong bytes that are known to be wrong; and whoever reads them is told by its own check of
the digest. In the other order it would leave a chunk that is absent, and that everybody counts on.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import StoreUnavailableError
from bdn.core.store import MirrorStore
from bdn.mirror.db import damaged, objects
from bdn.mirror.db.contents import Record, RecordDamagedError
from bdn.mirror.db.database import Database, tell
from bdn.mirror.db.waiting import KEEPERS_WORK, SharedReads
from bdn.transfer.fair_limit import FairLimit

_EXAMINED_AT_ONCE: Final = 4  # objects: each holds a thread of the loop, and of a bucket 8 MiB of memory
logger = logging.getLogger(__name__)


class ChunkDamagedError(StoreUnavailableError):
    """The store is there, and this chunk is not."""

    chunk: str

    def __str__(self) -> str:
        return (
            f"chunk {self.chunk} is damaged in the mirror's store and is not served ({self.reason}); it is repaired from agents "
            "or the upstream where they have it: see 'bdn-admin verify', or mirror its source again"
        )


@dataclass(frozen=True)
class Damages:
    """Finds damage, registers it, and takes it back.

    ``on_repaired`` counts. ``records`` are the records of the database that this process found wrong, and why. No table lists
    them, because whoever reads such a record finds it wrong again.
    """

    database: Database
    store: MirrorStore
    clock: Callable[[], float]
    on_repaired: Callable[[], None]
    records: dict[Record, str] = field(default_factory=dict)
    _examinations: SharedReads[tuple[Digest, str], str | None] = field(default_factory=partial(SharedReads, 0.0))
    _places: FairLimit = field(default_factory=partial(FairLimit, _EXAMINED_AT_ONCE))

    async def examine(self, digest: Digest, organisation: str = "") -> str | None:
        """What is wrong with this object of the store, from now on registered; None when it is right, or nobody needs it.

        Of many requests of one ``organisation`` at once, the first reads it, and the second for all others. Objects are read round
        robin over organisations; the mirror's own scans are one more.
        """
        examination = self._examinations.of(
            (digest, organisation), partial(self._examine_in_turn, digest, organisation)
        )
        return await examination.get(anew=True)

    async def _examine_in_turn(self, digest: Digest, organisation: str) -> str | None:
        async with self._places.place(organisation):
            return await self._examine(digest)

    async def _examine(self, digest: Digest) -> str | None:
        fault = await asyncio.to_thread(self.store.fault, digest)
        if fault is None:
            await self._forgive(digest)
            return None
        known = await self.reason(digest)
        if known is None and not await self._register(digest, fault):
            return None  # an eviction took it
        # Also when it is known: a crash may have come before this.
        try:
            await asyncio.to_thread(self.store.set_aside, digest)
        except StoreUnavailableError as error:
            # Nobody may touch it. It is registered, and so not served; what stands behind it shall be looked at all the same.
            logger.warning("a wrong chunk stays where it is", extra={"chunk": str(digest), "error": str(error)})
        async with self.database.write() as session:
            tell(session, KEEPERS_WORK)
        return known or fault

    async def _register(self, digest: Digest, fault: str) -> bool:
        async with self.database.read() as session:
            if not await damaged.is_needed(session, digest):  # nobody who writes shall wait for a search in vain
                return False
        async with self.database.write() as session:
            is_needed = await damaged.register(session, digest, self.clock(), fault)
        if is_needed:
            logger.warning("the store holds a wrong chunk", extra={"chunk": str(digest), "reason": fault})
        return is_needed

    async def heal(self) -> None:
        """Take back what is registered and is right again. What the store cannot look at now is passed over."""
        async with self.database.read() as session:
            found = await damaged.all_damaged(session)
        if not found:
            return
        for row in found:
            if await self._is_right(Digest(row.digest)):
                await self._forgive(Digest(row.digest))
        async with self.database.write() as session:
            superseded = await damaged.drop_superseded(session, self.clock())
        for slab in superseded:
            logger.info("a damaged slab is not needed any more", extra={"slab": slab})
            self.on_repaired()

    async def _is_right(self, digest: Digest) -> bool:
        """False also while nobody can tell: it is damaged until it was read."""
        try:
            return await asyncio.to_thread(self.store.fault, digest) is None
        except StoreUnavailableError:
            return False

    async def reason(self, digest: Digest) -> str | None:
        """Why this object is not served, if it is damaged."""
        async with self.database.read() as session:
            row = await damaged.get(session, digest.hex)
        return None if row is None else row.reason

    async def reasons(self, digests: Sequence[Digest]) -> dict[Digest, str]:
        """Those of these objects that are damaged, and why they are not served."""
        async with self.database.read() as session:
            return await damaged.reasons(session, digests)

    async def _forgive(self, digest: Digest) -> None:
        if await self.reason(digest) is None:
            return
        async with self.database.write() as session:
            is_repaired = await damaged.forgive(session, digest, self.clock())
        if is_repaired:
            logger.info("a chunk of the store is repaired", extra={"chunk": str(digest)})
            self.on_repaired()

    @contextmanager
    def records_noted(self) -> Iterator[None]:
        """Remember the record that the block refuses."""
        try:
            yield
        except RecordDamagedError as error:
            self._note_record(error.record, error.reason)
            raise

    def _note_record(self, record: Record, fault: str) -> None:
        if record not in self.records:
            self.records[record] = fault
            logger.error("a record of the database is damaged", extra={"record": str(record), "reason": fault})

    async def tell_record(self, record: Record, fault: str) -> None:
        """Write an event for the manifests that a wrong record belongs to, once, and remember it."""
        async with self.database.write() as session:
            await objects.tell_damaged(session, record, fault, self.clock())
        self._note_record(record, fault)

    async def check_records(self) -> None:
        """Forget records that are right by now, because the database was restored, or are not there any more."""
        for record in tuple(self.records):
            async with self.database.read() as session:
                if await objects.record_fault(session, record) is None:
                    self.records.pop(record, None)
