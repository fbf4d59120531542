"""Every statement about agents and clusters."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from bdn.mirror.database import ReadSession, WriteSession
from bdn.mirror.tables import AgentRow, ClusterRow


async def upsert(session: WriteSession, cluster: str, node: str, **values: Any) -> AgentRow:  # noqa: ANN401
    """The agent's row with these columns set. A new row needs all of them."""
    row = await session.get(AgentRow, (cluster, node))
    if row is None:
        row = AgentRow(cluster=cluster, node=node, **{"holdings": [], **values})
        session.add(row)
    else:
        for name, value in values.items():
            setattr(row, name, value)
    return row


async def all_agents(session: ReadSession) -> list[AgentRow]:
    """Every agent that was ever heard of."""
    return list((await session.execute(select(AgentRow).order_by(AgentRow.cluster, AgentRow.node))).scalars())


async def alive_in(session: ReadSession, cluster: str, since: float) -> list[AgentRow]:
    """The agents of a cluster that were heard of since then, in the order of their names."""
    query = select(AgentRow).where(AgentRow.cluster == cluster, AgentRow.last_heartbeat >= since)
    return list((await session.execute(query.order_by(AgentRow.node))).scalars())


async def advance_epoch(session: WriteSession, cluster: str, members: list[Any]) -> int:
    """The cluster's epoch, one more than before when its members changed."""
    row = await session.get(ClusterRow, cluster)
    if row is None:
        session.add(ClusterRow(cluster=cluster, epoch=1, members=members))
        return 1
    if row.members != members:
        row.members = members
        row.epoch += 1
    return row.epoch


async def epochs(session: ReadSession) -> dict[str, int]:
    """The epoch of every cluster."""
    return {row.cluster: row.epoch for row in (await session.execute(select(ClusterRow))).scalars()}
