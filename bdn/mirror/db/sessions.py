"""Every statement about log-ins to the operator's page."""

from typing import Final

from sqlalchemy import delete, or_, select

from bdn.mirror.db.database import ReadSession, WriteSession
from bdn.mirror.db.tables import PageSessionRow

_MOST_OF_A_TOKEN: Final = 100  # log-ins; the oldest one ends when another begins


async def add(session: WriteSession, row: PageSessionRow, now: float) -> None:
    """Insert a log-in. Deletes expired ones, and the oldest ones of a token that has too many."""
    newest = select(PageSessionRow.digest).where(PageSessionRow.token == row.token)
    newest = newest.order_by(PageSessionRow.created_at.desc(), PageSessionRow.digest).limit(_MOST_OF_A_TOKEN - 1)
    kept = select(newest.subquery().c.digest)
    is_surplus = (PageSessionRow.token == row.token) & PageSessionRow.digest.not_in(kept)
    await session.execute(delete(PageSessionRow).where(or_(PageSessionRow.expires_at <= now, is_surplus)))
    session.add(row)


async def find(session: ReadSession, digest: str, now: float) -> PageSessionRow | None:
    """The log-in whose id has this SHA-256, unless it has expired."""
    query = select(PageSessionRow).where(PageSessionRow.digest == digest, PageSessionRow.expires_at > now)
    return (await session.execute(query)).scalar()


async def remove(session: WriteSession, digest: str) -> None:
    await session.execute(delete(PageSessionRow).where(PageSessionRow.digest == digest))
