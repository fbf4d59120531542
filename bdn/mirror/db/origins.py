"""Which manifests refer to a chunk, and from which sources they were mirrored."""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from bdn.core.chunk import Digest
from bdn.mirror.db.database import ReadSession
from bdn.mirror.db.mirrors import is_mirrored_for
from bdn.mirror.db.tables import ChunkRow, ManifestRow, MirrorRow, MirrorSourceRow, SetChunkRow

_ORIGINS: Final = 4  # per chunk: of many sources the newest are tried


@dataclass(frozen=True, slots=True)
class Origin:
    """A READY source whose manifest refers to a chunk, and the organisation and team that it was mirrored for."""

    organisation: str
    team: str | None
    manifest: str
    row: MirrorSourceRow


async def origins(session: ReadSession, chunk: Digest) -> list[Origin]:
    """Where a chunk can be read again, newest first."""
    query = (
        select(MirrorRow.organisation, MirrorRow.team, MirrorSourceRow)
        .join(MirrorSourceRow, MirrorSourceRow.mirror_id == MirrorRow.id)
        .join(ManifestRow, ManifestRow.digest == MirrorSourceRow.manifest)
        .join(SetChunkRow, SetChunkRow.set_id == ManifestRow.set_id)
        .join(ChunkRow, ChunkRow.id == SetChunkRow.chunk_id)
        .where(ChunkRow.digest == chunk.to_bytes(), MirrorSourceRow.status == "READY")
        .order_by(MirrorRow.created_at.desc(), MirrorSourceRow.position)
    )
    found: dict[tuple[str, str], Origin] = {}
    for organisation, team, row in (await session.execute(query.limit(_ORIGINS * 8))).all():
        found.setdefault((organisation, row.source), Origin(organisation, team or None, str(row.manifest), row))
    return list(found.values())[:_ORIGINS]


async def manifests_with(session: ReadSession, organisation: str | None, chunk: Digest, limit: int) -> list[str]:
    """The organisation's manifests that refer to this chunk (None: all organisations'), newest first.

    A foreign chunk costs the same as a missing one (no oracle).
    """
    query = (
        select(ManifestRow.digest)
        .join(SetChunkRow, SetChunkRow.set_id == ManifestRow.set_id)
        .join(ChunkRow, ChunkRow.id == SetChunkRow.chunk_id)
        .where(ChunkRow.digest == chunk.to_bytes())
        .order_by(ManifestRow.created_at.desc())
    )
    if organisation is not None:
        query = query.where(is_mirrored_for(organisation, ManifestRow.digest))
    return list((await session.execute(query.limit(limit))).scalars())
