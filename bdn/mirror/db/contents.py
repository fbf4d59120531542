"""What the store holds: contents, slabs, manifests, upstream identities, half-copied files.

Where the bytes of a manifest lie is in ``layouts``, what is collected in ``removal``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

from sqlalchemy import and_, delete, func, select, update

from bdn.core.digest import Digest
from bdn.core.manifest import Manifest
from bdn.core.source.upstream import Identity
from bdn.core.store.layout import FileLayout, Slab, Slice
from bdn.core.store.slabs import scope_of
from bdn.mirror.db import damaged, tombstones
from bdn.mirror.db.database import ReadSession, WriteSession, batches, in_key_order, insert, insert_new
from bdn.mirror.db.layouts import chunks_are_sound, is_of, slab_is_sound, split_digests, unreadable
from bdn.mirror.db.tables import (
    ContentRow,
    CopiedChunkRow,
    IdentityRow,
    ManifestContentRow,
    ManifestRow,
    SlabRow,
    SlabScopeRow,
    SlabSliceRow,
)

_UPSERTED: Final = 1000  # rows given to the driver at once, so that others get the event loop in between


async def known(session: ReadSession, identity_keys: Sequence[str]) -> dict[str, Digest]:
    """Content by identity key, for the identities that the store holds completely."""
    found: dict[str, Digest] = {}
    for keys in batches(identity_keys):
        query = select(IdentityRow.key, IdentityRow.content).where(IdentityRow.key.in_(keys))
        found |= {key: Digest(content) for key, content in (await session.execute(query)).all()}
    return found


async def layout_by_identity(session: ReadSession, identity: Identity) -> FileLayout | None:
    """The content that an identity maps to, when the store holds it completely; of several slabs, one of its scope."""
    query = (
        select(ContentRow.digest, ContentRow.size, ContentRow.chunks, SlabRow, SlabSliceRow.offset)
        .join(IdentityRow, IdentityRow.content == ContentRow.digest)
        .outerjoin(
            SlabSliceRow,
            and_(
                SlabSliceRow.content == ContentRow.digest,
                ContentRow.chunks == b"",
                is_of(identity.scope),
                slab_is_sound(),
            ),
        )
        .outerjoin(SlabRow, SlabRow.digest == SlabSliceRow.slab)
        .where(IdentityRow.key == identity.key, chunks_are_sound())
        .order_by(SlabRow.digest)
        .limit(1)
    )
    row = (await session.execute(query)).one_or_none()
    if row is None:
        return None
    digest, size, raw, _, offset = row
    slab = cast("SlabRow | None", row[3])
    if slab is None and size and not raw:
        return None  # it rests where this scope may not look
    if slab is None:
        return FileLayout(Digest(digest), size, tuple(map(Digest.from_bytes, split_digests(raw))))
    return FileLayout(Digest(digest), size, (Digest(digest),), Slice(Digest(slab.digest), slab.size, offset))


async def half_copied(session: ReadSession, identity_keys: Sequence[str]) -> dict[str, list[int]]:
    """Which chunks of half-copied files are durable in the store, by identity key."""
    found = {key: list(chunks) for key, chunks in (await damaged.half_copied(session, identity_keys)).items()}
    for keys in batches(identity_keys):
        query = select(CopiedChunkRow.identity, CopiedChunkRow.chunk_index).where(CopiedChunkRow.identity.in_(keys))
        for key, index in (await session.execute(query)).all():
            if index not in found.setdefault(key, []):
                found[key].append(index)
    return found


async def copied_chunks(session: ReadSession, identity_key: str) -> dict[int, Digest]:
    """Chunks of a half-copied file that are durable in the store, by index."""
    query = select(CopiedChunkRow.chunk_index, CopiedChunkRow.digest).where(CopiedChunkRow.identity == identity_key)
    recorded = {index: Digest(digest) for index, digest in (await session.execute(query)).all()}
    return (await damaged.half_copied(session, [identity_key])).get(identity_key, {}) | recorded


async def record_chunks(session: WriteSession, chunks: Iterable[tuple[str, int, Digest]], now: float) -> None:
    """Remember durable chunks (identity key, index, digest) of files that are being copied."""
    rows = [
        {"identity": key, "chunk_index": index, "digest": digest.hex, "recorded_at": now}
        for key, index, digest in chunks
    ]
    await insert_new(session, CopiedChunkRow, rows)


async def renew_chunks(session: WriteSession, identity_key: str, now: float) -> None:
    """A half-copied file is gone on with: the record of its chunks is as good as new."""
    await session.execute(update(CopiedChunkRow).where(CopiedChunkRow.identity == identity_key).values(recorded_at=now))


async def forget_chunks(session: WriteSession, identity_keys: Sequence[str]) -> None:
    """Drop the record of half-copied files: they are complete, or were wrong."""
    for keys in batches(identity_keys):
        await session.execute(delete(CopiedChunkRow).where(CopiedChunkRow.identity.in_(keys)))


async def record_slabs(session: WriteSession, slabs: Iterable[Slab]) -> None:
    """Slabs that the store holds, durably. Their slices come with ``record_contents``, in the same transaction."""
    found = list(slabs)
    sizes = {slab.digest.hex: slab.size for slab in found}
    await insert_new(session, SlabRow, [{"digest": digest, "size": size} for digest, size in sizes.items()])
    scopes = {(slab.digest.hex, slab.scope) for slab in found}
    await insert_new(session, SlabScopeRow, [{"slab": digest, "scope": scope} for digest, scope in scopes])


async def record_contents(session: WriteSession, contents: Mapping[str, FileLayout], now: float) -> None:
    """Complete files by identity key: the store holds every chunk, or the slab, durably.

    A content that is known already gets what is new about it: its chunks, or a further slice. So whatever scope an
    identity is of, its content is whole by itself or has a slice in a slab of that scope.
    """
    layouts = {(layout.digest.hex, layout.slice and layout.slice.slab.hex): layout for layout in contents.values()}
    packed = {digest: layout for (digest, _), layout in layouts.items() if layout.slice}
    whole = {digest: layout for (digest, _), layout in layouts.items() if not layout.slice}
    await insert_new(
        session,
        ContentRow,
        [
            {"digest": digest, "size": layout.size, "chunks": b"", "recorded_at": now}
            for digest, layout in packed.items()
        ],
    )
    await _record_whole(session, list(whole.values()), now)
    await record_slices(session, layouts.values())
    await insert_new(
        session, IdentityRow, [{"key": key, "content": layout.digest.hex} for key, layout in contents.items()]
    )
    await forget_chunks(session, [key for key, layout in contents.items() if not layout.slice])
    await damaged.note_contents(session, whole.values())


async def record_slices(session: WriteSession, layouts: Iterable[FileLayout]) -> None:
    """Where contents lie in slabs that are recorded already; those with chunks of their own are passed over."""
    slices = [
        {"content": layout.digest.hex, "slab": layout.slice.slab.hex, "offset": layout.slice.offset}
        for layout in layouts
        if layout.slice
    ]
    await insert_new(session, SlabSliceRow, slices)


async def _record_whole(session: WriteSession, layouts: Sequence[FileLayout], now: float) -> None:
    """Contents with chunks of their own, also where so far they rested in a slab only."""
    rows = [
        {
            "digest": layout.digest.hex,
            "size": layout.size,
            "chunks": b"".join(chunk.to_bytes() for chunk in layout.chunks),
            "recorded_at": now,
        }
        for layout in layouts
    ]
    fresh = insert(session, ContentRow)
    statement = fresh.on_conflict_do_update(
        index_elements=[ContentRow.digest],
        set_={"chunks": fresh.excluded.chunks},
        where=and_(ContentRow.chunks == b"", fresh.excluded.chunks != b""),
    )
    for batch in batches(in_key_order(ContentRow, rows), _UPSERTED):
        await session.execute(statement, list(batch))


async def publish(session: WriteSession, manifest: Manifest, now: float, organisation: str) -> list[Digest]:
    """Make a manifest readable for an organisation, also when it gave it up earlier.

    Returns contents that it names and that the store no longer holds, or holds in nobody's slab that this organisation
    may read; then nothing was done.
    """
    wanted = [digest.hex for digest in manifest.contents]
    # What a published manifest names is never removed without it; but it may have been published for somebody else.
    is_known = await session.get(ManifestRow, manifest.digest.hex) is not None
    names = manifest.digest.hex if is_known else wanted
    if lost := await unreadable(session, names, scope_of(organisation)):
        return [Digest(digest) for digest in lost]
    await tombstones.lift(session, organisation, manifest.digest.hex)
    if is_known:
        await touch(session, [manifest.digest.hex], now)
        return []
    row = {
        "digest": manifest.digest.hex,
        "canonical": manifest.canonical,
        "files_total": len(manifest.files),
        "bytes_total": manifest.bytes_total,
        "created_at": now,
        "last_used": now,
    }
    await insert_new(session, ManifestRow, [row])
    await insert_new(
        session, ManifestContentRow, [{"manifest": manifest.digest.hex, "content": digest} for digest in wanted]
    )
    return []


async def manifest(session: ReadSession, digest: str) -> ManifestRow | None:
    """A published manifest."""
    return await session.get(ManifestRow, digest)


async def manifests(session: ReadSession) -> list[tuple[str, int, int, float]]:
    """Digest, files, bytes and last use of every published manifest, least recently used first."""
    query = select(ManifestRow.digest, ManifestRow.files_total, ManifestRow.bytes_total, ManifestRow.last_used)
    rows = (await session.execute(query.order_by(ManifestRow.last_used))).all()
    return [(row[0], row[1], row[2], row[3]) for row in rows]


async def touch(session: WriteSession, digests: Sequence[str], now: float) -> None:
    """These manifests are used now."""
    await session.execute(update(ManifestRow).where(ManifestRow.digest.in_(digests)).values(last_used=now))


async def totals(session: ReadSession) -> tuple[int, int]:
    """How many distinct contents the store holds, and their bytes."""
    query = select(func.count(), func.coalesce(func.sum(ContentRow.size), 0)).select_from(ContentRow)
    count, size = (await session.execute(query)).one()
    return int(count), int(size)
