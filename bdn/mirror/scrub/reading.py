"""Reads what the database says and what the store should hold, object after object, no faster than it was told, and finds out what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bdn.mirror.damages import DamagedRecords, Damages
from bdn.mirror.db import objects, records
from bdn.mirror.db.database import Database
from bdn.mirror.db.objects import Reach, StoredObject
from bdn.mirror.db.records import Record
from bdn.transfer.pacing import Pacer

_AT_ONCE: Final = 32  # objects between two records of how far it is: what a killed process reads again


@dataclass(frozen=True, slots=True)
class Part:
    """What was read. ``cursor`` None: there is nothing behind it. ``faults`` are registered, with what is wrong.

    ``records`` are those of the database that are not what their names say.
    """

    chunks_read: int
    bytes_read: int
    cursor: str | None
    faults: tuple[tuple[StoredObject, str], ...] = ()
    records: tuple[tuple[Record, str], ...] = ()


@dataclass(frozen=True)
class StoreReading:
    """Shared by scrub and verifications, so that both together keep the rate. ``on_read`` counts bytes."""

    database: Database
    damages: Damages
    damaged_records: DamagedRecords
    pacer: Pacer
    on_read: Callable[[int], None]

    async def part(self, cursor: str | None, reach: Reach | None) -> Part:
        """The next records of the database behind the cursor, or objects of the store, within reach or (None) of everything.

        Records come first: which objects there are, they say.
        """
        if cursor is None:
            await self.damaged_records.check_again()
        if cursor is None or cursor.startswith(("manifest:", "record:")):
            async with self.database.read() as session:
                found, behind = await records.after(session, cursor, reach.manifests if reach else None)
            for record, wrong in found:
                await self.damaged_records.tell(record, wrong)
            return Part(0, 0, behind or objects.FIRST, records=tuple(found))
        async with self.database.read() as session:
            wanted = await objects.after(session, cursor, reach, _AT_ONCE)
        faults: list[tuple[StoredObject, str]] = []
        for one in wanted:
            await asyncio.sleep(self.pacer(one.size))
            if fault := await self.damages.examine(one.digest):
                faults.append((one, fault))
            self.on_read(one.size)
        size = sum(one.size for one in wanted)
        return Part(len(wanted), size, wanted[-1].cursor if wanted else None, tuple(faults))
