"""Every statement about prefetches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from sqlalchemy import CursorResult, or_, select, update

from bdn.mirror.db.database import ReadSession, WriteSession
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow, PrefetchNodeRow, PrefetchRow

_OPEN: Final = ("PENDING", "RUNNING")


async def insert(session: WriteSession, row: PrefetchRow, nodes: Sequence[PrefetchNodeRow]) -> None:
    """Record a new prefetch with its nodes."""
    session.add(row)
    await session.flush()
    session.add_all(nodes)
    await session.flush()


async def newest_ready(session: ReadSession, organisation: str, source: str) -> MirrorSourceRow | None:
    """What a source was last mirrored as. One that names no revision means its default, or else the newest of any."""
    name = source.rstrip("/")
    is_revision = MirrorSourceRow.source.startswith(f"{name}@", autoescape=True)
    query = (
        select(MirrorSourceRow)
        .join(MirrorRow, MirrorRow.id == MirrorSourceRow.mirror_id)
        .where(
            MirrorRow.organisation == organisation,
            or_(MirrorSourceRow.source.in_([source, name]), is_revision),
            MirrorSourceRow.status == "READY",
        )
        .order_by(is_revision, MirrorRow.created_at.desc(), MirrorSourceRow.position)
        .limit(1)
    )
    return (await session.execute(query)).scalar()


async def get(session: ReadSession, prefetch_id: str) -> PrefetchRow | None:
    """A recorded prefetch."""
    return await session.get(PrefetchRow, prefetch_id)


async def nodes_of(session: ReadSession, prefetch_id: str) -> list[PrefetchNodeRow]:
    """Its nodes in the order of their names."""
    query = select(PrefetchNodeRow).where(PrefetchNodeRow.prefetch == prefetch_id)
    return list((await session.execute(query.order_by(PrefetchNodeRow.cluster, PrefetchNodeRow.node))).scalars())


async def open_parts(session: ReadSession) -> list[tuple[str, str, str]]:
    """Cluster, node and prefetch of everything that is still to be done, oldest first."""
    query = (
        select(PrefetchNodeRow.cluster, PrefetchNodeRow.node, PrefetchNodeRow.prefetch)
        .join(PrefetchRow, PrefetchRow.id == PrefetchNodeRow.prefetch)
        .where(PrefetchNodeRow.state.in_(_OPEN))
        .order_by(PrefetchRow.created_at)
    )
    return [(cluster, node, prefetch) for cluster, node, prefetch in (await session.execute(query)).all()]


async def set_part(
    session: WriteSession,
    prefetch_id: str,
    cluster: str,
    node: str,
    **values: Any,  # noqa: ANN401 - columns of any type
) -> bool:
    """Set columns of a part that is still to be done; False when there is none: what has ended stays."""
    statement = update(PrefetchNodeRow).where(
        PrefetchNodeRow.prefetch == prefetch_id,
        PrefetchNodeRow.cluster == cluster,
        PrefetchNodeRow.node == node,
        PrefetchNodeRow.state.in_(_OPEN),
    )
    return cast("CursorResult[Any]", await session.execute(statement.values(**values))).rowcount > 0


async def finish(session: WriteSession, prefetch_id: str, status: str, now: float) -> None:
    """Close a prefetch that is running; one that has ended stays."""
    statement = update(PrefetchRow).where(PrefetchRow.id == prefetch_id, PrefetchRow.status == "RUNNING")
    await session.execute(statement.values(status=status, completed_at=now))
