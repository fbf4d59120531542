"""Every statement about how far the scrub is."""

from __future__ import annotations

from typing import Final

from bdn.mirror.db.database import ReadSession, WriteSession
from bdn.mirror.db.tables import ScrubRow

_STORE: Final = "store"


async def get(session: ReadSession) -> ScrubRow | None:
    """None when it never began."""
    return await session.get(ScrubRow, _STORE)


async def save(session: WriteSession, *, started_at: float, completed_at: float | None, cursor: str | None) -> None:
    """It is so far now."""
    await session.merge(ScrubRow(name=_STORE, started_at=started_at, completed_at=completed_at, cursor=cursor))
    await session.flush()
