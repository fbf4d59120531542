"""The store is read again, slowly or because somebody asked, and what is wrong is repaired.

A round that cannot read all of a large store within its period reads a part of it, another in each round, and looks at the rest:
whether it is there, with the right size.

One process at a time keeps the store: others wait, and one of them takes over when this one is gone. How far a verification
and the scrub are is recorded, so that whoever takes over goes on there. The right bytes come from agents, which cost the
upstream nothing, or from the upstream, as mirrored.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from bdn.core.chunk import ByteRange, Digest, FileLayout, Slab, digest_of
from bdn.core.errors import BdnError, ChecksumMismatchError, SourceChangedError, StoreUnavailableError
from bdn.core.pace.rounds import Sample, is_round_due
from bdn.core.source.upstream import Checksum
from bdn.core.source.uri import common_beginnings
from bdn.core.store import Needed, Piece, closed_up, seal_of
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.db import agents, contents, damaged, mirrors, objects, operations, origins
from bdn.mirror.db.contents import Record
from bdn.mirror.db.database import Database, tell
from bdn.mirror.db.objects import Reach, StoredObject
from bdn.mirror.db.operations import MIRROR
from bdn.mirror.db.origins import Origin
from bdn.mirror.db.tables import AgentRow
from bdn.mirror.db.waiting import KEEPERS_WORK
from bdn.mirror.ingest.survey import Surveyor
from bdn.mirror.upstream.reader import FileRange, LocatedFile, UpstreamReader
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import Pacer
from bdn.transfer.chunk_readers import PartialChunk
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.wire.grants import Grant, GrantedMount, GrantSigner
from bdn.wire.http_fields import is_in_the_clear
from bdn.wire.mirror_schema import WeightsSourceBody
from bdn.wire.operation_schema import DamagedItem, Outcome, VerifyCommand, listed
from bdn.wire.shapes import added

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0  # at what other processes have found, or ask for
AGAIN_SECONDS: Final = 300.0  # between two attempts to repair the same
_AWAY_SECONDS: Final = 5.0  # after a failure of the store or the database
_AT_ONCE: Final = 32  # objects between two records of how far it is: what a killed process reads again
_LOOKED_AT_ONCE: Final = 1000  # where few of them are read
_AGENTS: Final = 4  # asked for one piece
_GRANT_SECONDS: Final = 300
_PIECE_SECONDS: Final = 120.0  # that an agent may take to send one: who repairs does nothing else meanwhile
_JOB: Final = "repair"  # whom identity tokens are for, in place of a mirror


@dataclass
class Restoring:
    """One object while its pieces come together, and why somebody could not give one."""

    buffer: bytearray
    missing: list[Piece]
    _reasons: list[tuple[str, str | None]] = field(default_factory=list)

    def note(self, reason: str, organisation: str | None = None) -> None:
        """Somebody could not give a piece. The reason names a source of this organisation, or nobody's."""
        self._reasons.append((reason, organisation))

    def reason(self, asking: str | None = None) -> str:
        """All of them, as an organisation may hear them; None is the log."""
        told = [
            reason if asking is None or owner in (None, asking) else "another organisation's source cannot give it"
            for reason, owner in self._reasons
        ]
        return "; ".join(dict.fromkeys(told)) or "neither an agent nor a READY source has it"

    def place(self, piece: Piece) -> memoryview:
        """Where the piece's bytes belong."""
        return memoryview(self.buffer)[piece.offset : piece.offset + piece.size]

    def take(self, piece: Piece) -> bool:
        """Whether what lies in the piece's place is the piece; then it is not missing any more."""
        if digest_of(self.place(piece)) != piece.name:
            return False
        self.missing.remove(piece)
        return True


@dataclass(frozen=True)
class WholeAnswer:
    """An ``AnswerDeadline``: all of it is here ``until`` then, by the monotonic clock, however steadily a little comes."""

    until: float

    def waiting(self) -> None:
        """``TimeoutError``: it is too late."""
        if time.monotonic() > self.until:
            raise TimeoutError("it sends too slowly")

    def at_work(self) -> None:
        """As ``waiting``."""
        self.waiting()

    def receiving(self, count: int) -> None:  # noqa: ARG002 - a little is not enough
        """As ``waiting``."""
        self.waiting()


@dataclass(frozen=True)
class AgentSource:
    """Pieces and whole slabs from the data planes of living agents that hold a manifest which names them.

    With ``requires_tls`` no grant goes to an agent in the clear.
    """

    database: Database
    connections: ConnectionPool
    signer: GrantSigner
    clock: Callable[[], float] = time.time
    requires_tls: bool = False

    async def bring(self, restoring: Restoring) -> None:
        """What is missing, as far as possible: each piece from the first agent that sends it right. Failures are noted."""
        for piece in tuple(restoring.missing):
            await self._bring(piece, restoring)

    async def _bring(self, piece: Piece, restoring: Restoring) -> None:
        async with self.database.read() as session:
            found = await origins.origins(session, piece.content.hex)
        asked, since = 0, self.clock() - agents.ALIVE_SECONDS
        for origin in found:
            async with self.database.read() as session:
                living = await agents.living_holders(session, origin.manifest, since, _AGENTS - asked)
            for row in living:
                asked += 1
                if await self._ask(row, origin, piece, restoring):
                    return
            if asked == _AGENTS:
                return

    async def _ask(self, row: AgentRow, origin: Origin, piece: Piece, restoring: Restoring) -> bool:
        if self.requires_tls and is_in_the_clear(str(row.advertise)):
            restoring.note(f"agent {row.cluster}/{row.node} is asked for nothing: its address is one of plain HTTP")
            return False
        mount = GrantedMount("/repair", Digest(origin.manifest), origin.row.source)
        grant = self.signer.sign(Grant(origin.organisation, (mount,), self.clock() + _GRANT_SECONDS))
        # Without naming the manifest: an agent that owns the chunk and lacks it would ask us for it.
        deadline = WholeAnswer(time.monotonic() + _PIECE_SECONDS)
        reader = HttpChunkReader(self.connections, str(row.advertise), grant, deadline=deadline)
        try:
            await asyncio.to_thread(reader.read_into, PartialChunk(piece.name, restoring.place(piece)))
        except BdnError as error:
            restoring.note(f"agent {row.cluster}/{row.node}: {error}")
            return False
        if not restoring.take(piece):
            restoring.note(f"agent {row.cluster}/{row.node} has other bytes under this name")
            return False
        return True


@dataclass(frozen=True)
class UpstreamSource:
    """Pieces of files from the sources that they were mirrored from, at the mirrored revisions."""

    database: Database
    surveyor: Surveyor
    reader: UpstreamReader

    async def bring(self, restoring: Restoring) -> None:
        """What is missing, as far as possible. The newest source first, each opened once for all that it can give."""
        tried: set[tuple[str, str]] = set()
        while (origin := await self._next(restoring, tried)) is not None:
            tried.add((origin.organisation, origin.row.source))
            try:
                await self._bring_from(origin, restoring)
            except BdnError as error:
                restoring.note(str(error), origin.organisation)

    async def _next(self, restoring: Restoring, tried: set[tuple[str, str]]) -> Origin | None:
        """A source that was not tried and is said to have something that is missing."""
        async with self.database.read() as session:
            for piece in restoring.missing:
                for origin in await origins.origins(session, piece.content.hex):
                    if (origin.organisation, origin.row.source) not in tried:
                        return origin
        return None

    async def _bring_from(self, origin: Origin, restoring: Restoring) -> None:
        wanted = {piece.content.hex: piece for piece in restoring.missing}
        async with self.database.read() as session:
            paths = await origins.paths(session, origin.manifest, wanted.keys())
        if not paths:
            return
        row, named = origin.row, set(paths.values())
        mirrored = WeightsSourceBody.model_validate(row.request).to_core()
        async with self.surveyor.open(mirrored, origin.organisation, _JOB, row.resolved_revision) as source:
            listing = source.list(await source.resolve(), common_beginnings(named))
            files = {file.path: file async for file in listing if file.path in named}
            for content, path in paths.items():
                piece, file = wanted[content], files.get(path)
                if file is None or file.size != piece.content_size:
                    restoring.note(_has_changed(path, row.source), origin.organisation)
                    continue
                problem = await self._bring_piece(LocatedFile(row.source, source, file), piece, restoring)
                if problem is not None:
                    restoring.note(problem, origin.organisation)

    async def _bring_piece(self, located: LocatedFile, piece: Piece, restoring: Restoring) -> str | None:
        """None when it is there; otherwise why not."""

        def accept(content: memoryview, _: Checksum | None) -> None:
            restoring.place(piece)[:] = content
            if not restoring.take(piece):
                raise ChecksumMismatchError(located.subject, f"a piece called {piece.name}", "another one")

        async def once_more(located: LocatedFile, _: bytes, error: ChecksumMismatchError) -> None:
            logger.warning("a repair read wrong content", extra={"subject": located.subject, "error": str(error)})

        wanted = FileRange(located, ByteRange(piece.start, piece.start + piece.size), accept)
        try:
            await self.reader.read([wanted], on_wrong=once_more)
        except SourceChangedError as error:
            return str(error)
        except ChecksumMismatchError:
            return _has_changed(located.file.path, located.name)
        return None


def _has_changed(path: str, source: str) -> str:
    return f"{path!r} of {source} is not what was mirrored any more; mirror {source} again"


@dataclass(frozen=True)
class Repair:
    """Repairs one object at a time. Nothing but its own bytes is read."""

    database: Database
    damages: Damages
    agents: AgentSource
    upstream: UpstreamSource
    clock: Callable[[], float]
    _tried_at: dict[Digest, float] = field(default_factory=dict)

    def is_due(self, digest: Digest) -> bool:
        """Whether it is worth an attempt of our own accord: who could not give it a moment ago cannot now."""
        tried_at = self._tried_at.get(digest)
        return tried_at is None or not 0 <= self.clock() - tried_at < AGAIN_SECONDS

    def leave(self, digest: Digest) -> None:
        """Somebody asked not to repair this: for a while it is left as it is."""
        self._tried_at[digest] = self.clock()

    async def run(self, digest: Digest, asking: str | None = None) -> str | None:
        """None once the store holds it again, or nothing needs it; otherwise why it cannot be had.

        That may be that the store does not take it. The reason is one that the organisation ``asking`` may hear: it names no
        source of others.

        Raises ``StoreUnavailableError``: the store or the database is away; whatever was damaged still is.
        """
        self._tried_at[digest] = self.clock()
        if await self.damages.examine(digest) is None:
            return None
        async with self.database.read() as session:
            needed = await origins.needed(session, digest.hex)
        if needed is None:
            return None  # what it belonged to was collected; the next collection takes what is left of it
        restoring = await self._restore(needed)
        if restoring.missing:
            said = {"chunk": str(digest), "reason": restoring.reason()}
            logger.warning("a damaged chunk cannot be repaired", extra=said)
            async with self.database.read() as session:
                is_told = await damaged.is_given_up(session, digest.hex)
            if not is_told:
                async with self.database.write() as session:
                    await damaged.give_up(session, digest.hex, self.clock())
            return restoring.reason(asking)
        try:
            if digest_of(restoring.buffer) == digest:
                await asyncio.to_thread(self.damages.store.put, digest, restoring.buffer)
            else:
                await self._pack_again(needed, restoring)
        except StoreUnavailableError as error:
            logger.warning("a damaged chunk cannot be replaced", extra={"chunk": str(digest), "error": str(error)})
            await self.damages.examine(digest)  # raises when it is the store that is away
            return str(error)
        await self.damages.heal()
        return await self.damages.reason(digest)

    async def _restore(self, needed: Needed) -> Restoring:
        """A slab as a whole where an agent has it as a whole; otherwise piece by piece, from agents first."""
        restoring = Restoring(bytearray(needed.size), [needed.whole])
        if needed.is_slab:
            await self.agents.bring(restoring)
            if not restoring.missing:
                return restoring
            buffer = bytearray(needed.size)
            buffer[needed.size - len(needed.seal) :] = needed.seal
            restoring = Restoring(buffer, list(needed.pieces))
        await self.agents.bring(restoring)
        await self.upstream.bring(restoring)
        return restoring

    async def _pack_again(self, needed: Needed, restoring: Restoring) -> None:
        """Files went out of the slab since it was packed: those that are left make a new one, for the same readers."""
        placed = closed_up(needed.pieces)
        files = b"".join(restoring.place(piece) for piece, _ in placed)
        slabs = [await self._put_slab(files, scope) for scope in needed.scopes or ()]
        async with self.database.write() as session:
            await mirrors.hold_claims(session)
            if await origins.needed(session, needed.digest.hex) != needed:
                return  # an eviction came between: next time
            await contents.record_slabs(session, slabs)
            for slab in slabs:
                layouts = [FileLayout.packed(piece.content, piece.size, slab, offset) for piece, offset in placed]
                await contents.record_slices(session, layouts)
            await damaged.drop_slab(session, needed.digest.hex, self.clock())
        self.damages.on_repaired()

    async def _put_slab(self, files: bytes, scope: str) -> Slab:
        content = files + seal_of(scope)
        digest = digest_of(content)
        await asyncio.to_thread(self.damages.store.put, digest, memoryview(content))
        return Slab(digest, len(content), scope)


_ALL: Final = Sample(of=1, turn=0)


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
class Keeper:
    """Works in the background. Scrub and verifications together keep the pace.

    Args:
        on_read: counts bytes.
        period_seconds: between the beginnings of two rounds of the scrub; 0 is none.
    """

    database: Database
    damages: Damages
    repair: Repair
    rate_bytes_per_second: int
    on_read: Callable[[int], None]
    period_seconds: float
    clock: Callable[[], float]
    _samples: dict[float, Sample] = field(default_factory=dict)  # by the beginning of the round, the newest alone

    @cached_property
    def _pacer(self) -> Pacer:
        return Pacer(self.rate_bytes_per_second)

    async def keep(self) -> None:
        """Until canceled."""
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
        """A verification of a large store takes hours, for which no repair shall wait; nor it, nor a scrub, for repairs, which may be many."""
        work = self.database.watch.topic(KEEPERS_WORK)
        changes = work.changes
        has_repaired = await self.repair_next()
        has_verified = await self.verify_next()
        has_scrubbed = not has_verified and await self.scrub_next()
        if not (has_repaired or has_verified or has_scrubbed):
            await work.changed(changes, LOOK_SECONDS)

    async def repair_next(self) -> bool:
        """Repair what a scrub or a reader has found, or an earlier attempt could not repair; False when there is nothing."""
        async with self.database.read() as session:
            rows = await damaged.all_damaged(session)
        due = next((digest for row in rows if self.repair.is_due(digest := Digest(row.digest))), None)
        if due is not None:
            await self.repair.run(due)
        return due is not None

    async def scrub_next(self) -> bool:
        """One part of a round, if it is time."""
        async with self.database.read() as session:
            row = await objects.scrub_state(session)
        now = self.clock()
        is_under_way = row is not None and row.cursor is not None
        is_due = is_under_way or is_round_due(row.started_at if row else None, self.period_seconds, now)
        if not is_due or not self.period_seconds:
            return False
        started_at = row.started_at if row and is_under_way else now
        part = await self._read(row.cursor if row else None, None, await self._sample(started_at))
        completed_at = row.completed_at if row else None
        if part.cursor is None:
            completed_at = self.clock()
        async with self.database.write() as session:
            await objects.save_scrub_state(
                session, started_at=started_at, completed_at=completed_at, cursor=part.cursor
            )
        return True

    async def _sample(self, began: float) -> Sample:
        """What the round that began then reads, as large as the store was when this process first had to do with it."""
        if began not in self._samples:
            async with self.database.read() as session:
                _, size = await contents.totals(session)
            self._samples.clear()
            sample = Sample.that_fits(size, self.rate_bytes_per_second, self.period_seconds, began)
            self._samples[began] = sample
            if sample.of > 1:
                logger.info("the scrub reads a part of the store and looks at the rest", extra={"one_in": sample.of})
        return self._samples[began]

    async def verify_next(self) -> bool:
        """One part of the oldest verification that wants the store read; False when nobody waits."""
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
        part = await self._read(sofar.get("cursor"), reach, _ALL)
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
                tell(session, row.id)
        return True

    async def _read(self, cursor: str | None, reach: Reach | None, sample: Sample) -> Part:
        """The next records of the database behind the cursor, or objects of the store, within reach or (None) of everything.

        Records come first: which objects there are, they say.
        """
        if cursor is None:
            await self.damages.check_records()
        if cursor is None or cursor.startswith(("manifest:", "record:")):
            async with self.database.read() as session:
                found, behind = await objects.wrong_records(session, cursor, reach.manifests if reach else None)
            for record, wrong in found:
                await self.damages.tell_record(record, wrong)
            return Part(0, 0, behind, records=tuple(found))
        async with self.database.read() as session:
            wanted = await objects.after(session, cursor, reach, min(_AT_ONCE * sample.of, _LOOKED_AT_ONCE))
        spared = await self._look([one for one in wanted if not sample.has(one.digest)])
        read = [one for one in wanted if one.digest not in spared]
        faults: list[tuple[StoredObject, str]] = []
        for one in read:
            await asyncio.sleep(self._pacer(one.size))
            if fault := await self.damages.examine(one.digest):
                faults.append((one, fault))
            self.on_read(one.size)
        size = sum(one.size for one in read)
        return Part(len(read), size, wanted[-1].cursor if wanted else None, tuple(faults))

    async def _look(self, wanted: Sequence[StoredObject]) -> set[Digest]:
        """Which of these are there with the right size. None where the store cannot tell: they are read, which finds out why."""

        def look() -> set[tuple[Digest, int]]:
            return {(chunk.digest, chunk.size) for chunk in self.damages.store.stored(one.digest for one in wanted)}

        try:
            seen = await asyncio.to_thread(look) if wanted else set()
        except StoreUnavailableError:
            return set()
        return {one.digest for one in wanted if (one.digest, one.size) in seen}

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
            content = (needed.pieces[0].content if needed else digest).hex
            found = await origins.origins(session, content)
            own = next((origin for origin in found if origin.organisation == organisation), None)
            if own is None:
                return item
            paths = await origins.paths(session, own.manifest, [content])
            sources = await mirrors.sources_by_manifest(session, organisation, [own.manifest])
        place = {"manifest": f"b3:{own.manifest}", "sources": sources.get(own.manifest, []), "path": paths.get(content)}
        return item.model_copy(update=place)
