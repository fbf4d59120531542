"""What a scrub looks at, in an order that one can go on in: the database's records, then the objects that the store should hold.

The records of manifests and files are compared with the names that prove them; they come first, because they say which objects
there are. Then comes every chunk, and then every slab. A cursor says how far somebody is.
"""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from sqlalchemy import ColumnElement, Row, select

from bdn.core.chunk import Digest, chunk_range
from bdn.core.store import content_fault, manifest_fault, split_digests
from bdn.mirror.db import events
from bdn.mirror.db.contents import Record, content_faults, is_read_by
from bdn.mirror.db.database import ReadSession, WriteSession
from bdn.mirror.db.tables import ContentRow, ManifestContentRow, ManifestRow, ScrubRow, SlabRow, SlabSliceRow

_STORE: Final = "store"
_CONTENTS: Final = 16  # of one look; a large one has megabytes of digests
_MANIFESTS: Final = 4  # likewise; one of a million files has 100 MB
_RECORDS: Final = 256
_TOLD: Final = 100  # manifests: a file may be in a thousand revisions
_FIRST: Final = "content::-1"  # the cursor before all objects


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


async def record_fault(session: ReadSession, record: Record) -> str | None:
    """What is wrong with this one now; None when it is right, or not there any more."""
    if record.kind == "manifest":
        row = await session.get(ManifestRow, record.digest.hex)
        return await asyncio.to_thread(manifest_fault, record.digest, row.canonical) if row else None
    content = await session.get(ContentRow, record.digest.hex)
    return await asyncio.to_thread(content_fault, record.digest, content.size, content.chunks) if content else None


async def wrong_records(
    session: ReadSession, cursor: str | None, manifests: Sequence[str] | None
) -> tuple[list[tuple[Record, str]], str]:
    """The faults among the next records behind the cursor, or (None) the first ones, and where to go on."""
    kind, _, digest = (cursor or "manifest:").partition(":")
    if kind == "manifest":
        found, last = await _manifests(session, digest, manifests)
        return found, f"manifest:{last}" if last else "record:"
    found, last = await _contents(session, digest, manifests)
    return found, f"record:{last}" if last else _FIRST


async def _manifests(
    session: ReadSession, behind: str, manifests: Sequence[str] | None
) -> tuple[list[tuple[Record, str]], str | None]:
    query = select(ManifestRow.digest, ManifestRow.canonical).where(ManifestRow.digest > behind)
    if manifests is not None:
        query = query.where(ManifestRow.digest.in_(manifests))
    rows = (await session.execute(query.order_by(ManifestRow.digest).limit(_MANIFESTS))).all()
    faults = [
        (Record("manifest", Digest(digest)), wrong)
        for digest, canonical in rows
        if (wrong := await asyncio.to_thread(manifest_fault, Digest(digest), canonical))
    ]
    return faults, rows[-1][0] if rows else None


async def _contents(
    session: ReadSession, behind: str, manifests: Sequence[str] | None
) -> tuple[list[tuple[Record, str]], str | None]:
    query = select(ContentRow.digest, ContentRow.size, ContentRow.chunks)
    query = query.where(ContentRow.digest > behind, *_of_manifests(manifests))
    rows = (await session.execute(query.order_by(ContentRow.digest).limit(_RECORDS))).all()
    # In a thread: the names of a file's chunks are hashed, and one of 1 TB has 4 MB of them.
    return await asyncio.to_thread(content_faults, rows), rows[-1][0] if rows else None


def _of_manifests(manifests: Sequence[str] | None) -> list[ColumnElement[bool]]:
    """A content is of one of these manifests; no condition for None."""
    if manifests is None:
        return []
    named = select(ManifestContentRow.content).where(ManifestContentRow.manifest.in_(manifests))
    return [ContentRow.digest.in_(named)]


async def tell_damaged(session: WriteSession, record: Record, fault: str, now: float) -> None:
    """Write an event for the manifests that a record belongs to, once."""
    if await events.is_recorded(session, "damaged", record.digest.hex, 0.0):
        return
    manifests = [record.digest.hex]
    if record.kind == "content":
        query = select(ManifestContentRow.manifest).where(ManifestContentRow.content == record.digest.hex)
        manifests = list((await session.execute(query.order_by(ManifestContentRow.manifest).limit(_TOLD))).scalars())
    facts = {"tier": "mirror", "reason": fault}
    told = (events.event_of("damaged", facts, manifest, digest=record.digest.hex) for manifest in manifests)
    await events.record(session, now, told)


async def after(session: ReadSession, cursor: str, reach: Reach | None, wanted: int) -> list[StoredObject]:
    """The next objects within reach or (None) of everything. A chunk of several contents comes several times."""
    kind, _, rest = cursor.partition(":")
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
    query = query.where(ContentRow.chunks != b"", ContentRow.digest >= content, *_of_manifests(manifests))
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
        inside = inside.where(ContentRow.chunks == b"", *_of_manifests(reach.manifests))
        query = query.where(SlabRow.digest.in_(inside.where(is_read_by(reach.organisation))))
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
