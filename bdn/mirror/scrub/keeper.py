"""The store's keeper: repairs of what was found and verifications that somebody waits for, in turns, and else the scrub.

One process at a time: others wait, and one of them takes over when this one is gone. How far a verification and the scrub are
is recorded, so that whoever takes over goes on there.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import Digest, Manifest
from bdn.core.errors import BdnError
from bdn.core.pace.rounds import is_round_due
from bdn.mirror.damages import DAMAGE, DamagedRecords, Damages
from bdn.mirror.db import contents, mirrors, objects, operations, origins, records
from bdn.mirror.db.database import Database
from bdn.mirror.db.objects import Reach, StoredObject
from bdn.mirror.db.operations import MIRROR
from bdn.mirror.db.records import Record
from bdn.mirror.scrub.repair import Repair
from bdn.mirror.waiting import Watch
from bdn.transfer.byte_threads import Pacer
from bdn.wire.operation_schema import DamagedItem, Outcome, VerifyCommand, listed
from bdn.wire.shapes import added

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


@dataclass(frozen=True)
class StoreVerification:
    """Works on the oldest verification that wants the store read."""

    database: Database
    reading: StoreReading
    repair: Repair
    watch: Watch

    async def go_on(self) -> bool:
        """One part further; False when nobody waits."""
        async with self.database.read() as session:
            rows = await operations.open_of_mirror(session, "verification")
            parts = await operations.parts_of(session, rows[0].id) if rows else []
        if not rows:
            return False
        row, sofar = rows[0], parts[0].result
        organisation = row.organisation or ""
        command = VerifyCommand.model_validate(row.command)
        reach = None
        if command.manifests is not None:
            reach = Reach([manifest.removeprefix("b3:") for manifest in command.manifests], organisation)
        part = await self.reading.part(sofar.get("cursor"), reach)
        known = {item["chunk"] for item in sofar.get("items", [])}
        items = [
            await self._settle(one, reason, organisation, command)
            for one, reason in part.faults
            if str(one.digest) not in known
        ]
        items += [
            await self._describe_record(record, fault, organisation)
            for record, fault in part.records
            if str(record.digest) not in known
        ]
        async with self.database.write() as session:
            mine = await operations.lock_mirrors_part(session, row.id)
            if mine is not None:
                before = mine.result.get("items", [])
                told, too_many = listed(items, before=len(before))
                mine.result = {
                    "items": [*before, *(item.model_dump() for item in told)],
                    "chunks_read": added(mine.result.get("chunks_read", 0), part.chunks_read),
                    "bytes_read": added(mine.result.get("bytes_read", 0), part.bytes_read),
                    "cursor": part.cursor,
                }
                if too_many is not None:
                    mine.error = too_many.model_dump()
                mine.state = "RUNNING" if part.cursor is not None else "FAILED" if mine.error else "DONE"
        if part.cursor is None:
            self.watch.notify(row.id)
        return True

    async def _settle(self, one: StoredObject, reason: str, organisation: str, command: VerifyCommand) -> DamagedItem:
        """What becomes of a damaged object, and what it belongs to."""
        item = await self._describe(one.digest, organisation)
        outcome: Outcome = "damaged"
        if not command.repair:
            self.repair.leave(one.digest)
        else:
            left = await self.repair.run(one.digest, organisation)
            outcome = "repaired" if left is None else "lost"
            reason = reason if left is None else f"{reason}; {left}"
        return item.model_copy(update={"outcome": outcome, "reason": reason})

    async def _describe_record(self, record: Record, fault: str, organisation: str) -> DamagedItem:
        """A damaged record is not repaired here. Of a damaged manifest nothing is known but its name."""
        item = await self._describe(record.digest, organisation)
        if record.kind == "manifest":
            async with self.database.read() as session:
                sources = await mirrors.sources_by_manifest(session, organisation, [record.digest.hex])
            if found := sources.get(record.digest.hex):
                item = item.model_copy(update={"manifest": str(record.digest), "sources": found})
        return item.model_copy(update={"reason": str(record.damaged(fault))})

    async def _describe(self, digest: Digest, organisation: str) -> DamagedItem:
        item = DamagedItem(tier=MIRROR, chunk=str(digest), outcome="damaged", reason="")
        async with self.database.read() as session:
            needed = await origins.needed(session, digest.hex)
            content = needed.pieces[0].content if needed else digest
            found = await origins.origins(session, content.hex)
            own = next((origin for origin in found if origin.organisation == organisation), None)
            if own is None:
                return item
            canonical = await origins.canonical(session, own.manifest)
            sources = await mirrors.sources_by_manifest(session, organisation, [own.manifest])
        path = await asyncio.to_thread(_path_of, canonical, content) if canonical else None
        place = {"manifest": f"b3:{own.manifest}", "sources": sources.get(own.manifest, []), "path": path}
        return item.model_copy(update=place)


def _path_of(canonical: bytes, content: Digest) -> str | None:
    return next((file.path for file in Manifest.parse(canonical).files if file.digest == content), None)


logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0  # at what other processes have found, or ask for
_AWAY_SECONDS: Final = 5.0  # after a failure of the store or the database


@dataclass(frozen=True)
class Keeper:
    """Works in the background. ``period_seconds`` 0: no scrub."""

    database: Database
    reading: StoreReading
    repair: Repair
    verification: StoreVerification
    watch: Watch
    period_seconds: float
    clock: Callable[[], float]

    async def keep(self) -> None:
        """For ever take one turn after the other."""
        while True:
            try:
                async with self.database.alone("store keeper"):
                    while True:
                        await self._turn()
            except BdnError as error:
                logger.warning("the store cannot be verified now", extra={"error": str(error)})
            except Exception:
                logger.exception("verifying the store failed")
            await asyncio.sleep(_AWAY_SECONDS)

    async def _turn(self) -> None:
        """A verification of a large store takes hours, for which no repair shall wait; nor it for repairs, which may be many."""
        has_repaired = await self._repair_next()
        has_verified = await self.verification.go_on()
        if not has_repaired and not has_verified and not await self._scrub():
            await self.watch.changed(DAMAGE, LOOK_SECONDS)

    async def _repair_next(self) -> bool:
        """What a scrub or a reader has found, or an earlier attempt could not repair."""
        async with self.database.read() as session:
            rows = await contents.all_damaged(session)
        due = next((digest for row in rows if self.repair.is_due(digest := Digest(row.digest))), None)
        if due is not None:
            await self.repair.run(due)
        return due is not None

    async def _scrub(self) -> bool:
        """A part of a round, if it is time."""
        async with self.database.read() as session:
            row = await objects.scrub_state(session)
        now = self.clock()
        is_under_way = row is not None and row.cursor is not None
        is_due = is_under_way or is_round_due(row.started_at if row else None, self.period_seconds, now)
        if not is_due or not self.period_seconds:
            return False
        part = await self.reading.part(row.cursor if row else None, None)
        started_at = row.started_at if row and is_under_way else now
        completed_at = row.completed_at if row else None
        if part.cursor is None:
            completed_at = self.clock()
        async with self.database.write() as session:
            await objects.save_scrub_state(
                session, started_at=started_at, completed_at=completed_at, cursor=part.cursor
            )
        return True
