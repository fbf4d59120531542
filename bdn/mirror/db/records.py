"""What the database says of manifests and of files, record by record, beside the name that proves it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sqlalchemy import ColumnElement, Row, select, update

from bdn.core.digest import Digest
from bdn.core.store.damage import content_fault, manifest_fault
from bdn.core.store.layout import FileLayout
from bdn.mirror.db.database import ReadSession, WriteSession
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


class WrongRecordError(Exception):
    """A reader came upon a record that is wrong: see ``fault``."""

    def __init__(self, record: Record, fault: str) -> None:
        super().__init__(record, fault)
        self.record, self.fault = record, fault


async def fault(session: ReadSession, record: Record) -> tuple[str, bytes] | None:
    """What is wrong with this one now, and its bytes; None when it is right, or nobody has it any more."""
    if record.kind == "manifest":
        row = await session.get(ManifestRow, record.digest.hex)
        raw = row.canonical if row else b""
        wrong = await asyncio.to_thread(manifest_fault, record.digest, raw) if row else None
    else:
        content = await session.get(ContentRow, record.digest.hex)
        raw = b"%d %b" % (content.size, content.chunks) if content else b""
        wrong = await asyncio.to_thread(content_fault, record.digest, content.size, content.chunks) if content else None
    return (wrong, raw) if wrong else None


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


def _content_faults(contents: Sequence[Row[str, int, bytes]]) -> list[tuple[Record, str]]:
    return [
        (Record("content", Digest(digest)), wrong)
        for digest, size, chunks in contents
        if (wrong := content_fault(Digest(digest), size, chunks))
    ]


def of_manifests(manifests: Sequence[str] | None) -> list[ColumnElement[bool]]:
    """A content is of one of these manifests; no condition for None."""
    if manifests is None:
        return []
    named = select(ManifestContentRow.content).where(ManifestContentRow.manifest.in_(manifests))
    return [ContentRow.digest.in_(named)]


async def restore_manifest(session: WriteSession, digest: Digest, canonical: bytes) -> None:
    """These are its bytes: the caller has computed their name."""
    await session.execute(update(ManifestRow).where(ManifestRow.digest == digest.hex).values(canonical=canonical))


async def restore_content(session: WriteSession, layout: FileLayout) -> None:
    """These are its size and chunks: a layout proves itself. One in a slab has none of its own."""
    chunks = b"" if layout.slice else b"".join(chunk.to_bytes() for chunk in layout.chunks)
    where = ContentRow.digest == layout.digest.hex
    await session.execute(update(ContentRow).where(where).values(size=layout.size, chunks=chunks))


async def chunks_named(session: ReadSession, content: Digest) -> dict[int, Digest]:
    """What a file's record says of its chunks, right or wrong."""
    row = await session.get(ContentRow, content.hex)
    raw = row.chunks if row else b""
    whole = raw[: len(raw) - len(raw) % 32]
    return {start // 32: Digest.from_bytes(whole[start : start + 32]) for start in range(0, len(whole), 32)}


async def naming(session: ReadSession, content: Digest) -> list[str]:
    """A few manifests that name the content, whose sizes and layouts tell what its record should be."""
    query = select(ManifestContentRow.manifest).where(ManifestContentRow.content == content.hex)
    return list((await session.execute(query.order_by(ManifestContentRow.manifest).limit(_MANIFESTS))).scalars())
