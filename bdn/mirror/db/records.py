"""Records of manifests and files, compared with the names that prove them. A wrong one is refused, and never written again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sqlalchemy import ColumnElement, Row, select

from bdn.core.chunk import Digest
from bdn.core.errors import StoreUnavailableError
from bdn.core.store import content_fault, manifest_fault
from bdn.mirror.db.database import ReadSession
from bdn.mirror.db.tables import ContentRow, ManifestContentRow, ManifestRow

_MANIFESTS: Final = 4  # of one look; one of a million files has 100 MB
_CONTENTS: Final = 256


@dataclass(frozen=True, slots=True)
class Record:
    """The canonical bytes of a manifest, or size and chunks of a file."""

    kind: Literal["manifest", "content"]
    digest: Digest

    def __str__(self) -> str:
        return f"the record of {self.kind} {self.digest}"

    def damaged(self, fault: str) -> RecordDamagedError:
        """The error of whoever reads it."""
        return RecordDamagedError(fault, self.kind, str(self.digest))


class RecordDamagedError(StoreUnavailableError):
    """The store is there, and what the database says of this is wrong."""

    kind: str
    digest: str

    @property
    def record(self) -> Record:
        """Which one."""
        return Record("manifest" if self.kind == "manifest" else "content", Digest.parse(self.digest))

    def __str__(self) -> str:
        return (
            f"the record of {self.kind} {self.digest} is damaged in the mirror's database ({self.reason}): it is not served, and no "
            "chunk is collected while nobody can tell which chunks it needs; restore the database from a backup, or evict what it "
            "belongs to from the mirror, collect, and mirror that again; 'bdn-admin verify' lists all such records"
        )


def check_contents(contents: Sequence[Row[str, int, bytes]]) -> None:
    """Raise ``RecordDamagedError`` for the first of these rows (digest, size, chunks) that is wrong."""
    for record, fault in _content_faults(contents):
        raise record.damaged(fault)


def _content_faults(contents: Sequence[Row[str, int, bytes]]) -> list[tuple[Record, str]]:
    return [
        (Record("content", Digest(digest)), fault)
        for digest, size, chunks in contents
        if (fault := content_fault(Digest(digest), size, chunks))
    ]


async def fault_of(session: ReadSession, record: Record) -> str | None:
    """What is wrong with this one now; None when it is right, or not there any more."""
    if record.kind == "manifest":
        row = await session.get(ManifestRow, record.digest.hex)
        return await asyncio.to_thread(manifest_fault, record.digest, row.canonical) if row else None
    content = await session.get(ContentRow, record.digest.hex)
    return await asyncio.to_thread(content_fault, record.digest, content.size, content.chunks) if content else None


async def after(
    session: ReadSession, cursor: str | None, manifests: Sequence[str] | None
) -> tuple[list[tuple[Record, str]], str | None]:
    """The faults among the next records behind the cursor, and where to go on; None behind the last one."""
    kind, _, digest = (cursor or "manifest:").partition(":")
    if kind == "manifest":
        found, last = await _manifests(session, digest, manifests)
        return found, f"manifest:{last}" if last else "record:"
    found, last = await _contents(session, digest, manifests)
    return found, f"record:{last}" if last else None


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
    query = query.where(ContentRow.digest > behind, *of_manifests(manifests))
    rows = (await session.execute(query.order_by(ContentRow.digest).limit(_CONTENTS))).all()
    # In a thread: the names of a file's chunks are hashed, and one of 1 TB has 4 MB of them.
    return await asyncio.to_thread(_content_faults, rows), rows[-1][0] if rows else None


def of_manifests(manifests: Sequence[str] | None) -> list[ColumnElement[bool]]:
    """A content is of one of these manifests; no condition for None."""
    if manifests is None:
        return []
    named = select(ManifestContentRow.content).where(ManifestContentRow.manifest.in_(manifests))
    return [ContentRow.digest.in_(named)]


async def manifests_of(session: ReadSession, record: Record, limit: int) -> list[str]:
    """The manifests that a record belongs to, so many at most."""
    if record.kind == "manifest":
        return [record.digest.hex]
    query = select(ManifestContentRow.manifest).where(ManifestContentRow.content == record.digest.hex)
    return list((await session.execute(query.order_by(ManifestContentRow.manifest).limit(limit))).scalars())
