"""Who is at work on mirrors, for those who must not come in between."""

from __future__ import annotations

from sqlalchemy import func, or_, select

from bdn.mirror.db.database import ReadSession
from bdn.mirror.db.mirrors import RUNNING
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow


async def oldest_at_work(session: ReadSession, now: float) -> float | None:
    """When the first of the mirrors began that are being worked on, canceled ones included whose worker is still at it."""
    busy = or_(MirrorRow.status == "SYNCING", MirrorRow.claim_expires_at >= now)
    return (await session.execute(select(func.min(MirrorRow.started_at)).where(busy))).scalar()


async def first_at(session: ReadSession) -> float | None:
    """When the first mirror was asked for."""
    return (await session.execute(select(func.min(MirrorRow.created_at)))).scalar()


async def running_with(session: ReadSession, organisation: str) -> dict[str, list[str]]:
    """Manifests that a mirror which still runs has published already, with the ids of such mirrors."""
    query = (
        select(MirrorSourceRow.manifest, MirrorRow.id)
        .join(MirrorRow, MirrorRow.id == MirrorSourceRow.mirror_id)
        .where(
            MirrorRow.organisation == organisation, MirrorRow.status.in_(RUNNING), MirrorSourceRow.manifest.is_not(None)
        )
        .distinct()
    )
    found: dict[str, list[str]] = {}
    for manifest, mirror_id in (await session.execute(query)).all():
        found.setdefault(str(manifest), []).append(mirror_id)
    return found
