"""Which objects the store should hold: every chunk of a content, then every slab, in an order that one can go on in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from bdn.core.chunk import chunk_range
from bdn.core.digest import Digest
from bdn.core.store.record_soundness import content_fault
from bdn.mirror.database import ReadSession
from bdn.mirror.repository.layouts import split_digests
from bdn.mirror.repository.records import of_manifests
from bdn.mirror.tables import ContentRow, SlabRow, SlabSliceRow

_CONTENTS: Final = 16  # of one look; a large one has megabytes of digests
_SLABS: Final = 64
FIRST: Final = "content::-1"  # the cursor before all of them


@dataclass(frozen=True, slots=True)
class StoredObject:
    """``cursor`` is where the next look begins, behind this object."""

    digest: Digest
    size: int
    cursor: str


async def after(session: ReadSession, cursor: str | None, manifests: Sequence[str] | None) -> list[StoredObject]:
    """The next objects, of these manifests or (None) of all contents; none at the end.

    A chunk of several contents comes several times.
    """
    kind, _, rest = (cursor or FIRST).partition(":")
    if kind == "content":
        digest, _, index = rest.partition(":")
        found = await _chunks(session, digest, int(index), manifests)
        if found:
            return found
        rest = ""
    return await _slabs(session, rest, manifests)


async def _chunks(
    session: ReadSession, content: str, index: int, manifests: Sequence[str] | None
) -> list[StoredObject]:
    """Behind chunk ``index`` of this content."""
    query = select(ContentRow.digest, ContentRow.size, ContentRow.chunks)
    query = query.where(ContentRow.chunks != b"", ContentRow.digest >= content, *of_manifests(manifests))
    found: list[StoredObject] = []
    rows = (await session.execute(query.order_by(ContentRow.digest).limit(_CONTENTS))).all()
    for digest, size, raw in rows:
        if content_fault(Digest(digest), size, raw):
            continue  # nobody knows which objects it has: what its record names, the store never held
        done = index if digest == content else -1
        for place, chunk in enumerate(split_digests(raw)):
            if place > done:
                cursor = f"content:{digest}:{place}"
                found.append(StoredObject(Digest.from_bytes(chunk), chunk_range(size, place).size, cursor))
    if not found and len(rows) == _CONTENTS:  # all of them wrong
        return await _chunks(session, rows[-1][0], sys.maxsize, manifests)
    return found


async def _slabs(session: ReadSession, slab: str, manifests: Sequence[str] | None) -> list[StoredObject]:
    query = select(SlabRow.digest, SlabRow.size).where(SlabRow.digest > slab)
    if manifests is not None:
        inside = select(SlabSliceRow.slab).join(ContentRow, ContentRow.digest == SlabSliceRow.content)
        query = query.where(SlabRow.digest.in_(inside.where(ContentRow.chunks == b"", *of_manifests(manifests))))
    rows = (await session.execute(query.order_by(SlabRow.digest).limit(_SLABS))).all()
    return [StoredObject(Digest(digest), size, f"slab:{digest}") for digest, size in rows]
