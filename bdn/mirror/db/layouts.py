"""Where the bytes of a manifest lie, for one organisation: in objects of their own, or in slabs that it may read.

A packed content may lie in several slabs. Organisation A mirrors a private file, and it rests in A's slab; B mirrors the
same bytes from elsewhere. If B's layout pointed into A's slab, B's grant would let B read A's neighbouring files. So a
layout for an organisation uses slabs of scope ``public`` and of its own scope only, and B's copy made a slab of B's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from sqlalchemy import ColumnElement, Row, and_, exists, or_, select

from bdn.core.digest import Digest
from bdn.core.store.layout import Slice
from bdn.core.store.slabs import PUBLIC, scope_of
from bdn.mirror.db.database import ReadSession, batches
from bdn.mirror.db.records import check_contents
from bdn.mirror.db.tables import (
    ContentRow,
    DamagedChunkRow,
    DamagedContentRow,
    ManifestContentRow,
    SlabRow,
    SlabScopeRow,
    SlabSliceRow,
)

_RAW: Final = 32  # bytes of a raw digest


class ContentLayout(NamedTuple):
    """One content of a manifest: raw chunk digests, or else the slab that holds it. Digests are hex; a million of these."""

    digest: str
    size: int
    chunks: bytes
    slab: str | None = None
    slab_size: int = 0
    offset: int = 0


async def layouts(session: ReadSession, manifest: str, organisation: str) -> list[ContentLayout]:
    """Every distinct content of a manifest, by digest.

    Of several slabs, a content's is the one that serves most of the manifest: an agent fetches slabs as a whole. What no
    slab of this organisation holds is left out; ``publish`` sees to it that there is none.

    Raises:
        RecordDamagedError: the database does not say what was written there.
    """
    query = (
        select(ContentRow.digest, ContentRow.size, ContentRow.chunks)
        .join(ManifestContentRow, ManifestContentRow.content == ContentRow.digest)
        .where(ManifestContentRow.manifest == manifest)
        .order_by(ContentRow.digest)
    )
    rows = (await session.execute(query)).all()
    packed = (
        select(SlabSliceRow.content, SlabSliceRow.slab, SlabRow.size, SlabSliceRow.offset, slab_is_sound())
        .join(ManifestContentRow, ManifestContentRow.content == SlabSliceRow.content)
        .join(ContentRow, ContentRow.digest == SlabSliceRow.content)
        .join(SlabRow, SlabRow.digest == SlabSliceRow.slab)
        .where(ManifestContentRow.manifest == manifest, ContentRow.chunks == b"", is_of(scope_of(organisation)))
    )
    slices = (await session.execute(packed)).all()
    # In a thread: with a million files it takes seconds.
    return await asyncio.to_thread(_together, rows, slices)


def _together(
    contents: Sequence[Row[str, int, bytes]], slices: Sequence[Row[str, str, int, int, bool]]
) -> list[ContentLayout]:
    best = _best(slices)
    check_contents(contents)
    found = (ContentLayout(digest, size, chunks, *best.get(digest, ())) for digest, size, chunks in contents)
    return [one for one in found if one.chunks or one.slab or not one.size]


def _best(slices: Sequence[Row[str, str, int, int, bool]]) -> dict[str, tuple[str, int, int]]:
    """Slab, its size and the offset by content: a sound slab, of these the one with the most contents, then by digest."""
    used = Counter(slab for _, slab, _, _, _ in slices)
    damaged = {slab for _, slab, _, _, is_sound in slices if not is_sound}
    found: dict[str, tuple[str, int, int]] = {}
    for content, slab, size, offset, _ in slices:
        rival = found.get(content)
        if rival is None or (slab in damaged, -used[slab], slab) < (rival[0] in damaged, -used[rival[0]], rival[0]):
            found[content] = (slab, size, offset)
    return found


async def objects(session: ReadSession, manifest: str, organisation: str) -> frozenset[bytes]:
    """The raw names of the store's objects that a grant for the manifest opens: chunks, and slabs as a whole."""
    named = select(ManifestContentRow.content).where(ManifestContentRow.manifest == manifest)
    query = select(ContentRow.chunks).where(ContentRow.digest.in_(named), ContentRow.chunks != b"")
    found: set[bytes] = set()
    for raw in (await session.execute(query)).scalars():
        found.update(split_digests(raw))
    slabs = select(SlabSliceRow.slab).distinct().where(SlabSliceRow.content.in_(named), is_of(scope_of(organisation)))
    found.update(bytes.fromhex(slab) for slab in (await session.execute(slabs)).scalars())
    return frozenset(found)


async def opens(session: ReadSession, manifest: str, organisation: str, digest: str) -> bool:
    """Whether a grant for the manifest opens this: a content that it names, or a slab that holds one.

    Costs one look, unlike ``objects``; for packed contents, and for slabs that came after ``objects`` was asked.
    """
    content = select(ManifestContentRow.content).where(
        ManifestContentRow.manifest == manifest, ManifestContentRow.content == digest
    )
    if (await session.execute(content)).first() is not None:
        return True
    slab = (
        select(SlabSliceRow.content)
        .join(ManifestContentRow, ManifestContentRow.content == SlabSliceRow.content)
        .where(SlabSliceRow.slab == digest, ManifestContentRow.manifest == manifest, is_of(scope_of(organisation)))
        .limit(1)
    )
    return (await session.execute(slab)).first() is not None


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
    """Which contents the store does not hold, or only damaged, or only where this scope may not read.

    Args:
        names: the contents' digests, or the manifest that names them.
    """
    if isinstance(names, str):
        query = (
            select(ManifestContentRow.content)
            .join(ContentRow, ContentRow.digest == ManifestContentRow.content)
            .where(ManifestContentRow.manifest == names, ~_is_readable(scope))
        )
        return list((await session.execute(query)).scalars())
    held: set[str] = set()
    for digests in batches(names):
        readable = select(ContentRow.digest).where(ContentRow.digest.in_(digests), _is_readable(scope))
        held.update((await session.execute(readable)).scalars())
    return [name for name in names if name not in held]


def _is_readable(scope: str) -> ColumnElement[bool]:
    whole = and_(ContentRow.chunks != b"", chunks_are_sound())
    packed = exists().where(SlabSliceRow.content == ContentRow.digest, is_of(scope), slab_is_sound())
    return or_(whole, ContentRow.size == 0, packed)


def is_of(scope: str) -> ColumnElement[bool]:
    """The slice's slab may be read as a whole by whoever is of this scope."""
    readable = (PUBLIC, scope)
    return exists().where(SlabScopeRow.slab == SlabSliceRow.slab, SlabScopeRow.scope.in_(readable))


def split_digests(raw: bytes) -> list[bytes]:
    """The raw chunk digests of a ``ContentRow``."""
    return [raw[start : start + _RAW] for start in range(0, len(raw), _RAW)]


def chunks_are_sound() -> ColumnElement[bool]:
    """A condition: no chunk of the ``ContentRow``'s own is damaged."""
    return ~exists().where(DamagedContentRow.content == ContentRow.digest)


def slab_is_sound() -> ColumnElement[bool]:
    """A condition: the ``SlabSliceRow``'s slab is not damaged."""
    return ~exists().where(DamagedChunkRow.digest == SlabSliceRow.slab)
