"""Every statement about recorded events: what was decided, and why."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from sqlalchemy import ColumnElement, CursorResult, and_, delete, exists, or_, select, update

from bdn.core.events import Event
from bdn.mirror.db.database import ReadSession, Row, WriteSession, insert_new
from bdn.mirror.db.tables import EventRow, MirrorRow, MirrorSourceRow
from bdn.wire.event_schema import NodeEvent

_DELETED: Final = 5000  # rows that one transaction deletes, so that others may write in between


async def record(session: WriteSession, decided: Sequence[Event], now: float) -> None:
    """Write down what this service decides, in the transaction that carries it out: both are there, or neither."""
    rows = [_row(event) | {"id": f"evt_{secrets.token_hex(12)}", "at": now} for event in decided]
    await insert_new(session, EventRow, rows)


async def is_recorded(session: ReadSession, kind: str, digest: str, since: float) -> bool:
    """Whether this service has recorded such an event about the file, chunk or slab since then."""
    query = select(EventRow.id).where(
        EventRow.digest == digest, EventRow.kind == kind, EventRow.node.is_(None), EventRow.at >= since
    )
    return (await session.execute(query.limit(1))).first() is not None


async def record_of_node(session: WriteSession, cluster: str, node: str, events: Sequence[NodeEvent]) -> None:
    """Write down what an agent has decided. An event that is known already, because the agent repeats it, changes nothing."""
    rows = [_row(event) | {"cluster": cluster, "node": node} for event in events]
    await insert_new(session, EventRow, rows)


def _row(event: Event | NodeEvent) -> Row:
    return {
        "id": event.id,
        "at": event.at,
        "organisation": event.organisation,
        "cluster": None,
        "node": None,
        "kind": event.kind,
        "manifest": event.manifest and event.manifest.removeprefix("b3:"),
        "digest": event.digest and event.digest.removeprefix("b3:"),
        "facts": dict(event.facts),
    }


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events: about any of these manifests, or about this digest alone; None is not asked for."""

    manifests: Sequence[str] | None = None
    digest: str | None = None
    node: str | None = None


async def page(
    session: ReadSession, organisation: str, wanted: Wanted, *, before: tuple[float, str] | None, limit: int
) -> list[Event]:
    """What this organisation may see, newest first, strictly older than ``before`` (time and id).

    It sees what was its own wish, and without the names of others what befell manifests that were ever mirrored for it:
    also one that it may not read any more, because it was evicted, and that is what it asks about.
    """
    query = select(EventRow).where(or_(EventRow.organisation == organisation, _was_mirrored_for(organisation)))
    if wanted.manifests is not None:
        query = query.where(EventRow.manifest.in_(wanted.manifests))
    if wanted.digest is not None:
        query = query.where(EventRow.digest == wanted.digest)
    if wanted.node is not None:
        query = query.where(EventRow.node == wanted.node)
    if before is not None:
        at, event_id = before
        query = query.where(or_(EventRow.at < at, and_(EventRow.at == at, EventRow.id < event_id)))
    query = query.order_by(EventRow.at.desc(), EventRow.id.desc()).limit(limit)
    return [_event(row) for row in (await session.execute(query)).scalars()]


async def redate(session: WriteSession, moment: float, now: float) -> None:
    """What is dated after the moment, by a clock that was far ahead, counts as of now: it would never be old enough to go."""
    await session.execute(update(EventRow).where(EventRow.at > moment).values(at=now))


async def delete_older(session: WriteSession, moment: float) -> bool:
    """Delete some of the events of before then; False when there are no more."""
    oldest = select(EventRow.id).where(EventRow.at < moment).order_by(EventRow.at).limit(_DELETED)
    result = cast("CursorResult[Any]", await session.execute(delete(EventRow).where(EventRow.id.in_(oldest))))
    return result.rowcount == _DELETED


def _was_mirrored_for(organisation: str) -> ColumnElement[bool]:
    mirrored = MirrorSourceRow.manifest == EventRow.manifest
    return exists().where(mirrored, MirrorRow.id == MirrorSourceRow.mirror_id, MirrorRow.organisation == organisation)


def _event(row: EventRow) -> Event:
    return Event(
        kind=row.kind,
        manifest=row.manifest and f"b3:{row.manifest}",
        digest=row.digest and f"b3:{row.digest}",
        organisation=row.organisation,
        facts=row.facts,
        id=row.id,
        at=row.at,
        cluster=row.cluster,
        node=row.node,
    )
