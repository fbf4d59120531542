"""Every statement about recorded evictions and verifications: what is asked of several, and waits until each has answered."""

from __future__ import annotations

from typing import TypeVar

from sqlalchemy import select

from bdn.mirror.db.database import ReadSession, WriteSession
from bdn.mirror.db.tables import AskedRow

Asked = TypeVar("Asked", bound=AskedRow)


async def insert(session: WriteSession, row: Asked) -> None:
    """Record a new one."""
    session.add(row)
    await session.flush()


async def get(session: ReadSession, table: type[Asked], asked_id: str) -> Asked | None:
    """A recorded one."""
    return await session.get(table, asked_id)


async def change(session: WriteSession, table: type[Asked], asked_id: str) -> Asked | None:
    """A recorded one that nobody else changes until this transaction ends: its lists are read and written whole."""
    return await session.get(table, asked_id, with_for_update=True)


async def running(session: ReadSession, table: type[Asked]) -> list[Asked]:
    """Those that somebody has not answered, oldest first."""
    query = select(table).where(table.status == "RUNNING").order_by(table.created_at)
    return list((await session.execute(query)).scalars())
