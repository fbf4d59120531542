"""Damage in the store: recorded in the chunk's row first, then the wrong bytes are set aside.

A crash between the two leaves wrong bytes that are known to be wrong; every reader detects them by comparing the
digest. The other order would leave an absent chunk that counts as stored.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import StoreUnavailableError
from bdn.core.store import MirrorStore
from bdn.mirror.db import damaged
from bdn.mirror.db.database import Database, tell
from bdn.mirror.db.waiting import KEEPERS_WORK, SharedRead, SharedReads
from bdn.transfer.fair_limit import FairLimit

_SERVED_SECONDS: Final = 1.0  # for which a chunk is still served after another process found it wrong
_EXAMINED_AT_ONCE: Final = 4  # objects: each occupies a thread of the loop and, from a bucket, 8 MiB of memory
logger = logging.getLogger(__name__)


class ChunkDamagedError(StoreUnavailableError):
    """The store is available; only this chunk is damaged."""

    chunk: str

    def describe(self) -> str:
        return (
            f"chunk {self.chunk} is damaged in the mirror's store and is not served ({self.reason}); the mirror repairs it from agents "
            "or the upstream if they have it: see 'bdn-admin verify', or mirror its source again"
        )


@dataclass(frozen=True)
class Damages:
    """Finds and registers damage. ``SetWriter`` clears it by putting the chunk again."""

    database: Database
    store: MirrorStore
    clock: Callable[[], float]
    _examinations: SharedReads[tuple[Digest, str], str | None] = field(default_factory=partial(SharedReads, 0.0))
    _places: FairLimit = field(default_factory=partial(FairLimit, _EXAMINED_AT_ONCE))

    async def examine(self, digest: Digest, organisation: str = "") -> str | None:
        """Read a chunk of the store. Returns what is wrong with it, now registered; None if it is right or not stored.

        Of many concurrent requests of one ``organisation``, the first reads for itself, and a second read serves all
        others. Reads alternate round robin between organisations; the mirror's own scans count as one more.
        """
        examination = self._examinations.of(
            (digest, organisation), partial(self._examine_in_turn, digest, organisation)
        )
        return await examination.get()

    async def _examine_in_turn(self, digest: Digest, organisation: str) -> str | None:
        async with self._places.place(organisation):
            return await self._examine(digest)

    async def _examine(self, digest: Digest) -> str | None:
        async with self.database.read() as session:
            row = await damaged.get(session, digest)
        if row is None or row.damage is not None:
            return None if row is None else row.damage
        fault = await asyncio.to_thread(self.store.fault, digest)
        if fault is None:
            return None
        async with self.database.write() as session:
            is_marked = await damaged.mark(session, digest, row.id, fault, self.clock())
            tell(session, KEEPERS_WORK)
        if not is_marked:  # another process was first, a collection deleted the chunk, or it is being put
            return (await self.reasons([digest])).get(digest)
        self._all.forget()
        logger.warning(
            "chunk damaged in the store; it is not served until it is repaired",
            extra={"chunk": str(digest), "reason": fault},
        )
        try:
            await asyncio.to_thread(self.store.set_aside, digest)
        except StoreUnavailableError as error:
            # The object cannot be moved. It is registered, and so not served; the scrub continues behind it.
            logger.warning(
                "cannot move a damaged chunk to quarantine; it stays in place and is not served",
                extra={"chunk": str(digest), "error": str(error)},
            )
        return fault

    @cached_property
    def _all(self) -> SharedRead[Mapping[Digest, str]]:
        async def read() -> Mapping[Digest, str]:
            async with self.database.read() as session:
                return await damaged.reasons(session)

        return SharedRead(read, _SERVED_SECONDS)

    async def count(self) -> int:
        """How many chunks are damaged or missing in the store, as of at most a second ago."""
        return len(await self._all.get())

    async def reason_of(self, digest: Digest) -> str | None:
        """What is wrong with a chunk; None also if it was found wrong less than a second ago, in another process.

        A chunk that is right costs no query of its own.
        """
        if digest not in await self._all.get():
            return None
        return (await self.reasons([digest])).get(digest)

    async def reasons(self, digests: Sequence[Digest]) -> dict[Digest, str]:
        """The damaged ones of these chunks, and why they are not served."""
        async with self.database.read() as session:
            return await damaged.reasons(session, digests)
