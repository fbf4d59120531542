"""Scrub and verification: reads the store again, slowly or on an operator's request, and repairs damage.

A scrub walks the rows of ``chunks`` in the order of their ids. The next round begins at once after a round that took
longer than the period.

One process at a time scrubs the store; another process resumes when it ends. Progress is recorded, so that a
verification or scrub resumes there.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, StoreUnavailableError
from bdn.core.manifest import read_page
from bdn.core.pace.rounds import is_round_due
from bdn.core.store import ChunkStore
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.db import damaged, manifests, mirrors, operations, origins
from bdn.mirror.db.damaged import Damage, ScrubState
from bdn.mirror.db.database import Database, tell
from bdn.mirror.db.operations import MIRROR
from bdn.mirror.db.waiting import KEEPERS_WORK
from bdn.mirror.upkeep.repair import Repair
from bdn.transfer.byte_threads import Pacer
from bdn.wire.operation_schema import LISTED, DamagedItem, Outcome, VerifyCommand, listed
from bdn.wire.shapes import added

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0  # between polls for damage and requests from other processes
_AWAY_SECONDS: Final = 5.0  # after a failure of the store or the database
_AT_ONCE: Final = 32  # chunks between two records of progress: what is read again after a kill
_PAGES: Final = 64  # of a manifest that are searched for a damaged chunk


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """``cursor`` is None when no chunks are left to read."""

    chunks_read: int
    bytes_read: int
    cursor: int | None
    damage: Sequence[Damage] = ()


@dataclass(frozen=True)
class Keeper:
    """Runs repairs, verifications and the scrub in the background. The latter two share one read rate.

    Args:
        on_read: called with the size of each chunk read.
        period_seconds: between the starts of two rounds of the scrub; 0 disables the scrub.
    """

    database: Database
    damages: Damages
    repair: Repair
    rate_bytes_per_second: int
    on_read: Callable[[int], None]
    period_seconds: float
    clock: Callable[[], float]

    @cached_property
    def _pacer(self) -> Pacer:
        return Pacer(self.rate_bytes_per_second)

    async def keep(self) -> None:
        while True:
            try:
                async with self.database.alone("store keeper"):
                    while True:
                        await self._turn()
            except BdnError as error:
                logger.warning("cannot verify the store now; retrying", extra={"error": str(error)})
            except Exception:
                logger.exception("verifying the store failed")
            await asyncio.sleep(_AWAY_SECONDS)

    async def _turn(self) -> None:
        """One step of each in turn: a verification may take hours and must not delay repairs, nor many repairs a scrub."""
        work = self.database.watch.topic(KEEPERS_WORK)
        changes = work.changes
        has_repaired = await self.repair_next()
        has_verified = await self.verify_next()
        has_scrubbed = not has_verified and await self.scrub_next()
        if not (has_repaired or has_verified or has_scrubbed):
            await work.changed(changes, LOOK_SECONDS)

    async def repair_next(self) -> bool:
        """Repair some of the damage that scrubs, readers and failed repairs left. Returns False if none is due."""
        async with self.database.read() as session:
            found = await damaged.named(session)
        due = [damage for damage in found if self.repair.is_due(damage.digest)][:_AT_ONCE]
        if due:
            await self.repair.run(due)
        return bool(due)

    async def scrub_next(self) -> bool:
        """Scrub one part of a round. Returns False if no round is due."""
        async with self.database.read() as session:
            state = await damaged.scrub_state(session)
        now = self.clock()
        is_under_way = state is not None and state.cursor is not None
        is_due = is_under_way or is_round_due(state.started_at if state else None, self.period_seconds, now)
        if not is_due or not self.period_seconds:
            return False
        started_at = state.started_at if state and is_under_way else now
        part = await self._read(state.cursor if state else None, None)
        completed_at = state.completed_at if state else None
        if part.cursor is None:
            completed_at = self.clock()
        async with self.database.write() as session:
            await damaged.save_scrub_state(session, ScrubState(started_at, completed_at, part.cursor))
        return True

    async def verify_next(self) -> bool:
        """Verify one part for the oldest verification. Returns False if none is open."""
        async with self.database.read() as session:
            rows = await operations.open_of_mirror(session, "verification")
            parts = await operations.parts_of(session, rows[0].id) if rows else []
        if not rows:
            return False
        row, sofar = rows[0], parts[0].result
        organisation = row.organisation or ""
        command = VerifyCommand.model_validate(row.command)
        names = None
        if command.manifests is not None:
            names = [manifest.removeprefix("b3:") for manifest in command.manifests]
        part = await self._read(sofar.get("cursor"), names)
        known = {item["chunk"] for item in sofar.get("items", [])}
        new = [damage for damage in part.damage if str(damage.digest) not in known]
        items = await self._settle(new, organisation, is_listed=len(known) < LISTED, repair=command.repair)
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
                tell(session, row.id)
        return True

    async def _read(self, cursor: int | None, names: Sequence[str] | None) -> ScrubResult:
        """Read the next chunks behind the cursor: of these manifests or, with None, of the whole store."""
        async with self.database.read() as session:
            read = await damaged.after(session, cursor or 0, names, _AT_ONCE)
        for one in read:
            await asyncio.sleep(self._pacer(one.size))
            await self.damages.examine(one.digest)
            self.on_read(one.size)
        async with self.database.read() as session:
            damage = await damaged.named(session, [one.digest for one in read])
        return ScrubResult(len(read), sum(one.size for one in read), read[-1].id if read else None, damage)

    async def _settle(
        self, found: Sequence[Damage], organisation: str, *, is_listed: bool, repair: bool
    ) -> list[DamagedItem]:
        """Repair damaged chunks if requested. Returns an item for each, with its place in a manifest if ``is_listed``."""
        left: dict[Digest, str] = {}
        if repair and found:
            left = await self.repair.run(found, organisation)
        places = await self._places(found if is_listed else (), organisation)  # pages may be right again
        items = []
        for damage in found:
            outcome: Outcome = "lost" if damage.digest in left else "repaired"
            if not repair:
                self.repair.leave(damage.digest)
                outcome = "damaged"
            reason = "; ".join(filter(None, [damage.reason, left.get(damage.digest)]))
            item = DamagedItem(tier=MIRROR, chunk=str(damage.digest), outcome=outcome, reason=reason)
            items.append(item.model_copy(update=places.get(damage.digest, {})))
        return items

    async def _places(self, found: Sequence[Damage], organisation: str) -> dict[Digest, dict[str, object]]:
        """Manifest, sources and path of damaged chunks that are in manifests of this organisation."""
        of: dict[str, list[Digest]] = {}
        async with self.database.read() as session:
            for damage in found:
                for manifest in await origins.manifests_with(session, organisation, damage.digest, 1):
                    of.setdefault(manifest, []).append(damage.digest)
            sources = await mirrors.sources_by_manifest(session, organisation, list(of))
        places: dict[Digest, dict[str, object]] = {}
        for manifest, digests in of.items():
            paths = await asyncio.to_thread(_paths, self.damages.store, Digest(manifest), digests)
            place = {"manifest": f"b3:{manifest}", "sources": sources.get(manifest, [])}
            places |= {digest: place | {"path": paths.get(digest)} for digest in digests}
        return places


def _paths(store: ChunkStore, manifest: Digest, wanted: Collection[Digest]) -> dict[Digest, str]:
    """One path for each of these chunks; none for roots and pages, nor if these are damaged. Blocking."""
    found: dict[Digest, str] = {}
    try:
        for page in manifests.root_of(store, manifest).pages[:_PAGES]:
            content = manifests.page(store, page)
            if any(digest.hex.encode() in content for digest in wanted if digest not in found):
                for entry in read_page(content):
                    found |= {chunk: entry.path for chunk in entry.fetched if chunk in wanted and chunk not in found}
    except StoreUnavailableError as error:
        logger.info(
            "cannot find the paths of damaged chunks of a manifest",
            extra={"manifest": str(manifest), "error": str(error)},
        )
    return found
