"""Which objects the store should hold, in an order that one can go on in (every chunk, then every slab); how far the scrub is."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from sqlalchemy import Row, select

from bdn.core.chunk import Digest, chunk_range
from bdn.core.store import content_fault, scope_of
from bdn.mirror.db.contents import is_of, split_digests
from bdn.mirror.db.database import ReadSession, WriteSession
from bdn.mirror.db.records import of_manifests
from bdn.mirror.db.tables import ContentRow, ScrubRow, SlabRow, SlabSliceRow

_STORE: Final = "store"
_CONTENTS: Final = 16  # of one look; a large one has megabytes of digests
FIRST: Final = "content::-1"  # the cursor before all of them


@dataclass(frozen=True, slots=True)
class StoredObject:
    """``cursor`` is where the next look begins, behind this object."""

    digest: Digest
    size: int
    cursor: str


@dataclass(frozen=True, slots=True)
class Reach:
    """What an organisation may hear of: the contents of these manifests, and of the slabs that hold them its own and public ones."""

    manifests: Sequence[str]
    organisation: str


async def after(session: ReadSession, cursor: str | None, reach: Reach | None, wanted: int) -> list[StoredObject]:
    """The next objects within reach or (None) of everything. A chunk of several contents comes several times."""
    kind, _, rest = (cursor or FIRST).partition(":")
    if kind == "content":
        digest, _, index = rest.partition(":")
        found = await _chunks(session, digest, int(index), reach.manifests if reach else None, wanted)
        if found:
            return found
        rest = ""
    return await _slabs(session, rest, reach, wanted)


async def _chunks(
    session: ReadSession, content: str, index: int, manifests: Sequence[str] | None, wanted: int
) -> list[StoredObject]:
    """Behind chunk ``index`` of this content."""
    query = select(ContentRow.digest, ContentRow.size, ContentRow.chunks)
    query = query.where(ContentRow.chunks != b"", ContentRow.digest >= content, *of_manifests(manifests))
    rows = (await session.execute(query.order_by(ContentRow.digest).limit(_CONTENTS))).all()
    # In a thread, and no more than are wanted: a file of 1 TB has 119,000 chunks.
    found = await asyncio.to_thread(lambda: list(islice(_chunks_of(rows, content, index), wanted)))
    if not found and len(rows) == _CONTENTS:  # all of them wrong
        return await _chunks(session, rows[-1][0], sys.maxsize, manifests, wanted)
    return found


def _chunks_of(contents: Sequence[Row[str, int, bytes]], first: str, index: int) -> Iterator[StoredObject]:
    """Every chunk of these contents, of the ``first`` those behind chunk ``index``."""
    for digest, size, raw in contents:
        if content_fault(Digest(digest), size, raw):
            continue  # nobody knows which objects it has: what its record names, the store never held
        names = split_digests(raw)
        for place in range(index + 1 if digest == first else 0, len(names)):
            cursor = f"content:{digest}:{place}"
            yield StoredObject(Digest.from_bytes(names[place]), chunk_range(size, place).size, cursor)


async def _slabs(session: ReadSession, slab: str, reach: Reach | None, wanted: int) -> list[StoredObject]:
    query = select(SlabRow.digest, SlabRow.size).where(SlabRow.digest > slab)
    if reach is not None:
        inside = select(SlabSliceRow.slab).join(ContentRow, ContentRow.digest == SlabSliceRow.content)
        inside = inside.where(ContentRow.chunks == b"", *of_manifests(reach.manifests))
        query = query.where(SlabRow.digest.in_(inside.where(is_of(scope_of(reach.organisation)))))
    rows = (await session.execute(query.order_by(SlabRow.digest).limit(wanted))).all()
    return [StoredObject(Digest(digest), size, f"slab:{digest}") for digest, size in rows]


async def scrub_state(session: ReadSession) -> ScrubRow | None:
    """How far the scrub is; None when it never began."""
    return await session.get(ScrubRow, _STORE)


async def save_scrub_state(
    session: WriteSession, *, started_at: float, completed_at: float | None, cursor: str | None
) -> None:
    """It is so far now."""
    await session.merge(ScrubRow(name=_STORE, started_at=started_at, completed_at=completed_at, cursor=cursor))
    await session.flush()
