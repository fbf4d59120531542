"""Files that came with the wrong content: their chunks stay in the store as evidence, and no manifest ever names them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import func, select

from bdn.core.digest import Digest
from bdn.core.errors import ChecksumMismatchError
from bdn.mirror.db.contents import split_digests
from bdn.mirror.db.database import ReadSession, WriteSession
from bdn.mirror.db.tables import QuarantinedFileRow


@dataclass(frozen=True, slots=True)
class WrongFile:
    """What was wrong with which file, and the chunks that came."""

    source: str
    path: str
    size: int
    error: ChecksumMismatchError
    chunks: tuple[Digest, ...]


async def keep(session: WriteSession, mirror_id: str, file: WrongFile) -> str:
    """Remember the evidence, and name it. So long as it is kept, its chunks are not collected."""
    name = f"qua_{secrets.token_hex(12)}"
    session.add(
        QuarantinedFileRow(
            id=name,
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
    return name


async def narrow(session: WriteSession, name: str, right: Collection[Digest]) -> None:
    """Only what is not among these chunks was wrong. Without this, a right chunk would rest for as long as the evidence."""
    row = await session.get(QuarantinedFileRow, name)
    if row is not None:
        row.chunks = b"".join(raw for raw in split_digests(row.chunks) if Digest.from_bytes(raw) not in right)


async def count(session: ReadSession) -> int:
    """How many files are kept."""
    return (await session.execute(select(func.count()).select_from(QuarantinedFileRow))).scalar_one()
