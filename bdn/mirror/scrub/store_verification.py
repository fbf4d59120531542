"""The mirror's own part of a verification: what of the store it names is read, repaired, and reported chunk by chunk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.manifest import Manifest
from bdn.mirror.agents.addressees import MIRROR
from bdn.mirror.db import asked, mirrors, origins
from bdn.mirror.db.database import Database
from bdn.mirror.db.objects import Reach, StoredObject
from bdn.mirror.db.records import Record
from bdn.mirror.db.tables import VerificationRow
from bdn.mirror.scrub.reading import StoreReading
from bdn.mirror.scrub.repair import Repair
from bdn.mirror.watch import Watch
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
            rows = [row for row in await asked.running(session, VerificationRow) if MIRROR in row.pending]
        if not rows:
            return False
        row = rows[0]
        command = VerifyCommand.model_validate(row.command)
        reach = None
        if command.manifests is not None:
            reach = Reach([manifest.removeprefix("b3:") for manifest in command.manifests], row.organisation)
        part = await self.reading.part(row.cursor, reach)
        known = {item["chunk"] for item in row.items if item["tier"] == MIRROR}
        items = [
            await self._settle(one, reason, row.organisation, command)
            for one, reason in part.faults
            if str(one.digest) not in known
        ]
        items += [
            await self._describe_record(record, fault, row.organisation)
            for record, fault in part.records
            if str(record.digest) not in known
        ]
        async with self.database.write() as session:
            fresh = await asked.change(session, VerificationRow, row.id)
            if fresh is not None:
                before = sum(item["tier"] == MIRROR for item in fresh.items)
                told, too_many = listed(items, before=before)
                fresh.items = [*fresh.items, *(item.model_dump() for item in told)]
                if too_many is not None:
                    fresh.error = too_many.model_dump()
                fresh.chunks_read = added(fresh.chunks_read, part.chunks_read)
                fresh.bytes_read = added(fresh.bytes_read, part.bytes_read)
                fresh.cursor = part.cursor
                fresh.pending = [name for name in fresh.pending if part.cursor is not None or name != MIRROR]
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
