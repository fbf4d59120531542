"""Recorded events: what agents and the mirror have decided, and why, for as long as they are kept."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, or_, select, update

from bdn.core.errors import Fact
from bdn.core.events import Event
from bdn.mirror.db.database import Cursor, Database, ReadSession, Values, WriteSession, changed, insert_new, newest
from bdn.mirror.db.mirrors import is_mirrored_for
from bdn.mirror.db.tables import EventRow
from bdn.wire.event_schema import EventDocument, NodeEvent

_AHEAD_SECONDS: Final = 86400.0  # an agent's clock may be ahead of ours by so much
_DELETED: Final = 5000  # rows per transaction, so that other writers get their turns


def event_of(
    kind: str,
    facts: Mapping[str, Fact],
    manifest: str,
    *,
    digest: str | None = None,
    organisation: str | None = None,
) -> Event:
    """An event of this service. Digests are as in the database, without ``b3:``."""
    named = digest and f"b3:{digest}"
    return Event.of(kind, facts, manifest=f"b3:{manifest}", digest=named, organisation=organisation)


async def record(session: WriteSession, now: float, decided: Iterable[Event]) -> None:
    """Record what this service decides, in the transaction that carries it out: both are committed, or neither."""
    rows = [_row(event) | {"id": f"evt_{secrets.token_hex(12)}", "at": now} for event in decided]
    await insert_new(session, EventRow, rows)


async def is_recorded(session: ReadSession, kind: str, digest: str, since: float) -> bool:
    """Whether this service has recorded such an event about the file, chunk or slab since then."""
    query = select(EventRow.id).where(
        EventRow.digest == digest, EventRow.kind == kind, EventRow.node.is_(None), EventRow.at >= since
    )
    return (await session.execute(query.limit(1))).first() is not None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A filter: events of any of these manifests, of this digest, from this node. None does not filter."""

    manifests: Sequence[str] | None = None
    digest: str | None = None
    node: str | None = None


@dataclass(frozen=True)
class Events:
    database: Database
    keep_seconds: float
    clock: Callable[[], float]

    async def record(self, cluster: str, node: str, reported: Sequence[NodeEvent]) -> None:
        """Store the events of an agent; they are durable when this returns. A repeated event changes nothing.

        An event from a clock that is far off is dated anew: after a refusal the agent would report it forever.
        """
        if reported:
            now = self.clock()
            rows = [
                _row(event) | {"cluster": cluster, "node": node, "at": _believable(event.at, now)} for event in reported
            ]
            async with self.database.write() as session:
                await insert_new(session, EventRow, rows)

    async def page(
        self, organisation: str, wanted: Wanted, before: Cursor | None, limit: int
    ) -> tuple[list[EventDocument], Cursor | None]:
        """What the organisation may see, newest first, and the cursor of the next page (None on the last one).

        It sees events of its own requests and, without the names of other organisations, events of manifests that were
        ever mirrored for it: including evicted ones, which it may not read any more, but whose eviction it may want
        explained.
        """
        is_theirs = is_mirrored_for(organisation, EventRow.manifest)
        query = select(EventRow).where(or_(EventRow.organisation == organisation, is_theirs))
        if wanted.manifests is not None:
            query = query.where(EventRow.manifest.in_(wanted.manifests))
        if wanted.digest is not None:
            query = query.where(EventRow.digest == wanted.digest)
        if wanted.node is not None:
            query = query.where(EventRow.node == wanted.node)
        async with self.database.read() as session:
            found, following = await newest(session, query, (EventRow.at, EventRow.id), before, limit)
        seen = [one for row in found if (one := _event(row).seen_by(organisation)) is not None]
        return [EventDocument.of(one) for one in seen], following

    async def expire(self) -> None:
        """Delete events that are too old.

        Events dated so far ahead that they would outlive all events decided from now on are dated anew.
        """
        now, deleted = self.clock(), _DELETED
        async with self.database.write() as session:
            await session.execute(update(EventRow).where(EventRow.at > now + self.keep_seconds).values(at=now))
        while deleted == _DELETED:
            old = select(EventRow.id).where(EventRow.at < self.clock() - self.keep_seconds)
            # Skips rows that another process deletes now.
            oldest = old.order_by(EventRow.at).limit(_DELETED).with_for_update(skip_locked=True)
            async with self.database.write() as session:
                deleted = await changed(session, delete(EventRow).where(EventRow.id.in_(oldest)))


def _believable(at: float, now: float) -> float:
    """The event's time; now if its clock is too far ahead, 0 if the time is negative."""
    return max(at, 0.0) if at <= now + _AHEAD_SECONDS else now


def _row(event: Event | NodeEvent) -> Values:
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
