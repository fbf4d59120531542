"""Every statement about what the store holds: contents, manifests, upstream identities, half-copied files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from bdn.core.digest import Digest
from bdn.core.layout import FileLayout
from bdn.core.manifest import Manifest
from bdn.mirror.database import ReadSession, WriteSession
from bdn.mirror.tables import Base, ContentRow, CopiedChunkRow, IdentityRow, ManifestContentRow, ManifestRow

_BATCH: Final = 250  # rows per statement: SQLite allowed 999 bound parameters for a long time
_RAW: Final = 32  # bytes of a raw digest
_Item = TypeVar("_Item")


async def known(session: ReadSession, identity_keys: Sequence[str]) -> dict[str, Digest]:
    """Content by identity key, for the identities that the store holds completely."""
    found: dict[str, Digest] = {}
    for keys in _batches(identity_keys):
        query = select(IdentityRow.key, IdentityRow.content).where(IdentityRow.key.in_(keys))
        found |= {key: Digest(content) for key, content in (await session.execute(query)).all()}
    return found


async def copied_chunks(session: ReadSession, identity_key: str) -> dict[int, Digest]:
    """Chunks of a half-copied file that are durable in the store, by index."""
    query = select(CopiedChunkRow.chunk_index, CopiedChunkRow.digest).where(CopiedChunkRow.identity == identity_key)
    return {index: Digest(digest) for index, digest in (await session.execute(query)).all()}


async def record_chunks(session: WriteSession, chunks: Iterable[tuple[str, int, Digest]]) -> None:
    """Remember durable chunks (identity key, index, digest) of files that are being copied."""
    rows = [{"identity": key, "chunk_index": index, "digest": digest.hex} for key, index, digest in chunks]
    await _insert_new(session, CopiedChunkRow, rows)


async def forget_chunks(session: WriteSession, identity_keys: Sequence[str]) -> None:
    """Drop the record of half-copied files: they are complete, or were wrong."""
    for keys in _batches(identity_keys):
        await session.execute(delete(CopiedChunkRow).where(CopiedChunkRow.identity.in_(keys)))


async def record_contents(session: WriteSession, contents: Mapping[str, FileLayout]) -> None:
    """Complete files by identity key: the store holds every chunk, durably."""
    layouts = {layout.digest.hex: layout for layout in contents.values()}
    rows = [
        {"digest": digest, "size": layout.size, "chunks": b"".join(chunk.to_bytes() for chunk in layout.chunks)}
        for digest, layout in layouts.items()
    ]
    await _insert_new(session, ContentRow, rows)
    await _insert_new(
        session, IdentityRow, [{"key": key, "content": layout.digest.hex} for key, layout in contents.items()]
    )
    await forget_chunks(session, list(contents))


async def publish(session: WriteSession, manifest: Manifest, now: float) -> list[Digest]:
    """Make a manifest readable; returns contents that it names and the store no longer holds (then nothing was done)."""
    wanted = [digest.hex for digest in manifest.contents]
    held: set[str] = set()
    for digests in _batches(wanted):
        query = select(ContentRow.digest).where(ContentRow.digest.in_(digests))
        held.update((await session.execute(query)).scalars())
    if lost := [Digest(digest) for digest in wanted if digest not in held]:
        return lost
    row = {
        "digest": manifest.digest.hex,
        "canonical": manifest.canonical,
        "files_total": len(manifest.files),
        "bytes_total": manifest.bytes_total,
        "created_at": now,
        "last_used": now,
    }
    await _insert_new(session, ManifestRow, [row])
    names = [{"manifest": manifest.digest.hex, "content": digest} for digest in wanted]
    await _insert_new(session, ManifestContentRow, names)
    return []


async def manifest(session: ReadSession, digest: str) -> ManifestRow | None:
    """A published manifest."""
    return await session.get(ManifestRow, digest)


async def published(session: ReadSession, digests: Sequence[str]) -> set[str]:
    """Which of these manifests are published."""
    query = select(ManifestRow.digest).where(ManifestRow.digest.in_(digests))
    return set((await session.execute(query)).scalars())


async def manifests(session: ReadSession) -> list[tuple[str, int, int, float]]:
    """Digest, files, bytes and last use of every published manifest, least recently used first."""
    query = select(ManifestRow.digest, ManifestRow.files_total, ManifestRow.bytes_total, ManifestRow.last_used)
    rows = (await session.execute(query.order_by(ManifestRow.last_used))).all()
    return [(row[0], row[1], row[2], row[3]) for row in rows]


async def touch(session: WriteSession, digests: Sequence[str], now: float) -> None:
    """These manifests are used now."""
    await session.execute(update(ManifestRow).where(ManifestRow.digest.in_(digests)).values(last_used=now))


async def layouts(session: ReadSession, manifest_digest: str) -> list[FileLayout]:
    """The layout of each distinct content of a manifest."""
    query = (
        select(ContentRow.digest, ContentRow.size, ContentRow.chunks)
        .join(ManifestContentRow, ManifestContentRow.content == ContentRow.digest)
        .where(ManifestContentRow.manifest == manifest_digest)
        .order_by(ContentRow.digest)
    )
    rows = (await session.execute(query)).all()
    return [FileLayout(Digest(digest), size, split_digests(chunks)) for digest, size, chunks in rows]


async def contents_only_named_by(session: ReadSession, manifest_digests: Sequence[str]) -> dict[str, tuple[int, bytes]]:
    """Size and raw chunk digests of the contents that no manifest outside the given ones names."""
    inside = select(ManifestContentRow.content).where(ManifestContentRow.manifest.in_(manifest_digests))
    outside = select(ManifestContentRow.content).where(ManifestContentRow.manifest.not_in(manifest_digests))
    query = select(ContentRow.digest, ContentRow.size, ContentRow.chunks).where(
        ContentRow.digest.in_(inside), ContentRow.digest.not_in(outside)
    )
    return {digest: (size, chunks) for digest, size, chunks in (await session.execute(query)).all()}


async def chunks_in_use(session: ReadSession, chunks: Iterable[Digest]) -> set[Digest]:
    """Which of these chunks some content, complete or half-copied, still needs. Reads every row: for evictions only."""
    wanted = set(chunks)
    used: set[Digest] = set()
    async for (raw,) in await session.stream(select(ContentRow.chunks)):
        used.update(wanted.intersection(split_digests(raw)))
    for digests in _batches([digest.hex for digest in wanted]):
        query = select(CopiedChunkRow.digest).where(CopiedChunkRow.digest.in_(digests))
        used.update(Digest(digest) for digest in (await session.execute(query)).scalars())
    return used


async def remove(session: WriteSession, manifest_digests: Sequence[str], contents: Sequence[str]) -> None:
    """Unpublish manifests and forget contents, with the identities that led to them."""
    for batch in _batches(manifest_digests):
        await session.execute(delete(ManifestContentRow).where(ManifestContentRow.manifest.in_(batch)))
        await session.execute(delete(ManifestRow).where(ManifestRow.digest.in_(batch)))
    for batch in _batches(contents):
        await session.execute(delete(IdentityRow).where(IdentityRow.content.in_(batch)))
        await session.execute(delete(ContentRow).where(ContentRow.digest.in_(batch)))


async def totals(session: ReadSession) -> tuple[int, int]:
    """How many distinct contents the store holds, and their bytes."""
    query = select(func.count(), func.coalesce(func.sum(ContentRow.size), 0)).select_from(ContentRow)
    count, size = (await session.execute(query)).one()
    return int(count), int(size)


def split_digests(raw: bytes) -> tuple[Digest, ...]:
    """The chunk digests of a ``ContentRow``."""
    return tuple(Digest.from_bytes(raw[start : start + _RAW]) for start in range(0, len(raw), _RAW))


async def _insert_new(session: WriteSession, table: type[Base], rows: Sequence[dict[str, Any]]) -> None:
    """Insert the rows that are not there yet."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    for batch in _batches(rows, max(1, _BATCH // len(rows[0])) if rows else 1):
        await session.execute(dialect.insert(table).values(list(batch)).on_conflict_do_nothing())


def _batches(items: Sequence[_Item], size: int = _BATCH) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
