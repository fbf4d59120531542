"""What a damaged object was made of, and where its bytes came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from bdn.core.chunk import chunk_range
from bdn.core.digest import Digest
from bdn.core.store.damage import Needed, Piece, manifest_fault
from bdn.mirror.db.database import ReadSession
from bdn.mirror.db.layouts import split_digests
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


async def canonical(session: ReadSession, manifest: str) -> bytes | None:
    """A published manifest's bytes, unless they are not what its name says."""
    found = (await session.execute(select(ManifestRow.canonical).where(ManifestRow.digest == manifest))).scalar()
    return None if found is None or manifest_fault(Digest(manifest), found) else found
