"""Every statement about recorded evictions."""

from __future__ import annotations

from sqlalchemy import select

from bdn.mirror.database import ReadSession, WriteSession
from bdn.mirror.tables import EvictionRow


async def insert(session: WriteSession, row: EvictionRow) -> None:
    """Record a new eviction."""
    session.add(row)
    await session.flush()


async def get(session: ReadSession, eviction_id: str) -> EvictionRow | None:
    """A recorded eviction."""
    return await session.get(EvictionRow, eviction_id)


async def change(session: WriteSession, eviction_id: str) -> EvictionRow | None:
    """A recorded eviction that nobody else changes until this transaction ends: its lists are read and written whole."""
    return await session.get(EvictionRow, eviction_id, with_for_update=True)


async def running(session: ReadSession) -> list[EvictionRow]:
    """Evictions that wait for agents or delete chunks, oldest first."""
    query = select(EvictionRow).where(EvictionRow.status == "RUNNING").order_by(EvictionRow.created_at)
    return list((await session.execute(query)).scalars())


async def unswept(session: ReadSession) -> list[EvictionRow]:
    """Evictions whose chunks may not all be deleted yet: a crash came between."""
    query = select(EvictionRow).where(EvictionRow.doomed.is_not(None))
    return list((await session.execute(query)).scalars())
