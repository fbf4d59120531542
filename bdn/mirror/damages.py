"""What the store holds wrongly: a row first, then the wrong bytes are set aside. What the database says wrongly is refused.

So a crash between the two leaves wrong bytes that are known to be wrong; and whoever reads them is told by its own check of
the digest. In the other order it would leave a chunk that is absent, and that everybody counts on.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import StoreUnavailableError
from bdn.core.events import Event
from bdn.core.store import MirrorStore
from bdn.mirror.db import contents, damaged, events, mirrors, records
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.records import Record, RecordDamagedError
from bdn.mirror.waiting import SharedReads, Watch

logger = logging.getLogger(__name__)
DAMAGE = "damage"  # what the repair waits for
_TOLD: Final = 100  # manifests: a file may be in a thousand revisions


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
    """Finds damage, registers it, and takes it back; each is an event of the manifests concerned. ``on_repaired`` counts."""

    database: Database
    store: MirrorStore
    watch: Watch
    clock: Callable[[], float]
    on_repaired: Callable[[], None]
    _examinations: SharedReads[Digest, str | None] = field(default_factory=partial(SharedReads, 0.0))

    async def examine(self, digest: Digest) -> str | None:
        """What is wrong with this object of the store, from now on registered; None when it is right, or nobody needs it.

        Of many who ask at once the first has it read, and the second for all others.
        """
        with self._examinations.of(digest, partial(self._examine, digest)) as look:
            return await look.get(anew=True)

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
        self.watch.notify(DAMAGE)
        return known or fault

    async def _register(self, digest: Digest, fault: str) -> bool:
        async with self.database.read() as session:
            if not await damaged.is_needed(session, digest):  # nobody who writes shall wait for a search in vain
                return False
        async with self.database.write() as session:
            await mirrors.hold_claims(session)
            is_known = await damaged.get(session, digest.hex) is not None  # another process has read it, too
            is_needed = await damaged.register(session, digest, self.clock(), fault)
            if not is_known:
                await self._tell(session, "damaged", digest.hex)
        if is_needed:
            logger.warning("the store holds a wrong chunk", extra={"chunk": str(digest), "reason": fault})
        return is_needed

    async def heal(self) -> None:
        """Take back what is registered and is right again. What the store cannot look at now is passed over."""
        async with self.database.read() as session:
            found = await contents.all_damaged(session)
        if not found:
            return
        for row in found:
            if await self._is_right(Digest(row.digest)):
                await self._forgive(Digest(row.digest))
        async with self.database.write() as session:
            superseded = await damaged.superseded(session)
            for slab in superseded:
                await self.drop_slab(session, slab)
        for slab in superseded:
            logger.info("a damaged slab is not needed any more", extra={"slab": slab})
            self.on_repaired()

    async def _is_right(self, digest: Digest) -> bool:
        """False also while nobody can tell: it is damaged until it was read."""
        try:
            return await asyncio.to_thread(self.store.fault, digest) is None
        except StoreUnavailableError:
            return False

    async def drop_slab(self, session: WriteSession, slab: str) -> None:
        """What lay in it lies elsewhere."""
        await self._tell(session, "repaired", slab)
        await damaged.drop_slab(session, slab)

    async def give_up(self, digest: Digest) -> None:
        """Nobody has it now. Written down once for each damage, however often somebody is asked again."""
        async with self.database.read() as session:
            row = await damaged.get(session, digest.hex)
            if row is None or await events.is_recorded(session, "lost", digest.hex, row.found_at):
                return
        async with self.database.write() as session:
            await self._tell(session, "lost", digest.hex)

    async def _tell(self, session: WriteSession, kind: str, digest: str) -> None:
        """Write it down for each manifest that it is a part of. Not from whom it was asked for in vain: those are others' names."""
        row = await damaged.get(session, digest)
        if row is not None:
            facts = {"tier": "mirror", "reason": row.reason}
            decided = [
                Event.of(kind, facts, manifest=f"b3:{manifest}", digest=f"b3:{digest}", organisation=owner)
                for manifest, owner in await damaged.concerned(session, digest)
            ]
            await events.record(session, decided, self.clock())

    async def reason(self, digest: Digest) -> str | None:
        """Why this object is not served, if it is damaged."""
        async with self.database.read() as session:
            row = await damaged.get(session, digest.hex)
        return None if row is None else row.reason

    async def _forgive(self, digest: Digest) -> None:
        async with self.database.read() as session:
            if await damaged.get(session, digest.hex) is None:
                return
        async with self.database.write() as session:
            await self._tell(session, "repaired", digest.hex)
            is_repaired = await damaged.forgive(session, digest)
        if is_repaired:
            logger.info("a chunk of the store is repaired", extra={"chunk": str(digest)})
            self.on_repaired()


@dataclass(frozen=True)
class DamagedRecords:
    """The records that this process found wrong, with what is wrong. Whoever reads one anew finds that again."""

    database: Database
    clock: Callable[[], float]
    found: dict[Record, str] = field(default_factory=dict)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember the record that the block refuses."""
        try:
            yield
        except RecordDamagedError as error:
            self._add(error.record, error.reason)
            raise

    def _add(self, record: Record, fault: str) -> None:
        if record not in self.found:
            self.found[record] = fault
            logger.error("a record of the database is damaged", extra={"record": str(record), "reason": fault})

    async def tell(self, record: Record, fault: str) -> None:
        """Write an event for the manifests that it belongs to, once, and remember it."""
        async with self.database.write() as session:
            if not await events.is_recorded(session, "damaged", record.digest.hex, 0.0):
                facts = {"tier": "mirror", "reason": fault}
                decided = [
                    Event.of("damaged", facts, manifest=f"b3:{manifest}", digest=record.digest)
                    for manifest in await records.manifests_of(session, record, _TOLD)
                ]
                await events.record(session, decided, self.clock())
        self._add(record, fault)

    async def check_again(self) -> None:
        """Forget those that are right by now, because the database was restored, or are not there any more."""
        for record in tuple(self.found):
            async with self.database.read() as session:
                if await records.fault_of(session, record) is None:
                    self.found.pop(record, None)
