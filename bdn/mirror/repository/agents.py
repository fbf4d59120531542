"""Every statement about agents and clusters."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from bdn.mirror.database import ReadSession, WriteSession
from bdn.mirror.repository.dialects import insert
from bdn.mirror.tables import AgentRow, ClusterRow


async def change_cluster(session: WriteSession, cluster: str) -> ClusterRow:
    """The cluster's row, made if it is new, which nobody else changes until this transaction ends.

    Taken before an agent's own row is written: of two agents that report at once, the second sees the first.
    """
    new = insert(session, ClusterRow).values(cluster=cluster, epoch=0, members=[])
    await session.execute(new.on_conflict_do_nothing())
    return await session.get_one(ClusterRow, cluster, with_for_update=True)


async def upsert(session: WriteSession, cluster: str, node: str, **values: Any) -> None:  # noqa: ANN401
    """Set these columns of the agent's row. A new row needs all of them but ``holdings``."""
    new = insert(session, AgentRow).values(**{"cluster": cluster, "node": node, "holdings": [], **values})
    await session.execute(new.on_conflict_do_update(index_elements=["cluster", "node"], set_=values))


async def all_agents(session: ReadSession) -> list[AgentRow]:
    """Every agent that was ever heard of."""
    return list((await session.execute(select(AgentRow).order_by(AgentRow.cluster, AgentRow.node))).scalars())


async def alive_in(session: ReadSession, cluster: str, since: float) -> list[AgentRow]:
    """The agents of a cluster that were heard of since then, in the order of their names."""
    query = select(AgentRow).where(AgentRow.cluster == cluster, AgentRow.last_heartbeat >= since)
    return list((await session.execute(query.order_by(AgentRow.node))).scalars())


async def epochs(session: ReadSession) -> dict[str, int]:
    """The epoch of every cluster."""
    return {row.cluster: row.epoch for row in (await session.execute(select(ClusterRow))).scalars()}
