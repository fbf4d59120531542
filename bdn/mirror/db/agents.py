"""Every statement about agents and clusters."""

from typing import Any, Final

from sqlalchemy import select, update
from sqlalchemy.orm import defer

from bdn.mirror.db.database import ReadSession, WriteSession, changed, insert
from bdn.mirror.db.tables import AgentRow, ClusterRow

# Five heartbeats with their longest waits: on a full link answers are late, and who is dropped by mistake has its chunks read
# from the mirror once more. Who is gone is found out by its peers, at their first request.
ALIVE_SECONDS: Final = 60.0

# A thousand agents' holdings are not read to learn who they are.
_SMALL = (defer(AgentRow.tiers, raiseload=True), defer(AgentRow.holdings, raiseload=True))


def is_alive(row: AgentRow, now: float) -> bool:
    """Whether the agent was heard of lately, and has not said that it leaves."""
    return row.joined_at is not None and now - row.last_heartbeat < ALIVE_SECONDS


async def change_cluster(session: WriteSession, cluster: str) -> ClusterRow:
    """The cluster's row, made if new, which nobody else changes in this transaction. Taken before an agent's."""
    await session.execute(insert(session, ClusterRow).values(cluster=cluster, epoch=0).on_conflict_do_nothing())
    return await session.get_one(ClusterRow, cluster, with_for_update=True)


async def upsert(session: WriteSession, cluster: str, node: str, **values: Any) -> None:  # noqa: ANN401
    """Set these columns of the agent's row. A new row needs all of them but ``holdings``."""
    new = insert(session, AgentRow).values(**{"cluster": cluster, "node": node, "holdings": [], **values})
    await session.execute(new.on_conflict_do_update(index_elements=["cluster", "node"], set_=values))


async def who_is(session: ReadSession, cluster: str, node: str) -> AgentRow | None:
    """The agent, without what it holds."""
    query = select(AgentRow).options(*_SMALL)
    return (await session.execute(query.where(AgentRow.cluster == cluster, AgentRow.node == node))).scalar()


async def manifests_on(session: ReadSession, cluster: str, node: str) -> set[str]:
    """The names of the manifests that an agent holds something of."""
    query = select(AgentRow.holdings).where(AgentRow.cluster == cluster, AgentRow.node == node)
    return {str(holding["manifest"]) for holding in (await session.execute(query)).scalar() or []}


async def members_of(session: ReadSession, cluster: str) -> list[AgentRow]:
    """The members of a cluster in the order of their names, without what they hold."""
    query = select(AgentRow).options(*_SMALL).order_by(AgentRow.node)
    found = await session.execute(query.where(AgentRow.cluster == cluster, AgentRow.joined_at.is_not(None)))
    return list(found.scalars())


async def drop_silent(session: WriteSession, cluster: str, since: float) -> list[str]:
    """Who was not heard of since then is no member any more; returns their names."""
    silent = update(AgentRow).where(
        AgentRow.cluster == cluster, AgentRow.joined_at.is_not(None), AgentRow.last_heartbeat < since
    )
    dropped = await session.execute(silent.values(joined_at=None).returning(AgentRow.node))
    return sorted(dropped.scalars())


async def note_heartbeat(session: WriteSession, cluster: str, node: str, **values: Any) -> bool:  # noqa: ANN401
    """Set these columns if the agent is a member; False when it is not, or no longer."""
    statement = update(AgentRow).where(
        AgentRow.cluster == cluster, AgentRow.node == node, AgentRow.joined_at.is_not(None)
    )
    return await changed(session, statement.values(**values)) > 0


async def all_agents(session: ReadSession) -> list[AgentRow]:
    """Every agent that was ever heard of."""
    return list((await session.execute(select(AgentRow).order_by(AgentRow.cluster, AgentRow.node))).scalars())


async def heard_at(session: ReadSession) -> dict[tuple[str, str], float]:
    """When each agent was last heard of, by cluster and node."""
    query = select(AgentRow.cluster, AgentRow.node, AgentRow.last_heartbeat)
    return {(cluster, node): at for cluster, node, at in await session.execute(query)}


async def epoch_of(session: ReadSession, cluster: str) -> int:
    """The cluster's epoch; 0 when nobody ever joined it."""
    return (await session.execute(select(ClusterRow.epoch).where(ClusterRow.cluster == cluster))).scalar() or 0


async def epochs(session: ReadSession) -> dict[str, int]:
    """The epoch of every cluster."""
    return {row.cluster: row.epoch for row in (await session.execute(select(ClusterRow))).scalars()}
