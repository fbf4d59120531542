"""The mirror's own part of a verification: what of the store it names is read, repaired, and reported chunk by chunk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.manifest import Manifest
from bdn.mirror.db import mirrors, operations, origins
from bdn.mirror.db.database import Database
from bdn.mirror.db.objects import Reach, StoredObject
from bdn.mirror.db.operations import MIRROR
from bdn.mirror.db.records import Record
from bdn.mirror.scrub.reading import StoreReading
from bdn.mirror.scrub.repair import Repair
from bdn.mirror.waiting import Watch
from bdn.wire.operation_schema import DamagedItem, Outcome, VerifyCommand, listed
from bdn.wire.shapes import added


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
