"""What is collected: manifests, contents and chunks that nothing names any more, and slabs that nothing needs.

A manifest of a million files goes in many short transactions, each of a few slabs with what of the manifest lies in them: never
by digest, since neighbours in that order lie in slabs that have nothing in common. The same steps tell what a collection or
an eviction would free, in a session that only reads: manifests that would be gone by then are noted in a table of that
session's own (``doomed``), and slabs in a set.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Self, TypeVarTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    MetaData,
    Row,
    Select,
    String,
    Table,
    and_,
    case,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    true,
    tuple_,
)
from sqlalchemy.orm import InstrumentedAttribute, aliased

from bdn.core.chunk import Digest
from bdn.core.store import KINDS, PUBLIC, Kind, SlabNeeds, StoredChunk, below, content_fault, scope_of, split_digests
from bdn.mirror.db import mirrors
from bdn.mirror.db.contents import Record, chunks_are_sound, drop_slabs
from bdn.mirror.db.database import (
    Database,
    Dialect,
    ReadSession,
    WriteSession,
    batches,
    delete_in,
    dialect_of,
    select_in,
)
from bdn.mirror.db.tables import (
    Base,
    ContentChunkRow,
    ContentRow,
    CopiedChunkRow,
    DamagedChunkRow,
    DamagedContentRow,
    IdentityRow,
    ManifestContentRow,
    ManifestRow,
    MirrorSourceRow,
    QuarantinedFileRow,
    SlabRow,
    SlabScopeRow,
    SlabSliceRow,
)

_RECORDS: Final = 250  # of one trip to a thread
SLABS_AT_ONCE: Final = 4  # slabs of one step, of at most 256 files each
_SLABS_READ_AT_ONCE: Final = 32  # where nothing is written
ROWS_AT_ONCE: Final = 2000  # rows of one step where nothing lies in slabs
_FILES_AT_ONCE: Final = 20  # wrong files: each may have a hundred thousand chunks

_DOOMED: Final = Table("doomed", MetaData(), Column("manifest", String(64), primary_key=True), prefixes=["TEMPORARY"])


@dataclass(frozen=True, slots=True)
class Taken:
    """Rows that went, or would go: raw names of chunks and slabs in them, which others may name, too, and their bytes."""

    count: int
    chunks: AbstractSet[bytes] = frozenset()
    bytes: int = 0


_Name = InstrumentedAttribute[str]  # a column of contents' digests
_Columns = TypeVarTuple("_Columns")
_Which = Callable[[_Name], ColumnElement[bool]]
Dropped = dict[str, Kind]  # slabs that would be gone by now, and as what


@dataclass(frozen=True, slots=True)
class Leaving:
    """Contents that go together: those in ``column`` where ``where`` holds, or in any other column where ``is_own`` holds.

    ``is_gone`` is what goes now, or would be gone by then: no slab has to stay for that. A column and its condition serve to find
    all of them; the others to look at those in few slabs, whatever the number of all.
    """

    column: _Name
    where: ColumnElement[bool]
    is_own: _Which
    is_gone: _Which
    kind: Kind


def leaving_with(manifest: str, *, is_rehearsal: bool) -> Leaving:
    """What no other manifest names; in a rehearsal none but doomed ones, of which this is one."""

    def is_needed(content: _Name) -> ColumnElement[bool]:
        return _named_beside_doomed(content) if is_rehearsal else _named(content, but=manifest)

    def is_own(content: _Name) -> ColumnElement[bool]:
        name = aliased(ManifestContentRow)
        return and_(exists().where(name.manifest == manifest, name.content == content), ~is_needed(content))

    column = ManifestContentRow.content
    where = and_(ManifestContentRow.manifest == manifest, ~is_needed(column))
    return Leaving(column, where, is_own, _is_doomed if is_rehearsal else is_own, "manifests")


def leaving_unnamed(before: float, *, is_rehearsal: bool) -> Leaving:
    """What no manifest names, recorded before then: their mirrors came to no good end.

    A mirror that runs may count on one of them, because its identity is known; then publishing finds that it is gone, and
    it is copied again.
    """

    def is_own(content: _Name) -> ColumnElement[bool]:
        file = aliased(ContentRow)
        return and_(exists().where(file.digest == content, file.recorded_at < before), ~_named(content))

    def is_gone(content: _Name) -> ColumnElement[bool]:
        return or_(is_own(content), _is_doomed(content))

    column = ContentRow.digest
    where = and_(ContentRow.recorded_at < before, ~_named(column))
    return Leaving(column, where, is_own, is_gone if is_rehearsal else is_own, "contents")


def _named(content: _Name, *, but: str | None = None) -> ColumnElement[bool]:
    name = aliased(ManifestContentRow)
    return exists().where(name.content == content, true() if but is None else name.manifest != but)


def _named_beside_doomed(content: _Name) -> ColumnElement[bool]:
    name = aliased(ManifestContentRow)
    return exists().where(name.content == content, ~exists().where(_DOOMED.c.manifest == name.manifest))


def _is_doomed(content: _Name) -> ColumnElement[bool]:
    return and_(_named(content), ~_named_beside_doomed(content))


@dataclass(frozen=True, slots=True)
class Going:
    """Contents of one step, and the slabs, with their bytes, that nobody needs without them."""

    contents: list[str]
    slabs: dict[str, int] = field(default_factory=dict)


async def slabs_of(session: ReadSession, leaving: Leaving) -> list[str]:
    """Every slab, of whatever scope, that holds one of the contents."""
    query = select(SlabSliceRow.slab).distinct().join(leaving.column.class_, leaving.column == SlabSliceRow.content)
    return sorted((await session.execute(query.where(leaving.where))).scalars())


async def in_slabs(session: ReadSession, leaving: Leaving, slabs: Sequence[str], dropped: Dropped) -> Going:
    """What goes of these slabs, a few of ``slabs_of``. In a rehearsal ``dropped`` gets the slabs of this step, too."""
    own = select(SlabSliceRow.content).where(leaving.is_own(SlabSliceRow.content))
    contents = sorted({content async for (content,) in select_in(session, own, SlabSliceRow.slab, slabs)})
    # Other slabs that hold one of them are looked at now: later nothing would lead to them.
    other = aliased(SlabSliceRow)
    query = select(other.slab).distinct().join(SlabSliceRow, SlabSliceRow.content == other.content)
    query = query.where(leaving.is_own(SlabSliceRow.content))
    touched = {slab async for (slab,) in select_in(session, query, SlabSliceRow.slab, slabs)} - dropped.keys()
    needs = SlabNeeds()
    await _add_slabs(session, needs, sorted(touched), dropped.keys())
    query = select(SlabSliceRow.content).where(leaving.is_gone(SlabSliceRow.content))
    gone = {content async for (content,) in select_in(session, query, SlabSliceRow.slab, sorted(touched))}
    going = needs.take(gone)
    dropped.update(dict.fromkeys(going, leaving.kind))
    return Going(contents, {slab: needs.size([slab]) for slab in going})


async def beside_slabs(session: ReadSession, leaving: Leaving, after: str) -> Going:
    """The next contents, in the order of their digests, that lie in no slab."""
    in_none = ~exists().where(SlabSliceRow.content == leaving.column)
    query = select(leaving.column).where(leaving.where, in_none, leaving.column > after)
    return Going(list((await session.execute(query.order_by(leaving.column).limit(ROWS_AT_ONCE))).scalars()))


async def objects_of(session: ReadSession, going: Going) -> Taken:
    """The chunks and slabs that lose a name with these contents, and their bytes."""
    chunks = set(map(bytes.fromhex, going.slabs))
    size = sum(going.slabs.values())
    query = select(ContentRow.chunks, ContentRow.size).where(ContentRow.chunks != b"")
    async for raw, content_size in select_in(session, query, ContentRow.digest, going.contents):
        chunks.update(split_digests(raw[: len(raw) - len(raw) % 32]))  # a damaged record may end in half a name
        size += content_size
    return Taken(len(going.contents), chunks, size)


async def forget(session: WriteSession, going: Going) -> None:
    """Forget contents, with what names them, the identities that led to them, and the slabs that nothing else needs."""
    for column in (
        ManifestContentRow.content,
        SlabSliceRow.content,
        IdentityRow.content,
        ContentChunkRow.content,
        ContentRow.digest,
    ):
        await delete_in(session, column, going.contents)
    await drop_slabs(session, list(going.slabs))


async def forget_names(session: WriteSession, manifest: str) -> bool:
    """Forget some of what a manifest names, which others name, too; False when nothing is left, and then the manifest itself."""
    query = select(ManifestContentRow.content).where(ManifestContentRow.manifest == manifest).limit(ROWS_AT_ONCE)
    names = list((await session.execute(query)).scalars())
    for batch in batches(names):
        statement = delete(ManifestContentRow).where(
            ManifestContentRow.manifest == manifest, ManifestContentRow.content.in_(batch)
        )
        await session.execute(statement)
    if not names:
        await session.execute(delete(ManifestRow).where(ManifestRow.digest == manifest))
    return bool(names)


async def _add_slabs(session: ReadSession, needs: SlabNeeds, slabs: Sequence[str], dropped: AbstractSet[str]) -> None:
    """Tell ``needs`` everything about these slabs, and about where else their contents lie: not in what was dropped."""
    other = aliased(SlabSliceRow)
    named = set(slabs)
    async for slab, size in select_in(session, select(SlabRow.digest, SlabRow.size), SlabRow.digest, slabs):
        needs.add_slab(slab, size)
    slices = select(SlabSliceRow.content, SlabSliceRow.slab).join(other, other.content == SlabSliceRow.content)
    async for content, slab in select_in(session, slices, other.slab, slabs):
        needs.add_slice(content, slab)
        named.add(slab)
    whole = select(ContentRow.digest).join(SlabSliceRow, SlabSliceRow.content == ContentRow.digest)
    whole = whole.where(ContentRow.chunks != b"", chunks_are_sound())
    async for (content,) in select_in(session, whole, SlabSliceRow.slab, slabs):
        needs.add_whole(content)
    scopes = select(SlabScopeRow.slab, SlabScopeRow.scope)
    async for slab, scope in select_in(session, scopes, SlabScopeRow.slab, sorted(named)):
        needs.add_scope(slab, scope)
    damaged = select(DamagedChunkRow.digest)
    async for (slab,) in select_in(session, damaged, DamagedChunkRow.digest, sorted(named)):
        needs.add_damaged(slab)
    for slab in named & dropped:
        needs.add_damaged(slab)


# --- slabs that their organisations no longer read ---


async def unread_slabs(
    session: ReadSession, before: float, now: float, *, is_rehearsal: bool, among: Sequence[str] | None = None
) -> dict[str, int]:
    """Slabs, with their bytes, of which no organisation that may read them reads a file, or can have one back.

    Such a slab outlives its organisation's manifest where others have the same files elsewhere: they mirror the manifest while it is
    collected, or a mirror of that organisation fails. These stay: what a mirror may count on, which is at work or came to no good
    end since ``before``; slabs of files that no manifest names, but somebody recorded since then; slabs of files that are
    damaged elsewhere.

    Args:
        among: some slabs; None is all.
    """
    query = select(SlabRow.digest, SlabRow.size).where(
        ~exists().where(
            SlabScopeRow.slab == SlabRow.digest,
            _is_used(dialect_of(session), before, now, is_rehearsal=is_rehearsal),
        ),
        ~exists(select(SlabSliceRow.slab).where(SlabSliceRow.slab == SlabRow.digest, _is_kept(before))),
    )
    if among is not None:
        return {slab: size async for slab, size in select_in(session, query, SlabRow.digest, among)}
    found: dict[str, int] = {}
    after = ""
    while page := (await session.execute(_page_of_slabs(after))).scalars().all():
        found |= {slab: size async for slab, size in select_in(session, query, SlabRow.digest, page)}
        after = page[-1]
    return found


def _owner(dialect: Dialect) -> ColumnElement[str]:
    """The organisation of the ``SlabScopeRow``, whose team may follow behind a colon."""
    reader = func.substr(SlabScopeRow.scope, len(scope_of("")) + 1)
    find = func.strpos if dialect == "postgresql" else func.instr
    return func.substr(reader, 1, find(reader.concat(below("")), below("")) - 1)


def _is_used(dialect: Dialect, before: float, now: float, *, is_rehearsal: bool) -> ColumnElement[bool]:
    """The ``SlabScopeRow``'s organisation reads a file of the slab, or may be about to.

    Each condition lies in the one before: joined, SQLite begins with all files of the organisation.
    """
    name, source = ManifestContentRow, MirrorSourceRow
    owner = _owner(dialect)
    mirrored = exists().where(
        source.organisation == owner, source.manifest == name.manifest, ~mirrors.is_lost_to(source)
    )
    read = exists().where(name.content == SlabSliceRow.content, mirrored.correlate(SlabScopeRow, name))
    if is_rehearsal:
        read = read.where(~exists().where(_DOOMED.c.manifest == name.manifest))
    inside = exists().where(SlabSliceRow.slab == SlabScopeRow.slab, read.correlate(SlabScopeRow, SlabSliceRow))
    return or_(SlabScopeRow.scope == PUBLIC, inside, mirrors.may_count_on_copies(owner, before, now))


def _is_kept(before: float) -> ColumnElement[bool]:
    """The ``SlabSliceRow``'s content needs the slab, whoever reads it."""
    content, other = SlabSliceRow.content, aliased(SlabSliceRow)
    fresh = exists().where(ContentRow.digest == content, ContentRow.recorded_at >= before, ~_named(ContentRow.digest))
    damaged = exists().where(other.content == content, other.slab == DamagedChunkRow.digest)
    return or_(fresh, damaged, exists().where(DamagedContentRow.content == content))


def _page_of_slabs(after: str) -> Select[str]:
    return select(SlabRow.digest).where(SlabRow.digest > after).order_by(SlabRow.digest).limit(ROWS_AT_ONCE)


# --- what is old ---


async def take_half_copied(session: WriteSession, before: float) -> Taken:
    """Forget some chunks of files that nobody went on with since then; none: no more are left."""
    key = (CopiedChunkRow.identity, CopiedChunkRow.chunk_index)
    some = select(*key).where(CopiedChunkRow.recorded_at < before).limit(ROWS_AT_ONCE)
    statement = delete(CopiedChunkRow).where(tuple_(*key).in_(some)).returning(CopiedChunkRow.digest)
    found = list((await session.execute(statement)).scalars())
    return Taken(len(found), set(map(bytes.fromhex, found)))


async def take_evidence(session: WriteSession, before: float) -> Taken:
    """Forget some files that came wrong before then; none: no more are left."""
    some = select(QuarantinedFileRow.id).where(QuarantinedFileRow.created_at < before).limit(_FILES_AT_ONCE)
    statement = delete(QuarantinedFileRow).where(QuarantinedFileRow.id.in_(some)).returning(QuarantinedFileRow.chunks)
    found = list((await session.execute(statement)).scalars())
    return Taken(len(found), {chunk for raw in found for chunk in split_digests(raw)})


# --- what only looks ---


@dataclass
class Rehearsal:
    """A session that only reads, and what would be gone by now: manifests in a table of its own, slabs in ``dropped``.

    What is old: contents without a name and half-copied files from before ``before``, wrong files from before ``evidence_before``.
    """

    session: ReadSession
    doomed: set[str] = field(default_factory=set)
    dropped: Dropped = field(default_factory=dict)
    before: float = 0.0
    evidence_before: float = 0.0

    async def doom(self, *manifests: str) -> None:
        """The manifests would be gone."""
        self.doomed.update(manifests)
        if manifests:
            await self.session.execute(insert(_DOOMED), [{"manifest": manifest} for manifest in manifests])

    async def spare(self, manifest: str) -> None:
        """It would not."""
        self.doomed.discard(manifest)
        await self.session.execute(delete(_DOOMED).where(_DOOMED.c.manifest == manifest))

    async def doom_dead(self, but: Sequence[str]) -> None:
        """All that nobody may read would be gone, but for some of which it is asked."""
        dead = (await self.session.execute(mirrors.dead_manifests())).scalars()
        await self.doom(*set(dead).difference(but))

    async def freed(self, manifest: str, *, is_kept: bool) -> int:
        """The bytes that go with one manifest more, if nobody else needs them; one that ``is_kept`` does not go.

        A content's own bytes are freed with the last manifest that names it, a slab's when the last content goes that needs
        it. So the last of several manifests that share a slab frees all of it, and the others nothing.
        """
        await self.doom(manifest)
        leaving = leaving_with(manifest, is_rehearsal=True)
        dropped = dict(self.dropped) if is_kept else self.dropped
        whole = select(func.coalesce(func.sum(ContentRow.size), 0)).where(ContentRow.chunks != b"")
        names = whole.join(ManifestContentRow, ManifestContentRow.content == ContentRow.digest)
        freed = int((await self.session.execute(names.where(leaving.where))).scalar_one())
        for batch in batches(await slabs_of(self.session, leaving), _SLABS_READ_AT_ONCE):
            freed += sum((await in_slabs(self.session, leaving, batch, dropped)).slabs.values())
        if is_kept:
            await self.spare(manifest)
        return freed

    async def unnamed(self) -> int:
        """How many old contents no manifest names."""
        return await self._count(ContentRow, leaving_unnamed(self.before, is_rehearsal=True).where)

    async def half_copied(self) -> int:
        """How many ``take_half_copied`` takes."""
        return await self._count(CopiedChunkRow, CopiedChunkRow.recorded_at < self.before)

    async def evidence(self) -> int:
        """How many ``take_evidence`` takes."""
        return await self._count(QuarantinedFileRow, QuarantinedFileRow.created_at < self.evidence_before)

    async def _count(self, table: type[Base], where: ColumnElement[bool]) -> int:
        query = select(func.count()).select_from(table).where(where)
        return (await self.session.execute(query)).scalar_one()


@asynccontextmanager
async def rehearsal(database: Database, sofar: Rehearsal | None = None) -> AsyncIterator[Rehearsal]:
    """Nothing is doomed yet, or what was ``sofar``. Nobody waits for the session, however long it lives, and nothing of it stays."""
    async with database.read(patient=True) as session:
        connection = await session.connection()
        await connection.run_sync(_DOOMED.create)
        found = Rehearsal(session) if sofar is None else replace(sofar, session=session)
        await found.doom(*found.doomed)
        yield found


# --- which chunks no row names ---


@dataclass
class Unnamed:
    """Chunks of the store that were looked at before the rows: those that no row names, once ``strike_named`` is through.

    ``going`` are those of them which rows name that would go, and as what these go. Not all names of a store are held at once:
    100 TB have twelve million.
    """

    left: dict[bytes, StoredChunk]
    going: dict[bytes, Kind] = field(default_factory=dict)

    @classmethod
    def among(cls, chunks: Iterable[StoredChunk]) -> Self:
        """No row was looked at yet."""
        return cls({chunk.digest.to_bytes(): chunk for chunk in chunks})

    def strike(self, raw: bytes, kind: Kind | None) -> None:
        """A row has these raw names, one after the other. It stays, or would go as ``kind``."""
        found = filter(self.left.__contains__, split_digests(raw))
        if kind is None:
            for name in set(found):
                del self.left[name]
        else:
            for name in found:
                self.going[name] = min(kind, self.going.get(name, kind), key=KINDS.index)


async def check_records(session: ReadSession, sofar: Rehearsal | None) -> None:
    """Raise ``RecordDamagedError`` for a file's record that is wrong: nobody can tell which chunks it names."""
    await _look_at(session, _files(sofar), _check_files)


async def strike_named(session: ReadSession, unnamed: Unnamed, sofar: Rehearsal | None) -> None:
    """Look at every row that names objects of the store. In a rehearsal some of them would be gone.

    What a chunk's row becomes is read after that row: a half-copied file's chunk is a complete file's, or evidence, later.
    """
    before, evidence_before = (sofar.before, sofar.evidence_before) if sofar else (0.0, 0.0)
    dropped = sofar.dropped if sofar else {}

    def copied(rows: Sequence[Row[str, float]]) -> None:
        for digest, recorded_at in rows:
            unnamed.strike(bytes.fromhex(digest), "half_copied" if recorded_at < before else None)

    def slabs(rows: Sequence[Row[str]]) -> None:
        for (digest,) in rows:
            unnamed.strike(bytes.fromhex(digest), dropped.get(digest))

    def files(rows: Sequence[_File]) -> None:
        _check_files(rows)
        for _, _, raw, kind in rows:
            unnamed.strike(raw[: len(raw) - len(raw) % 32], kind)  # a damaged record may end in half a name

    def evidence(rows: Sequence[Row[bytes, float]]) -> None:
        for raw, created_at in rows:
            unnamed.strike(raw, "evidence" if created_at < evidence_before else None)

    await _look_at(session, select(CopiedChunkRow.digest, CopiedChunkRow.recorded_at), copied)
    await _look_at(session, select(SlabRow.digest), slabs)
    await _look_at(session, _files(sofar).where(ContentRow.chunks != b""), files)
    await _look_at(session, select(QuarantinedFileRow.chunks, QuarantinedFileRow.created_at), evidence)


_File = Row[str, int, bytes, Kind | None]


def _files(sofar: Rehearsal | None) -> Select[str, int, bytes, Kind | None]:
    """Digest, size and raw chunks of every file, and as what it would go."""
    kind: ColumnElement[Kind | None] = literal(None, String)
    if sofar is not None:
        of_manifests, unnamed = _is_doomed(ContentRow.digest), leaving_unnamed(sofar.before, is_rehearsal=True).where
        kind = case((of_manifests, literal("manifests")), (unnamed, literal("contents")))
    return select(ContentRow.digest, ContentRow.size, ContentRow.chunks, kind)


def _check_files(rows: Sequence[_File]) -> None:
    for digest, size, raw, kind in rows:
        if kind is None and (fault := content_fault(Digest(digest), size, raw)):
            raise Record("content", Digest(digest)).damaged(fault)


async def _look_at(
    session: ReadSession, query: Select[*_Columns], look: Callable[[Sequence[Row[*_Columns]]], None]
) -> None:
    """In a thread, a few rows at a time: one of a large file has megabytes of names."""
    found = await session.stream(query.execution_options(yield_per=_RECORDS))
    async for rows in found.partitions():
        await asyncio.to_thread(look, rows)
