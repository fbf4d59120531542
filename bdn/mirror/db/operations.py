"""Every statement about operations: what was asked of agents and of the mirror's store, and what each of them answered."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import exists, func, select, update

from bdn.mirror.db.database import ReadSession, WriteSession, batches, changed, tell
from bdn.mirror.db.tables import MirrorRow, OperationPartRow, OperationRow
from bdn.mirror.db.waiting import asked_topic

MIRROR: Final = "mirror"  # the node of the mirror's own part, whose cluster is ""
ANY: Final = ""  # the node of a part that is for whichever agent of a cluster does it first
OPEN: Final = ("PENDING", "RUNNING")
Who = tuple[str, str]  # the cluster and the node of a part


async def insert(session: WriteSession, row: OperationRow, parts: Sequence[OperationPartRow]) -> None:
    """Record a new operation, with the part of each that it is asked of."""
    session.add(row)
    await session.flush()
    session.add_all(parts)
    await session.flush()
    if any(part.node == MIRROR and not part.cluster for part in parts):
        tell(session, asked_topic(row.kind))


async def get(session: ReadSession, operation_id: str) -> OperationRow | None:
    """A recorded operation."""
    return await session.get(OperationRow, operation_id, populate_existing=True)


async def parts_of(session: ReadSession, operation_id: str) -> list[OperationPartRow]:
    """Its parts in the order of their names, the mirror's own first."""
    query = select(OperationPartRow).where(OperationPartRow.operation == operation_id)
    query = query.order_by(OperationPartRow.cluster, OperationPartRow.node)
    return list((await session.execute(query, execution_options={"populate_existing": True})).scalars())


async def is_open(session: ReadSession, operation_id: str) -> bool:
    """Whether somebody has to answer. One look into an index."""
    is_waited_for = exists().where(OperationPartRow.operation == operation_id, OperationPartRow.state.in_(OPEN))
    return bool((await session.execute(select(is_waited_for))).scalar())


async def waited_for(session: ReadSession, operation_id: str) -> list[Who]:
    """Who has to answer, without what they have answered so far."""
    query = select(OperationPartRow.cluster, OperationPartRow.node)
    query = query.where(OperationPartRow.operation == operation_id, OperationPartRow.state.in_(OPEN))
    return [(cluster, node) for cluster, node in await session.execute(query)]


async def open_of_agents(session: ReadSession) -> dict[Who, list[OperationRow]]:
    """By cluster and node what agents have not answered, oldest first."""
    query = select(OperationPartRow.cluster, OperationPartRow.node, OperationPartRow.operation)
    query = query.where(OperationPartRow.state.in_(OPEN), OperationPartRow.cluster != "")
    agents: defaultdict[str, list[Who]] = defaultdict(list)
    for cluster, node, operation_id in (await session.execute(query)).all():
        agents[operation_id].append((cluster, node))
    found: defaultdict[Who, list[OperationRow]] = defaultdict(list)
    rows = select(OperationRow).where(OperationRow.id.in_(agents)).order_by(OperationRow.created_at)
    for row in (await session.execute(rows)).scalars() if agents else ():
        for agent in agents[row.id]:
            found[agent].append(row)
    return found


async def open_of_mirror(session: ReadSession, kind: str) -> list[OperationRow]:
    """Operations of this kind whose part of the mirror's is not over, oldest first; also what a killed worker had begun."""
    query = select(OperationRow).join(OperationPartRow, OperationPartRow.operation == OperationRow.id)
    query = query.where(OperationRow.kind == kind, OperationPartRow.cluster == "", OperationPartRow.state.in_(OPEN))
    return list((await session.execute(query.order_by(OperationRow.created_at))).scalars())


async def set_part(
    session: WriteSession,
    operation_id: str,
    cluster: str,
    node: str,
    **values: Any,  # noqa: ANN401 - columns of any type
) -> bool:
    """Set columns of a part that is open; False when there is none: what has ended stays."""
    statement = update(OperationPartRow).where(
        OperationPartRow.operation == operation_id,
        OperationPartRow.cluster == cluster,
        OperationPartRow.node == node,
        OperationPartRow.state.in_(OPEN),
    )
    statement = statement.execution_options(synchronize_session=False)
    return await changed(session, statement.values(**values)) > 0


async def give_up(session: WriteSession, operation_id: str, who: Sequence[Who]) -> None:
    """Those of these parts that are open are UNREACHABLE; a statement for many."""
    nodes: defaultdict[str, list[str]] = defaultdict(list)
    for cluster, node in who:
        nodes[cluster].append(node)
    for cluster in sorted(nodes):
        for batch in batches(sorted(nodes[cluster])):
            statement = update(OperationPartRow).where(
                OperationPartRow.operation == operation_id,
                OperationPartRow.cluster == cluster,
                OperationPartRow.node.in_(batch),
                OperationPartRow.state.in_(OPEN),
            )
            statement = statement.execution_options(synchronize_session=False)
            await session.execute(statement.values(state="UNREACHABLE"))


async def lock_mirrors_part(session: WriteSession, operation_id: str) -> OperationPartRow | None:
    """The mirror's own part, if it is open, which nobody else changes until this transaction ends."""
    part = await session.get(OperationPartRow, (operation_id, "", MIRROR), with_for_update=True)
    return part if part is not None and part.state in OPEN else None


async def finish(session: WriteSession, operation_id: str, status: str, now: float) -> None:
    """Close an operation that is running; one that has ended stays."""
    statement = update(OperationRow).where(OperationRow.id == operation_id, OperationRow.status == "RUNNING")
    statement = statement.execution_options(synchronize_session=False)
    await session.execute(statement.values(status=status, completed_at=now))
    tell(session, operation_id)


async def last_collection(session: ReadSession, now: float) -> float | None:
    """When one was last asked for that was not only to tell what would go, or for orphans; before a clock was set back does not count.

    Where none was, when the first mirror was asked for: before that there is nothing to collect.
    """
    is_real = OperationRow.request["dry_run"].as_boolean().is_(False)
    is_of_all = OperationRow.request["orphans"].as_boolean().is_(False)
    newest = select(func.max(OperationRow.created_at))
    newest = newest.where(OperationRow.kind == "collection", is_real, is_of_all, OperationRow.created_at <= now)
    first = select(func.min(MirrorRow.created_at)).scalar_subquery()
    found: float | None = (await session.execute(select(func.coalesce(newest.scalar_subquery(), first)))).scalar()
    return found
