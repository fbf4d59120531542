"""What is collected: manifests, contents and chunks that nothing names any more, and slabs that nothing needs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Row, delete, exists, func, select
from sqlalchemy.orm import aliased

from bdn.core.store import SlabNeeds, split_digests
from bdn.mirror.db import mirrors
from bdn.mirror.db.contents import check_contents, chunks_are_sound, drop_slabs
from bdn.mirror.db.database import ReadSession, WriteSession, delete_in, select_in
from bdn.mirror.db.tables import (
    ContentChunkRow,
    ContentRow,
    CopiedChunkRow,
    DamagedChunkRow,
    IdentityRow,
    ManifestContentRow,
    ManifestRow,
    QuarantinedFileRow,
    SlabRow,
    SlabScopeRow,
    SlabSliceRow,
)

_AT_ONCE: Final = 1000  # records that one trip to a thread looks at


@dataclass(frozen=True, slots=True)
class Taken:
    """Rows that went, raw names of chunks and slabs in them, which others may name, too, and their bytes."""

    count: int
    chunks: set[bytes]
    bytes: int = 0


async def contents_of(session: ReadSession, manifest_digest: str) -> list[tuple[str, int, int]]:
    """Each content of a manifest: digest, its bytes outside of slabs, and how many living manifests name it."""
    other = aliased(ManifestContentRow)
    names = (
        select(func.count())
        .where(other.content == ManifestContentRow.content, other.manifest.not_in(mirrors.dead_manifests()))
        .scalar_subquery()
    )
    query = (
        select(ContentRow.digest, ContentRow.size, ContentRow.chunks == b"", names)
        .join(ManifestContentRow, ManifestContentRow.content == ContentRow.digest)
        .where(ManifestContentRow.manifest == manifest_digest)
    )
    return [(row[0], 0 if row[2] else row[1], row[3]) for row in (await session.execute(query)).all()]


async def slabs_of(session: ReadSession, manifest_digest: str) -> list[str]:
    """Every slab, of whatever scope, that holds a content of the manifest."""
    query = (
        select(SlabSliceRow.slab)
        .distinct()
        .join(ManifestContentRow, ManifestContentRow.content == SlabSliceRow.content)
        .where(ManifestContentRow.manifest == manifest_digest)
    )
    return list((await session.execute(query)).scalars())


async def add_slabs(session: ReadSession, needs: SlabNeeds, slabs: Sequence[str]) -> list[str]:
    """Tell ``needs`` everything about these slabs, and about where else their contents lie. Returns these contents."""
    other = aliased(SlabSliceRow)
    named, contents = set(slabs), set[str]()
    async for slab, size in select_in(session, select(SlabRow.digest, SlabRow.size), SlabRow.digest, slabs):
        needs.add_slab(slab, size)
    slices = select(SlabSliceRow.content, SlabSliceRow.slab).join(other, other.content == SlabSliceRow.content)
    async for content, slab in select_in(session, slices, other.slab, slabs):
        needs.add_slice(content, slab)
        contents.add(content)
        named.add(slab)
    whole = select(ContentRow.digest).where(ContentRow.chunks != b"", chunks_are_sound())
    async for (content,) in select_in(session, whole, ContentRow.digest, sorted(contents)):
        needs.add_whole(content)
    scopes = select(SlabScopeRow.slab, SlabScopeRow.scope)
    async for slab, scope in select_in(session, scopes, SlabScopeRow.slab, sorted(named)):
        needs.add_scope(slab, scope)
    damaged = select(DamagedChunkRow.digest)
    async for (slab,) in select_in(session, damaged, DamagedChunkRow.digest, sorted(named)):
        needs.add_damaged(slab)
    return sorted(contents)


async def take_manifest(session: WriteSession, manifest: str, now: float) -> Taken:
    """Unpublish a manifest, and forget what it alone names."""
    other = aliased(ManifestContentRow)
    alone = select(ManifestContentRow.content).where(
        ManifestContentRow.manifest == manifest,
        ~exists().where(other.content == ManifestContentRow.content, other.manifest != manifest),
    )
    contents = list((await session.execute(alone)).scalars())
    await session.execute(delete(ManifestContentRow).where(ManifestContentRow.manifest == manifest))
    await session.execute(delete(ManifestRow).where(ManifestRow.digest == manifest))
    await mirrors.mark_collected(session, manifest, now)
    chunks, size = await _take(session, contents)
    return Taken(1, chunks, size)


async def take_unnamed(session: WriteSession, before: float) -> Taken:
    """Forget contents that no manifest names, recorded before then: their mirrors came to no good end.

    A mirror that runs may count on one of them, because its identity is known; then publishing finds that it is gone, and
    it is copied again.
    """
    query = select(ContentRow.digest).where(
        ContentRow.recorded_at < before, ~exists().where(ManifestContentRow.content == ContentRow.digest)
    )
    contents = list((await session.execute(query)).scalars())
    chunks, size = await _take(session, contents)
    return Taken(len(contents), chunks, size)


async def take_half_copied(session: WriteSession, before: float) -> Taken:
    """Forget chunks of files that nobody went on with since then."""
    statement = delete(CopiedChunkRow).where(CopiedChunkRow.recorded_at < before).returning(CopiedChunkRow.digest)
    digests = [bytes.fromhex(digest) for digest in (await session.execute(statement)).scalars()]
    return Taken(len(digests), set(digests))


async def take_evidence(session: WriteSession, before: float) -> Taken:
    """Forget files that came wrong before then."""
    statement = delete(QuarantinedFileRow).where(QuarantinedFileRow.created_at < before)
    found = list((await session.execute(statement.returning(QuarantinedFileRow.chunks))).scalars())
    return Taken(len(found), {chunk for raw in found for chunk in split_digests(raw)})


async def named(session: ReadSession) -> set[bytes]:
    """The raw names of all objects of the store that some row names: about 100 bytes of memory for each chunk.

    What a chunk's row becomes is read after that row: a half-copied file's chunk is a complete file's, or evidence, later.
    ``RecordDamagedError``: a file's chunks have lost their name.
    """
    found: set[bytes] = set()
    for digests in (select(CopiedChunkRow.digest), select(SlabRow.digest)):
        async for (digest,) in await session.stream(digests):
            found.add(bytes.fromhex(digest))
    contents = await session.stream(select(ContentRow.digest, ContentRow.size, ContentRow.chunks))
    async for rows in contents.partitions(_AT_ONCE):
        found.update(await asyncio.to_thread(_chunks_of, rows))
    async for (raw,) in await session.stream(select(QuarantinedFileRow.chunks)):
        found.update(split_digests(raw))
    return found


def _chunks_of(contents: Sequence[Row[str, int, bytes]]) -> set[bytes]:
    check_contents(contents)
    return {chunk for _, _, chunks in contents for chunk in split_digests(chunks)}


async def _take(session: WriteSession, contents: Sequence[str]) -> tuple[set[bytes], int]:
    """Forget contents, with the identities that led to them, and the slabs that nothing else needs; their chunks and bytes."""
    slabs, size = await _slabs_going(session, contents)
    chunks = set(map(bytes.fromhex, slabs))
    query = select(ContentRow.chunks, ContentRow.size).where(ContentRow.chunks != b"")
    async for raw, content_size in select_in(session, query, ContentRow.digest, contents):
        chunks.update(split_digests(raw[: len(raw) - len(raw) % 32]))  # a damaged record may end in half a name
        size += content_size
    for column in (SlabSliceRow.content, IdentityRow.content, ContentChunkRow.content, ContentRow.digest):
        await delete_in(session, column, contents)
    await drop_slabs(session, slabs)
    return chunks, size


async def _slabs_going(session: ReadSession, contents: Sequence[str]) -> tuple[list[str], int]:
    query = select(SlabSliceRow.slab).distinct()
    slabs = {slab async for (slab,) in select_in(session, query, SlabSliceRow.content, contents)}
    needs = SlabNeeds()
    await add_slabs(session, needs, sorted(slabs))
    going = needs.take(contents)
    return going, needs.size(going)
