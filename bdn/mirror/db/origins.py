"""What a digest stands for, what a damaged object was made of, and where its bytes came from."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from sqlalchemy import func, select

from bdn.core.chunk import Digest, Manifest, chunk_range
from bdn.core.store import Needed, Piece, manifest_fault, split_digests
from bdn.mirror.db.contents import is_read_by
from bdn.mirror.db.database import ReadSession
from bdn.mirror.db.mirrors import is_mirrored_for
from bdn.mirror.db.tables import (
    ContentRow,
    DamagedContentRow,
    ManifestContentRow,
    ManifestRow,
    MirrorRow,
    MirrorSourceRow,
    SlabRow,
    SlabScopeRow,
    SlabSliceRow,
)

_ORIGINS: Final = 4  # of one content; who mirrored it from many places has the newest asked


@dataclass(frozen=True, slots=True)
class Origin:
    """A READY source whose manifest names a content: where its bytes were read, for whom, and who may read them."""

    organisation: str
    manifest: str
    row: MirrorSourceRow


async def needed(session: ReadSession, digest: str) -> Needed | None:
    """What the damaged object is made of; None when nothing needs it any more."""
    slab = await session.get(SlabRow, digest)
    if slab is not None:
        return await _slab(session, slab)
    query = (
        select(ContentRow)
        .join(DamagedContentRow, DamagedContentRow.content == ContentRow.digest)
        .where(DamagedContentRow.chunk == digest)
        .limit(1)
    )
    content = (await session.execute(query)).scalar()
    if content is None:
        return None
    place = chunk_range(content.size, split_digests(content.chunks).index(bytes.fromhex(digest)))
    piece = Piece(Digest(digest), 0, place.size, Digest(content.digest), content.size, place.start)
    return Needed(Digest(digest), place.size, (piece,))


async def _slab(session: ReadSession, slab: SlabRow) -> Needed | None:
    query = (
        select(ContentRow.digest, ContentRow.size, SlabSliceRow.offset)
        .join(SlabSliceRow, SlabSliceRow.content == ContentRow.digest)
        .where(SlabSliceRow.slab == slab.digest)
        .order_by(SlabSliceRow.offset)
    )
    pieces = [
        Piece(Digest(digest), offset, size, Digest(digest), size, 0)
        for digest, size, offset in (await session.execute(query)).all()
    ]
    owners = select(SlabScopeRow.scope).where(SlabScopeRow.slab == slab.digest).order_by(SlabScopeRow.scope)
    scopes = tuple((await session.execute(owners)).scalars())
    return Needed(Digest(slab.digest), slab.size, tuple(pieces), scopes) if pieces else None


async def origins(session: ReadSession, content: str) -> list[Origin]:
    """Where this content can be read again, newest first."""
    query = (
        select(MirrorRow.organisation, MirrorSourceRow)
        .join(MirrorSourceRow, MirrorSourceRow.mirror_id == MirrorRow.id)
        .join(ManifestContentRow, ManifestContentRow.manifest == MirrorSourceRow.manifest)
        .where(ManifestContentRow.content == content, MirrorSourceRow.status == "READY")
        .order_by(MirrorRow.created_at.desc(), MirrorSourceRow.position)
    )
    found: dict[tuple[str, str], Origin] = {}
    for organisation, row in (await session.execute(query.limit(_ORIGINS * 8))).all():
        found.setdefault((organisation, row.source), Origin(organisation, str(row.manifest), row))
    return list(found.values())[:_ORIGINS]


async def paths(session: ReadSession, manifest: str, contents: Collection[str]) -> dict[str, str]:
    """By content the first path under which the manifest names it; of a manifest that is damaged nothing is known."""
    query = select(ManifestRow.canonical).where(ManifestRow.digest == manifest)
    canonical = (await session.execute(query)).scalar()
    return {} if canonical is None else await asyncio.to_thread(_paths_in, manifest, canonical, contents)


def _paths_in(manifest: str, canonical: bytes, contents: Collection[str]) -> dict[str, str]:
    if manifest_fault(Digest(manifest), canonical):
        return {}
    files = Manifest.parse(canonical).files
    return {entry.digest.hex: entry.path for entry in reversed(files) if entry.digest.hex in contents}


_LONGEST = 1000  # places that are looked up


class Place(NamedTuple):
    """A content of a manifest, in which a digest was found; ``chunk_index`` is the chunk's, None for the content itself."""

    manifest: str
    content: str
    chunk_index: int | None = None


async def places_of_content(session: ReadSession, organisation: str, content: str) -> list[Place]:
    """The organisation's manifests that name this content. Another's content costs what costs one that does not exist."""
    is_theirs = is_mirrored_for(organisation, ManifestContentRow.manifest)
    query = select(ManifestContentRow.manifest).where(ManifestContentRow.content == content, is_theirs)
    return [Place(manifest, content) for manifest in (await session.execute(query.limit(_LONGEST))).scalars()]


async def places_in_slab(session: ReadSession, organisation: str, slab: str) -> list[Place]:
    """The organisation's contents that lie in this slab, if it may read the slab as a whole."""
    query = (
        select(ManifestContentRow.manifest, SlabSliceRow.content)
        .join(SlabSliceRow, SlabSliceRow.content == ManifestContentRow.content)
        .where(SlabSliceRow.slab == slab, is_read_by(organisation))
        .where(is_mirrored_for(organisation, ManifestContentRow.manifest))
        .limit(_LONGEST)
    )
    return [Place(manifest, content) for manifest, content in (await session.execute(query)).all()]


async def places_of_chunk(session: ReadSession, organisation: str, chunk: str) -> list[Place]:
    """The larger files of the organisation's manifests that contain this chunk. Reads the chunk lists of all of them."""
    raw = bytes.fromhex(chunk)
    query = (
        select(ManifestContentRow.manifest, ContentRow.digest, ContentRow.chunks)
        .join(ContentRow, ContentRow.digest == ManifestContentRow.content)
        .join(MirrorSourceRow, MirrorSourceRow.manifest == ManifestContentRow.manifest)
        .join(MirrorRow, MirrorRow.id == MirrorSourceRow.mirror_id)
        .where(MirrorRow.organisation == organisation, func.length(ContentRow.chunks) > len(raw))
    )
    found: dict[Place, None] = {}
    async for manifest, content, chunks in await session.stream(query):
        if raw in chunks:  # it may still lie across two digests
            pieces = split_digests(chunks)
            found |= {Place(manifest, content, index): None for index, piece in enumerate(pieces) if piece == raw}
    return list(found)[:_LONGEST]
