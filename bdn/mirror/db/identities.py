"""Every statement about identities: what an upstream says of bytes, and which chunks they were when received.

An identity is a hint, never a reference: a reader acquires its chunks like any others, and reads the file again if they
are gone.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Self

from sqlalchemy import Executable, delete, select

from bdn.core.chunk import Digest
from bdn.mirror.db.database import (
    Dialect,
    ReadSession,
    WriteSession,
    batches,
    delete_in,
    dialect_of,
    insert,
    insert_new,
    select_in,
)
from bdn.mirror.db.tables import IdentityRow

RAW: Final = 32  # bytes of a raw digest
NOT_YET: Final = bytes(RAW)  # in place of a missing chunk
_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an identity.

    For a file, ``digest`` is the file's, None while chunks are missing, and ``raw`` are its chunks, ``NOT_YET`` for
    each missing one. For a slab, ``digest`` is the slab's, and ``raw`` are the digests of the files in it.
    """

    key: str
    size: int
    digest: Digest | None
    raw: bytes
    is_slab: bool = False

    @property
    def chunks(self) -> dict[int, Digest]:
        if self.is_slab:
            return {} if self.digest is None else {0: self.digest}
        return {index: digest for index, digest in enumerate(self.digests()) if digest is not None}

    def digests(self) -> Iterator[Digest | None]:
        for at in range(0, len(self.raw), RAW):
            raw = self.raw[at : at + RAW]
            yield None if raw == NOT_YET else Digest.from_bytes(raw)

    def without(self, missing: AbstractSet[Digest]) -> Self | None:
        """What is known without these chunks; None if nothing is left."""
        if missing.isdisjoint(self.chunks.values()):
            return self
        left = [NOT_YET if one is None or one in missing else one.to_bytes() for one in self.digests()]
        if self.is_slab or not any(one != NOT_YET for one in left):
            return None
        return replace(self, digest=None, raw=b"".join(left))


async def find(session: ReadSession, keys: Sequence[str]) -> dict[str, Known]:
    query = select(IdentityRow.key, IdentityRow.size, IdentityRow.digest, IdentityRow.chunks, IdentityRow.first)
    return {row[0]: _known(*row) async for row in select_in(session, query, IdentityRow.key, keys)}


async def of_content(session: ReadSession, digest: Digest) -> Known | None:
    """Any identity of the file or slab with this digest."""
    query = select(IdentityRow.key, IdentityRow.size, IdentityRow.digest, IdentityRow.chunks, IdentityRow.first)
    row = (await session.execute(query.where(IdentityRow.digest == digest.to_bytes()).limit(1))).one_or_none()
    return None if row is None else _known(*row)


def _known(key: str, size: int, digest: bytes | None, raw: bytes, first: bytes) -> Known:
    is_slab = digest == first and raw != first
    return Known(key, size, None if digest is None else Digest.from_bytes(digest), raw, is_slab)


async def record(session: WriteSession, known: Iterable[Known]) -> None:
    rows = [
        {
            "key": one.key,
            "size": one.size,
            "digest": one.digest and one.digest.to_bytes(),
            "chunks": one.raw,
            "first": one.digest.to_bytes() if one.is_slab and one.digest else one.raw[:RAW],
        }
        for one in known
    ]
    await insert_new(session, IdentityRow, rows, _replacing(dialect_of(session)))


async def forget(session: WriteSession, keys: Sequence[str]) -> None:
    await delete_in(session, IdentityRow.key, keys)


async def prune(session: WriteSession, chunks: Collection[Digest]) -> None:
    """Delete the identities whose first chunk, or slab, was collected."""
    for some in batches([chunk.to_bytes() for chunk in chunks], _AT_ONCE):
        await session.execute(delete(IdentityRow).where(IdentityRow.first.in_(some)))


@cache
def _replacing(dialect: Dialect) -> Executable:
    newer = insert(dialect, IdentityRow)
    changed: dict[str, Any] = {name: newer.excluded[name] for name in ("size", "digest", "chunks", "first")}
    return newer.on_conflict_do_update(index_elements=["key"], set_=changed)
