"""Every statement about recorded collections."""

from __future__ import annotations

from sqlalchemy import func, select

from bdn.mirror.db.database import ReadSession, WriteSession
from bdn.mirror.db.tables import CollectionRow


async def insert(session: WriteSession, row: CollectionRow) -> None:
    """Record one that is to be carried out."""
    session.add(row)
    await session.flush()


async def get(session: ReadSession, collection_id: str) -> CollectionRow | None:
    """A recorded collection."""
    return await session.get(CollectionRow, collection_id)


async def open_ones(session: ReadSession) -> list[str]:
    """Those that are to be carried out, oldest first; also what a killed worker had begun."""
    query = select(CollectionRow.id).where(CollectionRow.status == "RUNNING").order_by(CollectionRow.created_at)
    return list((await session.execute(query)).scalars())


async def newest(session: ReadSession, now: float) -> float | None:
    """When one was last asked for that was not only to tell what would go; before a clock was set back does not count."""
    is_real = CollectionRow.request["dry_run"].as_boolean().is_(False)
    query = select(func.max(CollectionRow.created_at)).where(is_real, CollectionRow.created_at <= now)
    return (await session.execute(query)).scalar()
