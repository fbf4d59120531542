"""What the store holds, where it lies, and what of it is damaged: contents, slabs, manifests, identities, half-copied files.

A packed content may lie in several slabs. Organisation A mirrors a private file, and it rests in A's slab; B mirrors the same
bytes from elsewhere. If B's layout pointed into A's slab, B's grant would let B read A's neighbouring files. So a layout uses
slabs of scope ``public`` and of its reader's scope only, and B's copy made a slab of B's. A *reader* is an organisation, which
also reads the slabs of its teams, or a team of it: see ``reader_of``.

A content of which a chunk is damaged counts as half-copied, for every identity that leads to it: whoever mirrors it next
fetches that chunk alone. A content in a damaged slab counts as missing, unless another slab or its own chunks serve.

A record that does not fit the name which proves it is refused, and never written again.

How damage is registered is in ``damaged``, what is collected in ``removal``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple, cast

from sqlalchemy import (
    ColumnElement,
    Executable,
    Float,
    Row,
    and_,
    case,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    union,
    update,
)

from bdn.core.chunk import Digest, FileLayout, ManifestDocument, Slab, Slice
from bdn.core.errors import StoreUnavailableError
from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.store import PUBLIC, below, content_fault, organisation_of, scope_of, split_digests, team_of
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import (
    Database,
    Dialect,
    ReadSession,
    Values,
    WriteSession,
    batches,
    delete_in,
    dialect_of,
    insert,
    insert_new,
    select_in,
)
from bdn.mirror.db.recall import USE_SECONDS
from bdn.mirror.db.tables import (
    ContentChunkRow,
    ContentRow,
    CopiedChunkRow,
    DamagedChunkRow,
    DamagedContentRow,
    DraftRow,
    IdentityRow,
    ManifestContentRow,
    ManifestRow,
    ManifestUseRow,
    SlabRow,
    SlabScopeRow,
    SlabSliceRow,
)


@dataclass(frozen=True, slots=True)
class Record:
    """The canonical bytes of a manifest, or size and chunks of a file."""

    kind: Literal["manifest", "content"]
    digest: Digest

    def __str__(self) -> str:
        return f"the record of {self.kind} {self.digest}"

    def damaged(self, fault: str) -> RecordDamagedError:
        """The error of whoever reads it."""
        return RecordDamagedError(fault, self.kind, str(self.digest))


class RecordDamagedError(StoreUnavailableError):
    """The store is there, and what the database says of this is wrong."""

    kind: str
    digest: str

    @property
    def record(self) -> Record:
        """Which one."""
        return Record("manifest" if self.kind == "manifest" else "content", Digest.parse(self.digest))

    def __str__(self) -> str:
        return (
            f"the record of {self.kind} {self.digest} is damaged in the mirror's database ({self.reason}): it is not served, and no "
            "chunk is collected while nobody can tell which chunks it needs; restore the database from a backup, or evict what it "
            "belongs to from the mirror, collect, and mirror that again; 'bdn-admin verify' lists all such records"
        )


def check_contents(contents: Sequence[Row[str, int, bytes]]) -> None:
    """Raise ``RecordDamagedError`` for the first of these rows (digest, size, chunks) that is wrong."""
    for record, fault in content_faults(contents):
        raise record.damaged(fault)


def content_faults(contents: Sequence[Row[str, int, bytes]]) -> list[tuple[Record, str]]:
    """The wrong ones among these rows, and what is wrong."""
    return [
        (Record("content", Digest(digest)), fault)
        for digest, size, chunks in contents
        if (fault := content_fault(Digest(digest), size, chunks))
    ]


async def known(session: ReadSession, identity_keys: Sequence[str]) -> dict[str, Digest]:
    """Content by identity key, for the identities that the store holds completely."""
    query = select(IdentityRow.key, IdentityRow.content)
    found = select_in(session, query, IdentityRow.key, identity_keys)
    return {key: Digest(content) async for key, content in found}


async def layout_by_identity(session: ReadSession, identity: Identity) -> FileLayout | None:
    """The content that an identity maps to, when the store holds it completely; of several slabs, one of its scope."""
    query = (
        select(ContentRow.digest, ContentRow.size, ContentRow.chunks, SlabRow, SlabSliceRow.offset)
        .join(IdentityRow, IdentityRow.content == ContentRow.digest)
        .outerjoin(
            SlabSliceRow,
            and_(
                SlabSliceRow.content == ContentRow.digest,
                ContentRow.chunks == b"",
                is_of(identity.scope),
                slab_is_sound(),
            ),
        )
        .outerjoin(SlabRow, SlabRow.digest == SlabSliceRow.slab)
        .where(IdentityRow.key == identity.key, chunks_are_sound())
        .order_by(SlabRow.digest)
        .limit(1)
    )
    row = (await session.execute(query)).one_or_none()
    if row is None:
        return None
    digest, size, raw, _, offset = row
    slab = cast("SlabRow | None", row[3])
    if slab is None and size and not raw:
        return None  # it rests where this scope may not look
    if slab is None:
        return FileLayout(Digest(digest), size, tuple(map(Digest.from_bytes, split_digests(raw))))
    return FileLayout(Digest(digest), size, (Digest(digest),), Slice(Digest(slab.digest), slab.size, offset))


async def layout_of(session: ReadSession, content: str, reader: str) -> FileLayout | None:
    """The undamaged location of a content for this reader: its own chunks, or a slice of a slab of its scope."""
    whole = select(ContentRow.size, ContentRow.chunks).where(ContentRow.digest == content, chunks_are_sound())
    row = (await session.execute(whole)).one_or_none()
    if row is not None and (row[1] or not row[0]):
        return FileLayout(Digest(content), row[0], tuple(map(Digest.from_bytes, split_digests(row[1]))))
    packed = (
        select(ContentRow.size, SlabRow.digest, SlabRow.size, SlabSliceRow.offset)
        .join(SlabSliceRow, SlabSliceRow.content == ContentRow.digest)
        .join(SlabRow, SlabRow.digest == SlabSliceRow.slab)
        .where(ContentRow.digest == content, is_read_by(reader), slab_is_sound())
        .order_by(SlabRow.digest)
        .limit(1)
    )
    found = (await session.execute(packed)).one_or_none()
    if found is None:
        return None
    size, slab, slab_size, offset = found
    return FileLayout(Digest(content), size, (Digest(content),), Slice(Digest(slab), slab_size, offset))


async def half_copied(session: ReadSession, identity_keys: Sequence[str]) -> dict[str, dict[int, Digest]]:
    """Chunks of half-copied files that are durable in the store: by identity key, then by index."""
    found = await _sound_chunks(session, identity_keys)
    query = select(CopiedChunkRow.identity, CopiedChunkRow.chunk_index, CopiedChunkRow.digest)
    async for key, index, digest in select_in(session, query, CopiedChunkRow.identity, identity_keys):
        found.setdefault(key, {})[index] = Digest(digest)
    return found


async def record_chunks(session: WriteSession, chunks: Iterable[tuple[str, int, Digest]], now: float) -> None:
    """Remember durable chunks (identity key, index, digest) of files that are being copied."""
    rows = [
        {"identity": key, "chunk_index": index, "digest": digest.hex, "recorded_at": now}
        for key, index, digest in chunks
    ]
    await insert_new(session, CopiedChunkRow, rows)


async def renew_chunks(session: WriteSession, identity_key: str, now: float) -> None:
    """A half-copied file is gone on with: the record of its chunks is as good as new."""
    await session.execute(update(CopiedChunkRow).where(CopiedChunkRow.identity == identity_key).values(recorded_at=now))


async def forget_chunks(session: WriteSession, identity_keys: Sequence[str]) -> None:
    """Drop the record of half-copied files: they are complete, or were wrong."""
    await delete_in(session, CopiedChunkRow.identity, identity_keys)


async def record_slabs(session: WriteSession, slabs: Iterable[Slab]) -> None:
    """Slabs that the store holds, durably. Their slices come with ``record_contents``, in the same transaction."""
    found = list(slabs)
    sizes = {slab.digest.hex: slab.size for slab in found}
    await insert_new(session, SlabRow, [{"digest": digest, "size": size} for digest, size in sizes.items()])
    scopes = {(slab.digest.hex, slab.scope) for slab in found}
    await insert_new(session, SlabScopeRow, [{"slab": digest, "scope": scope} for digest, scope in scopes])


async def drop_slabs(session: WriteSession, slabs: Sequence[str]) -> None:
    """Nothing lies in them any more."""
    for column in (SlabSliceRow.slab, SlabScopeRow.slab, SlabRow.digest):
        await delete_in(session, column, slabs)


@cache
def _insert_contents(dialect: Dialect) -> Executable:
    fresh = insert(dialect, ContentRow)
    return fresh.on_conflict_do_update(
        index_elements=[ContentRow.digest],
        set_={
            "chunks": case((ContentRow.chunks == b"", fresh.excluded.chunks), else_=ContentRow.chunks),
            "recorded_at": case(
                (ContentRow.recorded_at < fresh.excluded.recorded_at, fresh.excluded.recorded_at),
                else_=ContentRow.recorded_at,  # another process recorded it later
            ),
        },
    )


@cache
def _insert_identities(dialect: Dialect) -> Executable:
    newer = insert(dialect, IdentityRow)
    return newer.on_conflict_do_update(
        index_elements=[IdentityRow.key],
        set_={"content": newer.excluded.content},
        where=IdentityRow.content != newer.excluded.content,
    )


async def record_contents(session: WriteSession, contents: Mapping[str, FileLayout], now: float) -> None:
    """Complete files by identity key: the store holds every chunk, or the slab, durably.

    A content that is known already gets what is new about it: its chunks, or a further slice, and when it was recorded; an identity
    that led elsewhere leads to what came last. So whatever scope an identity is of, its content is whole by itself or has a slice in a slab of that scope,
    until that slab is collected because its organisation reads nothing of it.
    """
    whole = [layout for layout in contents.values() if not layout.slice]
    packed = [layout for layout in contents.values() if layout.slice]
    rows = {
        layout.digest.hex: {
            "digest": layout.digest.hex,
            "size": layout.size,
            "chunks": b"" if layout.slice else b"".join(chunk.to_bytes() for chunk in layout.chunks),
            "recorded_at": now,
        }
        for layout in (*packed, *whole)
    }
    dialect = dialect_of(session)
    await insert_new(session, ContentRow, list(rows.values()), _insert_contents(dialect))
    await insert_new(session, ContentChunkRow, [row for layout in whole for row in _chunk_rows(layout)])
    await record_slices(session, packed)
    identities = [{"key": key, "content": layout.digest.hex} for key, layout in contents.items()]
    await insert_new(session, IdentityRow, identities, _insert_identities(dialect))
    await _note_damage(session, whole)


def _chunk_rows(layout: FileLayout) -> list[Values]:
    names = {chunk.hex for chunk in layout.chunks} if len(layout.chunks) > 1 else set()
    return [{"content": layout.digest.hex, "chunk": name} for name in names]


async def record_slices(session: WriteSession, layouts: Iterable[FileLayout]) -> None:
    """Where contents lie in slabs that are recorded already; those with chunks of their own are passed over."""
    slices = [
        {"content": layout.digest.hex, "slab": layout.slice.slab.hex, "offset": layout.slice.offset}
        for layout in layouts
        if layout.slice
    ]
    await insert_new(session, SlabSliceRow, slices)


@dataclass(frozen=True, slots=True)
class Draft:
    """A manifest on its way to be published, in transactions of ``NAMES_AT_ONCE`` rows: as one, those of a million files take a minute.

    Until ``publish`` nobody can read it. Several may write one draft at once, and it is the same. What is left of one is gone
    on with, or collected: not beside a mirror at work that began earlier. ``created_at`` tells whether it was collected
    meanwhile, or was to be.
    """

    manifest: str
    created_at: float
    is_published: (
        bool  # already, maybe for others: then all that is left is to see whether this organisation can read it
    )


NAMES_AT_ONCE: Final = 2000


async def draft(session: WriteSession, document: ManifestDocument, now: float) -> Draft:
    """Begin to write a manifest, or go on with it."""
    name = document.digest.hex
    found = await _state(session, name)
    if found is not None:
        if found.renewed_at == mirrors.COLLECTED:
            # A has written its names; a collection takes some away; B writes them anew; A must not publish before B has.
            await session.execute(update(ManifestRow).where(ManifestRow.digest == name).values(created_at=now))
        await session.execute(update(DraftRow).where(DraftRow.manifest == name).values(renewed_at=now))
        created_at = now if found.renewed_at == mirrors.COLLECTED else found.created_at
        return Draft(name, created_at, is_published=found.renewed_at is None)
    row = {
        "digest": name,
        "canonical": document.canonical,
        "files_total": document.files_total,
        "bytes_total": document.bytes_total,
        "created_at": now,
        "last_used": now,
    }
    await insert_new(session, ManifestRow, [row])
    await insert_new(session, DraftRow, [{"manifest": name, "renewed_at": now}])
    return Draft(name, now, is_published=False)


async def add_names(session: WriteSession, draft: Draft, names: Sequence[str], reader: str) -> list[Digest]:
    """Write which contents a draft names. What is named is not collected from then on.

    Returns the contents that the store lacks, or holds only in slabs that this reader may not read; then nothing was
    changed.
    """
    lost = await unreadable(session, names, scope_of(reader))
    if not lost and not draft.is_published:
        await insert_new(session, ManifestContentRow, [{"manifest": draft.manifest, "content": name} for name in names])
    return [Digest(name) for name in lost]


async def publish(session: WriteSession, draft: Draft, now: float, reader: str) -> bool:
    """Make a manifest, of which all names were added, readable for this reader, also when its organisation gave it up earlier.

    False when it was collected meanwhile, or some of it was found damaged; then nothing was done.
    """
    found = await _state(session, draft.manifest)
    if found is None or found.created_at != draft.created_at or found.renewed_at == mirrors.COLLECTED:
        return False
    if await unreadable(session, await _damaged(session, draft.manifest), scope_of(reader)):
        return False
    await session.execute(delete(DraftRow).where(DraftRow.manifest == draft.manifest))
    await mirrors.lift_tombstone(session, organisation_of(reader), draft.manifest)
    if draft.is_published:
        await touch(session, [draft.manifest], now)
    return True


class _State(NamedTuple):
    created_at: float
    renewed_at: float | None  # of its draft, if it is one


async def _state(session: ReadSession, manifest: str) -> _State | None:
    query = select(ManifestRow.created_at, DraftRow.renewed_at).outerjoin(DraftRow)
    row = (await session.execute(query.where(ManifestRow.digest == manifest))).one_or_none()
    return None if row is None else _State(row[0], row[1])


async def _damaged(session: ReadSession, manifest: str) -> list[str]:
    """Contents of the manifest that a damaged object holds."""
    if not await is_any_damaged(session):
        return []
    chunks = select(ManifestContentRow.content).join(
        DamagedContentRow, DamagedContentRow.content == ManifestContentRow.content
    )
    slabs = (
        select(ManifestContentRow.content)
        .join(SlabSliceRow, SlabSliceRow.content == ManifestContentRow.content)
        .join(DamagedChunkRow, DamagedChunkRow.digest == SlabSliceRow.slab)
    )
    found = [await session.execute(query.where(ManifestContentRow.manifest == manifest)) for query in (chunks, slabs)]
    return sorted({name for rows in found for name in rows.scalars()})


async def manifest(session: ReadSession, digest: str) -> ManifestRow | None:
    """A published manifest."""
    return await session.get(ManifestRow, digest)


async def files_total(session: ReadSession, digest: str) -> int | None:
    """How many files a published manifest has; None where there is none."""
    return (await session.execute(select(ManifestRow.files_total).where(ManifestRow.digest == digest))).scalar()


async def touch(session: WriteSession, digests: Sequence[str], now: float) -> None:
    """Those of these manifests that are here are used now."""
    here = select(ManifestRow.digest, literal(now, Float)).where(ManifestRow.digest.in_(digests))
    noted = insert(dialect_of(session), ManifestUseRow).from_select(
        ["manifest", "last_used"], here.order_by(ManifestRow.digest)
    )
    await session.execute(
        noted.on_conflict_do_update(
            index_elements=["manifest"],
            set_={"last_used": now},
            where=ManifestUseRow.last_used <= now - USE_SECONDS,
        )
    )


async def note_use(database: Database, digest: str, now: float) -> None:
    """A published manifest is used now. As ``touch``; and where nothing is to be noted, nothing is written, and no writer waited for."""
    async with database.read() as session:
        query = select(ManifestUseRow.last_used).where(ManifestUseRow.manifest == digest)
        last_used = (await session.execute(query)).scalar()
    if last_used is None or last_used <= now - USE_SECONDS:
        async with database.write() as session:
            await touch(session, [digest], now)


async def totals(session: ReadSession) -> tuple[int, int]:
    """How many distinct contents the store holds, and their bytes."""
    query = select(func.count(), func.coalesce(func.sum(ContentRow.size), 0)).select_from(ContentRow)
    count, size = (await session.execute(query)).one()
    return int(count), int(size)


class ContentLayout(NamedTuple):
    """One content of a manifest: raw chunk digests, or else the slab that holds it. Digests are hex; a million of these."""

    digest: str
    size: int
    chunks: bytes
    slab: str | None = None
    slab_size: int = 0
    offset: int = 0


LAYOUTS_AT_ONCE: Final = 10_000


async def layouts(session: ReadSession, manifest: str, reader: str) -> AsyncIterator[list[ContentLayout]]:
    """Every distinct content of a manifest, by digest, page by page. ``RecordDamagedError`` where the database has it wrong.

    Of several slabs, a content's is the one that serves most of the manifest: an agent fetches slabs as a whole. What no
    slab of this reader holds is left out; ``publish`` sees to it that there is none.
    """
    packed = (
        select(SlabSliceRow.content, SlabSliceRow.slab, SlabRow.size, SlabSliceRow.offset, slab_is_sound())
        .join(ManifestContentRow, ManifestContentRow.content == SlabSliceRow.content)
        .join(ContentRow, ContentRow.digest == SlabSliceRow.content)
        .join(SlabRow, SlabRow.digest == SlabSliceRow.slab)
        .where(ManifestContentRow.manifest == manifest, ContentRow.chunks == b"", is_read_by(reader))
    )
    counted = packed.with_only_columns(SlabSliceRow.slab, func.count(), maintain_column_froms=True)
    used = {slab: count for slab, count in (await session.execute(counted.group_by(SlabSliceRow.slab))).all()}  # noqa: C416 - rows are not pairs
    query = (
        select(ContentRow.digest, ContentRow.size, ContentRow.chunks)
        .join(ManifestContentRow, ManifestContentRow.content == ContentRow.digest)
        .where(ManifestContentRow.manifest == manifest)
        .order_by(ManifestContentRow.content)
        .limit(LAYOUTS_AT_ONCE)
    )
    name, after = ManifestContentRow.content, ""
    while rows := (await session.execute(query.where(name > after))).all():
        last = rows[-1][0]
        slices = (await session.execute(packed.where(name > after, name <= last))).all()
        # In a thread: with a million files it takes seconds.
        yield await asyncio.to_thread(_together, rows, slices, used)
        after = last


def _together(
    contents: Sequence[Row[str, int, bytes]],
    slices: Sequence[Row[str, str, int, int, bool]],
    used: Mapping[str, int],
) -> list[ContentLayout]:
    best = _best(slices, used)
    check_contents(contents)
    found = (ContentLayout(digest, size, chunks, *best.get(digest, ())) for digest, size, chunks in contents)
    return [one for one in found if one.chunks or one.slab or not one.size]


def _best(slices: Sequence[Row[str, str, int, int, bool]], used: Mapping[str, int]) -> dict[str, tuple[str, int, int]]:
    """Slab, its size and the offset by content: a sound slab, of these the one with the most contents, then by digest."""
    damaged = {slab for _, slab, _, _, is_sound in slices if not is_sound}

    def rank(slab: str) -> tuple[bool, int, str]:
        return slab in damaged, -used.get(slab, 0), slab

    found: dict[str, tuple[str, int, int]] = {}
    for content, slab, size, offset, _ in slices:
        rival = found.get(content)
        if rival is None or rank(slab) < rank(rival[0]):
            found[content] = (slab, size, offset)
    return found


async def objects(session: ReadSession, manifest: str, reader: str) -> frozenset[bytes]:
    """The raw names of the store's objects that a grant for the manifest opens: chunks, and slabs as a whole."""
    named = select(ManifestContentRow.content).where(ManifestContentRow.manifest == manifest)
    query = select(ContentRow.chunks).where(ContentRow.digest.in_(named), ContentRow.chunks != b"")
    found: set[bytes] = set()
    for raw in (await session.execute(query)).scalars():
        found.update(split_digests(raw))
    slabs = select(SlabSliceRow.slab).distinct().where(SlabSliceRow.content.in_(named), is_read_by(reader))
    found.update(bytes.fromhex(slab) for slab in (await session.execute(slabs)).scalars())
    return frozenset(found)


async def opened(session: ReadSession, manifests: Sequence[str], reader: str, digests: Sequence[str]) -> set[str]:
    """Which of these contents, chunks and slabs a grant for these manifests opens, by one look. Also what came after ``objects``."""
    is_named = ManifestContentRow.manifest.in_(manifests)
    found = set[str]()
    for batch in batches(digests):
        content = select(ManifestContentRow.content).where(ManifestContentRow.content.in_(batch), is_named)
        chunk = select(ContentChunkRow.chunk).where(
            ContentChunkRow.chunk.in_(batch), ManifestContentRow.content == ContentChunkRow.content, is_named
        )
        slab = select(SlabSliceRow.slab).where(
            SlabSliceRow.slab.in_(batch),
            ManifestContentRow.content == SlabSliceRow.content,
            is_named,
            is_read_by(reader),
        )
        found.update((await session.execute(union(content, chunk, slab))).scalars())
    return found


async def a_slice(session: ReadSession, content: str) -> tuple[Slice, int] | None:
    """Some slice that holds a packed content, and the content's size. Whoever may read the content may read that."""
    query = (
        select(SlabSliceRow.slab, SlabRow.size, SlabSliceRow.offset, ContentRow.size)
        .join(SlabRow, SlabRow.digest == SlabSliceRow.slab)
        .join(ContentRow, ContentRow.digest == SlabSliceRow.content)
        .where(SlabSliceRow.content == content)
        .order_by(slab_is_sound().desc(), SlabSliceRow.slab)
        .limit(1)
    )
    row = (await session.execute(query)).one_or_none()
    return None if row is None else (Slice(Digest(row[0]), row[1], row[2]), row[3])


async def unreadable(session: ReadSession, names: str | Sequence[str], scope: str) -> list[str]:
    """Which of these contents, or of those that a manifest names, are lost, or damaged, or not for this scope."""
    if isinstance(names, str):
        query = (
            select(ManifestContentRow.content)
            .join(ContentRow, ContentRow.digest == ManifestContentRow.content)
            .where(ManifestContentRow.manifest == names, ~_is_readable(scope))
        )
        return list((await session.execute(query)).scalars())
    readable = select(ContentRow.digest).where(_is_readable(scope))
    held = {digest async for (digest,) in select_in(session, readable, ContentRow.digest, names)}
    return [name for name in names if name not in held]


def _is_readable(scope: str) -> ColumnElement[bool]:
    whole = and_(ContentRow.chunks != b"", chunks_are_sound())
    packed = exists().where(SlabSliceRow.content == ContentRow.digest, is_of(scope), slab_is_sound())
    return or_(whole, ContentRow.size == 0, packed)


def is_of(scope: str) -> ColumnElement[bool]:
    """The slice's slab was packed for this scope, or for the public scope."""
    readable = (PUBLIC, scope)
    return exists().where(SlabScopeRow.slab == SlabSliceRow.slab, SlabScopeRow.scope.in_(readable))


def is_read_by(reader: str) -> ColumnElement[bool]:
    """The slice's slab may be read as a whole by this reader: an organisation reads slabs of all its teams."""
    scope = scope_of(reader)
    theirs: ColumnElement[bool] = SlabScopeRow.scope.in_((PUBLIC, scope))
    if team_of(reader) is None:
        theirs = or_(theirs, SlabScopeRow.scope.startswith(below(scope), autoescape=True))
    return exists().where(SlabScopeRow.slab == SlabSliceRow.slab, theirs)


def chunks_are_sound() -> ColumnElement[bool]:
    """A condition: no chunk of the ``ContentRow``'s own is damaged."""
    return ~exists().where(DamagedContentRow.content == ContentRow.digest)


def slab_is_sound() -> ColumnElement[bool]:
    """A condition: the ``SlabSliceRow``'s slab is not damaged."""
    return ~exists().where(DamagedChunkRow.digest == SlabSliceRow.slab)


async def is_any_damaged(session: ReadSession) -> bool:
    """Whether anything is damaged: mostly nothing is, and then nobody needs to look further."""
    return (await session.execute(select(DamagedChunkRow.digest).limit(1))).first() is not None


async def held(session: ReadSession, files: Sequence[UpstreamFile], *, is_again: bool = False) -> dict[str, Digest]:
    """Content by identity key, for those of these files that the store holds whole where the identity's scope may read.

    Nearly always all that are known are. ``is_again``: publishing has found that they are not, so each is looked at.
    """
    held = await known(session, [file.identity.key for file in files])
    if not held or not (is_again or await is_any_damaged(session)):
        return held
    by_scope: defaultdict[str, set[str]] = defaultdict(set)
    for file in files:
        by_scope[file.identity.scope].add(file.identity.key)
    for scope, keys in by_scope.items():
        names = {held[key].hex for key in keys if key in held}
        lost = set(await unreadable(session, sorted(names), scope))
        held = {key: digest for key, digest in held.items() if key not in keys or digest.hex not in lost}
    return held


async def is_lost(session: ReadSession, manifest: str, reader: str) -> bool:
    """Whether damage keeps this reader from reading all of the manifest."""
    return await is_any_damaged(session) and bool(await unreadable(session, manifest, scope_of(reader)))


async def _sound_chunks(session: ReadSession, identity_keys: Sequence[str]) -> dict[str, dict[int, Digest]]:
    """Of contents with damaged chunks: the good ones by index, by identity key."""
    if not await is_any_damaged(session):
        return {}
    found: dict[str, dict[int, Digest]] = {}
    query = (
        select(IdentityRow.key, ContentRow.chunks, DamagedContentRow.chunk)
        .join(ContentRow, ContentRow.digest == IdentityRow.content)
        .join(DamagedContentRow, DamagedContentRow.content == ContentRow.digest)
    )
    async for key, raw, damaged in select_in(session, query, IdentityRow.key, identity_keys):
        chunks = found.setdefault(key, dict(enumerate(map(Digest.from_bytes, split_digests(raw)))))
        found[key] = {index: chunk for index, chunk in chunks.items() if chunk.hex != damaged}
    return found


_DAMAGED: Final = select(DamagedChunkRow.digest)


async def _note_damage(session: WriteSession, layouts: Iterable[FileLayout]) -> None:
    """Contents that were recorded just now and count on a chunk that is damaged: it was found after they had it."""
    known = set((await session.execute(_DAMAGED)).scalars())
    if known:
        rows = [
            {"content": layout.digest.hex, "chunk": chunk.hex}
            for layout in layouts
            for chunk in set(layout.chunks)
            if chunk.hex in known and layout.slice is None
        ]
        await insert_new(session, DamagedContentRow, rows)
