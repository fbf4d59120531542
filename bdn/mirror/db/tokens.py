"""Every statement about tokens."""

from __future__ import annotations

from sqlalchemy import select, update

from bdn.mirror.db.database import ReadSession, WriteSession
from bdn.mirror.db.tables import TokenRow


async def insert(session: WriteSession, row: TokenRow) -> None:
    """Record a new token."""
    session.add(row)
    await session.flush()


async def by_digest(session: ReadSession, digest: str) -> TokenRow | None:
    """The token with this SHA-256, whatever became of it."""
    return (await session.execute(select(TokenRow).where(TokenRow.digest == digest))).scalar()


async def all_tokens(session: ReadSession) -> list[TokenRow]:
    """Every token that was ever made, oldest first."""
    return list((await session.execute(select(TokenRow).order_by(TokenRow.created_at, TokenRow.id))).scalars())


async def revoke(session: WriteSession, token_id: str, now: float) -> TokenRow | None:
    """From now on it is good for nothing; one that was revoked before stays so. None when there is no such token."""
    statement = update(TokenRow).where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None)).values(revoked_at=now)
    await session.execute(statement)
    return await session.get(TokenRow, token_id)
