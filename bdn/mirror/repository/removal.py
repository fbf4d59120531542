"""What an eviction takes: manifests, contents that nothing names any more, their chunks, and slabs that nothing needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import delete, func, select
from sqlalchemy.orm import aliased

from bdn.mirror.database import ReadSession, WriteSession
from bdn.mirror.repository import quarantine
from bdn.mirror.repository.bulk import batches
from bdn.mirror.repository.layouts import split_digests
from bdn.mirror.tables import (
    ContentRow,
    CopiedChunkRow,
    IdentityRow,
    ManifestContentRow,
    ManifestRow,
    SlabRow,
    SlabScopeRow,
    SlabSliceRow,
)


async def contents_of(session: ReadSession, manifest_digest: str) -> list[tuple[str, int, int]]:
    """Each distinct content of a manifest: digest, the bytes that it has for itself, and how many manifests name it.

    What rests in slabs only has no bytes for itself; they are its slabs'.
    """
    other = aliased(ManifestContentRow)
    names = select(func.count()).where(other.content == ManifestContentRow.content).scalar_subquery()
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


@dataclass
class SlabFacts:
    """What decides about some slabs: (slab, size), (content, slab), (slab, scope), and contents that are whole as well.

    ``slices`` are all in these slabs and all others of the same contents; ``scopes`` are those of every slab in ``slices``.
    """

    sizes: list[tuple[str, int]] = field(default_factory=list)
    slices: list[tuple[str, str]] = field(default_factory=list)
    scopes: list[tuple[str, str]] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)


async def slab_facts(session: ReadSession, slabs: Sequence[str]) -> SlabFacts:
    """Everything about these slabs, and about where else their contents lie."""
    facts = SlabFacts()
    named = set(slabs)
    inside = aliased(SlabSliceRow)
    for batch in batches(slabs):
        sizes = select(SlabRow.digest, SlabRow.size).where(SlabRow.digest.in_(batch))
        facts.sizes += [(row[0], row[1]) for row in (await session.execute(sizes)).all()]
        own = select(SlabSliceRow.content, SlabSliceRow.slab).where(SlabSliceRow.slab.in_(batch))
        other = (
            select(SlabSliceRow.content, SlabSliceRow.slab)
            .distinct()
            .join(inside, inside.content == SlabSliceRow.content)
            .where(inside.slab.in_(batch), SlabSliceRow.slab != inside.slab)
        )
        for query in (own, other):
            rows = (await session.execute(query)).all()
            facts.slices += [(row[0], row[1]) for row in rows]
            named.update(row[1] for row in rows)
        whole = select(inside.content).join(ContentRow, ContentRow.digest == inside.content)
        whole = whole.where(inside.slab.in_(batch), ContentRow.chunks != b"")
        facts.whole += (await session.execute(whole)).scalars()
    for batch in batches(sorted(named)):
        scopes = select(SlabScopeRow.slab, SlabScopeRow.scope).where(SlabScopeRow.slab.in_(batch))
        facts.scopes += [(row[0], row[1]) for row in (await session.execute(scopes)).all()]
    return facts


async def remove(
    session: WriteSession, manifest_digests: Sequence[str], contents: Sequence[str], slabs: Sequence[str]
) -> set[bytes]:
    """Unpublish manifests and forget contents, with the identities that led to them, and slabs.

    Returns the raw names of the chunks and slabs that nothing needs any more, for the caller to delete. Reads every row
    that is left: for evictions only.
    """
    for batch in batches(manifest_digests):
        await session.execute(delete(ManifestContentRow).where(ManifestContentRow.manifest.in_(batch)))
        await session.execute(delete(ManifestRow).where(ManifestRow.digest.in_(batch)))
    chunks = await _chunks_of(session, contents)
    for batch in batches(contents):
        await session.execute(delete(SlabSliceRow).where(SlabSliceRow.content.in_(batch)))
        await session.execute(delete(IdentityRow).where(IdentityRow.content.in_(batch)))
        await session.execute(delete(ContentRow).where(ContentRow.digest.in_(batch)))
    for batch in batches(slabs):
        await session.execute(delete(SlabSliceRow).where(SlabSliceRow.slab.in_(batch)))
        await session.execute(delete(SlabScopeRow).where(SlabScopeRow.slab.in_(batch)))
        await session.execute(delete(SlabRow).where(SlabRow.digest.in_(batch)))
    chunks.update(map(bytes.fromhex, slabs))
    return chunks - await _in_use(session, chunks)


async def _chunks_of(session: ReadSession, contents: Sequence[str]) -> set[bytes]:
    chunks: set[bytes] = set()
    for batch in batches(contents):
        query = select(ContentRow.chunks).where(ContentRow.digest.in_(batch))
        for raw in (await session.execute(query)).scalars():
            chunks.update(split_digests(raw))
    return chunks


async def _in_use(session: ReadSession, chunks: set[bytes]) -> set[bytes]:
    """Which of these objects of the store some content, complete or half-copied, or some slab still needs."""
    used: set[bytes] = set()
    async for (raw,) in await session.stream(select(ContentRow.chunks).where(ContentRow.chunks != b"")):
        used.update(chunks.intersection(split_digests(raw)))
    for digests in batches([raw.hex() for raw in chunks]):
        query = select(CopiedChunkRow.digest).where(CopiedChunkRow.digest.in_(digests))
        used.update(bytes.fromhex(digest) for digest in (await session.execute(query)).scalars())
        slabs = select(SlabRow.digest).where(SlabRow.digest.in_(digests))
        used.update(bytes.fromhex(digest) for digest in (await session.execute(slabs)).scalars())
    return used | await quarantine.chunks_kept(session, chunks)
