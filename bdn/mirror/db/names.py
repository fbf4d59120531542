"""Every statement about what a digest stands for: a manifest, a file in it, a piece of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, exists, func, select

from bdn.core.store.slabs import scope_of
from bdn.mirror.db.database import ReadSession, batches
from bdn.mirror.db.layouts import is_of, split_digests
from bdn.mirror.db.tables import ContentRow, ManifestContentRow, MirrorRow, MirrorSourceRow, SlabSliceRow

_LONGEST = 1000  # places that are looked up


class Place(NamedTuple):
    """A content of a manifest, in which a digest was found; ``chunk_index`` is the chunk's, None for the content itself."""

    manifest: str
    content: str
    chunk_index: int | None = None


async def ever_mirrored(session: ReadSession, organisation: str, manifests: Sequence[str]) -> set[str]:
    """Which of these were ever published for the organisation, whether it may read them now or not."""
    found: set[str] = set()
    for batch in batches(manifests):
        query = (
            select(MirrorSourceRow.manifest)
            .join(MirrorRow, MirrorRow.id == MirrorSourceRow.mirror_id)
            .where(MirrorRow.organisation == organisation, MirrorSourceRow.manifest.in_(batch))
        )
        found.update(str(manifest) for manifest in (await session.execute(query)).scalars())
    return found


async def places_of_content(session: ReadSession, organisation: str, content: str) -> list[Place]:
    """The organisation's manifests that name this content. Another's content costs what costs one that does not exist."""
    query = (
        select(ManifestContentRow.manifest)
        .where(ManifestContentRow.content == content, is_mirrored_for(organisation))
        .limit(_LONGEST)
    )
    return [Place(manifest, content) for manifest in (await session.execute(query)).scalars()]


async def places_in_slab(session: ReadSession, organisation: str, slab: str) -> list[Place]:
    """The organisation's contents that lie in this slab, if it may read the slab as a whole."""
    query = (
        select(ManifestContentRow.manifest, SlabSliceRow.content)
        .join(SlabSliceRow, SlabSliceRow.content == ManifestContentRow.content)
        .where(SlabSliceRow.slab == slab, is_of(scope_of(organisation)), is_mirrored_for(organisation))
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


def is_mirrored_for(organisation: str) -> ColumnElement[bool]:
    """The ``ManifestContentRow``'s manifest was ever published for the organisation."""
    return exists().where(
        MirrorSourceRow.manifest == ManifestContentRow.manifest,
        MirrorSourceRow.mirror_id == MirrorRow.id,
        MirrorRow.organisation == organisation,
    )
