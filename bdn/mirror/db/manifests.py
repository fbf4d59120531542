"""Every statement about published manifests, and how their documents are read from the store."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import delete, select, update

from bdn.core.chunk import Digest, MalformedDocumentError, digest_of
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.manifest import PageRef, Root
from bdn.core.store import ChunkStore
from bdn.mirror.db import chunks
from bdn.mirror.db.database import Database, ReadSession, WriteSession, batches, insert_new, select_in
from bdn.mirror.db.recall import USE_SECONDS
from bdn.mirror.db.tables import ManifestRow

_AT_ONCE: Final = 500


class DocumentDamagedError(StoreUnavailableError):
    """The store answers, but does not hold the right bytes of this root or page."""

    chunk: str


async def get(session: ReadSession, digest: str) -> ManifestRow | None:
    return await session.get(ManifestRow, digest)


async def publish(session: WriteSession, set_id: int, root: Root, now: float) -> None:
    """Make a manifest of the set. If the same manifest is published already, end the set instead.

    The set refers to all chunks of the manifest, its pages and its root. Raises ``SetEndedError``.
    """
    name = root.digest.hex
    row = {
        "digest": name,
        "set_id": set_id,
        "files_total": root.files_total,
        "bytes_total": root.bytes_total,
        "created_at": now,
        "last_used": now,
    }
    # The SELECT waits for a collection that drops the manifest. Then the row is gone, and another worker may insert it first.
    kept = select(ManifestRow.set_id).where(ManifestRow.digest == name).with_for_update()
    found: int | None = None
    while found is None:
        await insert_new(session, ManifestRow, [row])
        found = (await session.execute(kept)).scalar()
    if found == set_id:
        await chunks.of(session, chunks.publish, set_id)
    else:
        await chunks.of(session, chunks.end, [set_id], chunks.NO_GRACE)  # the other set has the same chunks
        await touch(session, [name], now)


async def lock(session: WriteSession, digests: Sequence[str]) -> set[str]:
    """Lock these manifests. Returns the published ones.

    Until commit no other transaction publishes one anew, drops it, gives it up or restores it.
    """
    locked = select(ManifestRow.digest).order_by(ManifestRow.digest).with_for_update()
    found: set[str] = set()
    for some in batches(sorted(digests), _AT_ONCE):
        found.update((await session.execute(locked.where(ManifestRow.digest.in_(some)))).scalars())
    return found


async def set_ids(session: ReadSession, digests: Sequence[str]) -> dict[str, int]:
    """The set of each of these manifests that is published."""
    query = select(ManifestRow.digest, ManifestRow.set_id)
    return {name: set_id async for name, set_id in select_in(session, query, ManifestRow.digest, digests)}


async def drop(session: WriteSession, digests: Sequence[str]) -> list[str]:
    """Unpublish manifests that no organisation may read. Returns the ones that were published.

    The next collection deletes their chunks.
    """
    dropped: list[str] = []
    for some in batches(digests, _AT_ONCE):
        gone = delete(ManifestRow).where(ManifestRow.digest.in_(some)).returning(ManifestRow.digest, ManifestRow.set_id)
        rows = (await session.execute(gone)).all()
        await chunks.of(session, chunks.end, [set_id for _, set_id in rows], chunks.NO_GRACE)
        dropped += [name for name, _ in rows]
    return dropped


async def touch(session: WriteSession, digests: Sequence[str], now: float) -> None:
    """Record that these manifests are used now, as far as they are published."""
    for some in batches(sorted(digests), _AT_ONCE):
        statement = update(ManifestRow).where(ManifestRow.digest.in_(some), ManifestRow.last_used <= now - USE_SECONDS)
        await session.execute(statement.values(last_used=now))


async def note_use(database: Database, digest: str, now: float) -> None:
    """``touch`` for one manifest. Opens no write session unless there is a use to record."""
    async with database.read() as session:
        row = await get(session, digest)
    if row is not None and row.last_used <= now - USE_SECONDS:
        async with database.write() as session:
            await touch(session, [digest], now)


# --- documents, in the store; blocking ---


def root_of(store: ChunkStore, digest: Digest, reader: str | None = None) -> Root:
    """The root of a published manifest; ``reader`` as in ``ChunkStore.open``. Raises ``DocumentDamagedError``."""
    try:
        return Root.parse(document(store, digest, reader))
    except MalformedDocumentError as error:
        raise DocumentDamagedError(str(error), str(digest)) from error


def document(store: ChunkStore, digest: Digest, reader: str | None = None) -> bytes:
    """A root or a page, verified. Raises ``DocumentDamagedError``."""
    try:
        with store.open(digest, reader=reader) as file:
            content = file.read()
    except NotFoundError as error:
        raise DocumentDamagedError(f"{error.what} is missing", str(digest)) from error
    except OSError as error:
        raise DocumentDamagedError(f"document {digest} cannot be read ({error.strerror})", str(digest)) from error
    if digest_of(content) != digest:
        raise DocumentDamagedError(f"document {digest} does not match its digest", str(digest))
    return content


def page(store: ChunkStore, ref: PageRef, reader: str | None = None) -> bytes:
    return document(store, ref.digest, reader)
