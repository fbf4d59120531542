"""Files that came with the wrong content: their chunks stay in the store as evidence, and no manifest ever names them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import func, select

from bdn.core.digest import Digest
from bdn.core.errors import ChecksumMismatchError
from bdn.mirror.database import ReadSession, WriteSession
from bdn.mirror.repository.layouts import split_digests
from bdn.mirror.tables import QuarantinedFileRow


@dataclass(frozen=True, slots=True)
class WrongFile:
    """What was wrong with which file, and the chunks that came."""

    source: str
    path: str
    size: int
    error: ChecksumMismatchError
    chunks: tuple[Digest, ...]


async def keep(session: WriteSession, mirror_id: str, file: WrongFile) -> None:
    """Remember the evidence. From now on an eviction leaves its chunks alone."""
    session.add(
        QuarantinedFileRow(
            id=f"qua_{secrets.token_hex(12)}",
            created_at=time.time(),
            mirror_id=mirror_id,
            source=file.source,
            path=file.path,
            size=file.size,
            expected=file.error.expected,
            actual=file.error.actual,
            chunks=b"".join(chunk.to_bytes() for chunk in file.chunks),
        )
    )
    await session.flush()


async def chunks_kept(session: ReadSession, chunks: Collection[bytes]) -> set[bytes]:
    """Which of these chunks are evidence."""
    kept: set[bytes] = set()
    async for (raw,) in await session.stream(select(QuarantinedFileRow.chunks)):
        kept.update(set(split_digests(raw)).intersection(chunks))
    return kept


async def count(session: ReadSession) -> int:
    """How many files are kept."""
    return (await session.execute(select(func.count()).select_from(QuarantinedFileRow))).scalar_one()
