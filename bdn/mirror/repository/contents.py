"""Every statement about what the store holds: contents, manifests, upstream identities, half-copied files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, TypeVar

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import aliased

from bdn.core.digest import Digest
from bdn.core.layout import FileLayout
from bdn.core.manifest import Manifest
from bdn.mirror.database import ReadSession, WriteSession
from bdn.mirror.repository.dialects import insert
from bdn.mirror.tables import Base, ContentRow, CopiedChunkRow, IdentityRow, ManifestContentRow, ManifestRow

_BATCH: Final = 250  # rows per statement: SQLite allowed 999 bound parameters for a long time
_INSERTED: Final = 1000  # rows given to the driver at once, so that others get the event loop in between
_RAW: Final = 32  # bytes of a raw digest
_Item = TypeVar("_Item")


async def known(session: ReadSession, identity_keys: Sequence[str]) -> dict[str, Digest]:
    """Content by identity key, for the identities that the store holds completely."""
    found: dict[str, Digest] = {}
    for keys in _batches(identity_keys):
        query = select(IdentityRow.key, IdentityRow.content).where(IdentityRow.key.in_(keys))
        found |= {key: Digest(content) for key, content in (await session.execute(query)).all()}
    return found


async def layout_by_identity(session: ReadSession, identity_key: str) -> FileLayout | None:
    """The content that an identity maps to, when the store holds it completely."""
    query = (
        select(ContentRow.digest, ContentRow.size, ContentRow.chunks)
        .join(IdentityRow, IdentityRow.content == ContentRow.digest)
        .where(IdentityRow.key == identity_key)
    )
    row = (await session.execute(query)).one_or_none()
    if row is None:
        return None
    return FileLayout(Digest(row[0]), row[1], tuple(map(Digest.from_bytes, split_digests(row[2]))))


async def half_copied(session: ReadSession, identity_keys: Sequence[str]) -> dict[str, list[int]]:
    """Which chunks of half-copied files are durable in the store, by identity key."""
    found: dict[str, list[int]] = {}
    for keys in _batches(identity_keys):
        query = select(CopiedChunkRow.identity, CopiedChunkRow.chunk_index).where(CopiedChunkRow.identity.in_(keys))
        for key, index in (await session.execute(query)).all():
            found.setdefault(key, []).append(index)
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
    if await published(session, [manifest.digest.hex]):  # what a published manifest names is never removed without it
        await touch(session, [manifest.digest.hex], now)
        return []
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
    found: set[str] = set()
    for batch in _batches(digests):
        query = select(ManifestRow.digest).where(ManifestRow.digest.in_(batch))
        found.update((await session.execute(query)).scalars())
    return found


async def manifests(session: ReadSession) -> list[tuple[str, int, int, float]]:
    """Digest, files, bytes and last use of every published manifest, least recently used first."""
    query = select(ManifestRow.digest, ManifestRow.files_total, ManifestRow.bytes_total, ManifestRow.last_used)
    rows = (await session.execute(query.order_by(ManifestRow.last_used))).all()
    return [(row[0], row[1], row[2], row[3]) for row in rows]


async def touch(session: WriteSession, digests: Sequence[str], now: float) -> None:
    """These manifests are used now."""
    await session.execute(update(ManifestRow).where(ManifestRow.digest.in_(digests)).values(last_used=now))


async def layouts(session: ReadSession, manifest_digest: str) -> list[tuple[str, int, bytes]]:
    """Digest, size and raw chunk digests of each distinct content of a manifest."""
    query = (
        select(ContentRow.digest, ContentRow.size, ContentRow.chunks)
        .join(ManifestContentRow, ManifestContentRow.content == ContentRow.digest)
        .where(ManifestContentRow.manifest == manifest_digest)
        .order_by(ContentRow.digest)
    )
    return [(row[0], row[1], row[2]) for row in (await session.execute(query)).all()]


async def contents_of(session: ReadSession, manifest_digest: str) -> list[tuple[str, int, int]]:
    """Digest and size of each distinct content of a manifest, and how many manifests name it."""
    other = aliased(ManifestContentRow)
    names = select(func.count()).where(other.content == ManifestContentRow.content).scalar_subquery()
    query = (
        select(ContentRow.digest, ContentRow.size, names)
        .join(ManifestContentRow, ManifestContentRow.content == ContentRow.digest)
        .where(ManifestContentRow.manifest == manifest_digest)
    )
    return [(row[0], row[1], row[2]) for row in (await session.execute(query)).all()]


async def chunks_of(session: ReadSession, content_digests: Sequence[str]) -> set[bytes]:
    """The raw digests of these contents' chunks."""
    chunks: set[bytes] = set()
    for digests in _batches(content_digests):
        query = select(ContentRow.chunks).where(ContentRow.digest.in_(digests))
        for raw in (await session.execute(query)).scalars():
            chunks.update(split_digests(raw))
    return chunks


async def chunks_in_use(session: ReadSession, chunks: set[bytes]) -> set[bytes]:
    """Which of these chunks some content, complete or half-copied, still needs. Reads every row: for evictions only."""
    used: set[bytes] = set()
    async for (raw,) in await session.stream(select(ContentRow.chunks)):
        used.update(chunks.intersection(split_digests(raw)))
    for digests in _batches([raw.hex() for raw in chunks]):
        query = select(CopiedChunkRow.digest).where(CopiedChunkRow.digest.in_(digests))
        used.update(bytes.fromhex(digest) for digest in (await session.execute(query)).scalars())
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


def split_digests(raw: bytes) -> list[bytes]:
    """The raw chunk digests of a ``ContentRow``."""
    return [raw[start : start + _RAW] for start in range(0, len(raw), _RAW)]


async def _insert_new(session: WriteSession, table: type[Base], rows: Sequence[dict[str, Any]]) -> None:
    """Insert the rows that are not there yet; in the order of their keys, so that two writers do not lock crosswise."""
    names = [column.name for column in table.__mapper__.primary_key]
    statement = insert(session, table).on_conflict_do_nothing()
    for batch in _batches(sorted(rows, key=itemgetter(*names)), _INSERTED):
        await session.execute(statement, list(batch))


def _batches(items: Sequence[_Item], size: int = _BATCH) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
