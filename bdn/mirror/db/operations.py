"""Every statement about operations: what agents and the mirror's store were requested to do, and their answers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import exists, func, select, update

from bdn.mirror.db.database import ReadSession, WriteSession, batches, changed, tell
from bdn.mirror.db.tables import Json, MirrorRow, OperationPartRow, OperationRow
from bdn.mirror.db.waiting import asked_topic

MIRROR: Final = "mirror"  # the node of the mirror's own part, whose cluster is ""
ANY: Final = ""  # the node of a part that any agent of a cluster may do
OPEN: Final = ("PENDING", "RUNNING")
Who = tuple[str, str]  # the cluster and the node of a part


async def insert(
    session: WriteSession,
    operation_id: str,
    kind: str,
    parts: Mapping[Who, str],
    now: float,
    *,
    organisation: str | None,
    request: Json,
    command: Json,
) -> None:
    """Record a new operation with the states of its parts, one for each agent or the mirror."""
    about = {"organisation": organisation, "request": request, "command": command}
    session.add(OperationRow(id=operation_id, kind=kind, status="RUNNING", created_at=now, **about))
    await session.flush()
    for (cluster, node), state in parts.items():
        session.add(OperationPartRow(operation=operation_id, cluster=cluster, node=node, state=state, result={}))
    await session.flush()
    if ("", MIRROR) in parts:
        tell(session, asked_topic(kind))


async def get(session: ReadSession, operation_id: str) -> OperationRow | None:
    return await session.get(OperationRow, operation_id, populate_existing=True)


async def parts_of(session: ReadSession, operation_id: str) -> list[OperationPartRow]:
    """Parts in the order of their names, the mirror's own first."""
    query = select(OperationPartRow).where(OperationPartRow.operation == operation_id)
    query = query.order_by(OperationPartRow.cluster, OperationPartRow.node)
    return list((await session.execute(query, execution_options={"populate_existing": True})).scalars())


async def part_of(session: ReadSession, operation_id: str, who: Who) -> OperationPartRow | None:
    return await session.get(OperationPartRow, (operation_id, *who))


async def is_open(session: ReadSession, operation_id: str) -> bool:
    """Whether an answer is outstanding. One index lookup."""
    is_waited_for = exists().where(OperationPartRow.operation == operation_id, OperationPartRow.state.in_(OPEN))
    return bool((await session.execute(select(is_waited_for))).scalar())


async def waited_for(session: ReadSession, operation_id: str) -> list[Who]:
    """The agents, or the mirror, whose answers are outstanding."""
    query = select(OperationPartRow.cluster, OperationPartRow.node)
    query = query.where(OperationPartRow.operation == operation_id, OperationPartRow.state.in_(OPEN))
    return [(cluster, node) for cluster, node in await session.execute(query)]


async def open_of_agents(session: ReadSession) -> dict[Who, list[OperationRow]]:
    """The open operations of each agent, oldest first."""
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
    """Operations of this kind whose mirror part is open, oldest first; also those that a killed worker began."""
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
    """Set columns of an open part. Returns False if there is none: a part that has ended does not change."""
    statement = update(OperationPartRow).where(
        OperationPartRow.operation == operation_id,
        OperationPartRow.cluster == cluster,
        OperationPartRow.node == node,
        OperationPartRow.state.in_(OPEN),
    )
    statement = statement.execution_options(synchronize_session=False)
    return await changed(session, statement.values(**values)) > 0


async def give_up(session: WriteSession, operation_id: str, who: Sequence[Who]) -> None:
    """Set the open ones of these parts to UNREACHABLE; one statement for many."""
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
    """The mirror's own part, locked until commit; None unless it is open."""
    part = await session.get(OperationPartRow, (operation_id, "", MIRROR), with_for_update=True)
    return part if part is not None and part.state in OPEN else None


async def finish(session: WriteSession, operation_id: str, status: str, now: float) -> None:
    """Close a running operation; one that has ended does not change."""
    statement = update(OperationRow).where(OperationRow.id == operation_id, OperationRow.status == "RUNNING")
    statement = statement.execution_options(synchronize_session=False)
    await session.execute(statement.values(status=status, completed_at=now))
    tell(session, operation_id)


_FULL_COLLECTION: Final = (
    OperationRow.kind == "collection",
    OperationRow.request["dry_run"].as_boolean().is_(False),
    OperationRow.request["orphans"].as_boolean().is_(False),
)


async def last_completed_collection(session: ReadSession) -> float | None:
    """When the newest full collection ended that failed at nothing; None before the first."""
    newest = select(func.max(OperationRow.completed_at)).where(*_FULL_COLLECTION, OperationRow.status == "DONE")
    found: float | None = (await session.execute(newest)).scalar()
    return found


async def last_collection(session: ReadSession, now: float) -> float | None:
    """When a full collection was last requested; before the first, when the first mirror was requested.

    Dry runs and collections of orphans do not count, nor requests dated in the future (the clock was set back). Before
    the first mirror there is nothing to collect.
    """
    newest = select(func.max(OperationRow.created_at)).where(*_FULL_COLLECTION, OperationRow.created_at <= now)
    first = select(func.min(MirrorRow.created_at)).scalar_subquery()
    found: float | None = (await session.execute(select(func.coalesce(newest.scalar_subquery(), first)))).scalar()
    return found
