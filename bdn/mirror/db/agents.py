"""Every statement about agents and clusters."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    exists,
    func,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.orm import defer, undefer

from bdn.mirror.db.database import (
    ReadSession,
    WriteSession,
    batches,
    dialect_of,
    insert,
    insert_new,
    select_in,
)
from bdn.mirror.db.tables import AgentRow, ClusterRow, HoldingRow, Json
from bdn.wire.heartbeat_schema import HoldingsChange
from bdn.wire.mirror_schema import Holding

# Five heartbeats with their longest waits: on a full link answers are late, and the chunks of an agent dropped by
# mistake are read from the mirror once more. Peers detect a dead agent sooner, at their first request.
ALIVE_SECONDS: Final = 60.0
FORGOTTEN_SECONDS: Final = 86400.0  # operations skip an agent that was silent for so long
_JOB: Final = 1000  # characters of a job's name, of up to 4,096, in front of its node

Name = tuple[str, str]  # of an agent: its cluster, and its node


def is_alive(row: AgentRow, now: float) -> bool:
    """Whether the agent is a member with a heartbeat in the last ``ALIVE_SECONDS``."""
    return row.joined_at is not None and now - row.last_heartbeat < ALIVE_SECONDS


def is_forgotten(row: AgentRow, now: float) -> bool:
    """Whether operations skip the agent: it announced its departure, or was silent for a day."""
    return row.left_at is not None or now - row.last_heartbeat >= FORGOTTEN_SECONDS


async def change_cluster(session: WriteSession, cluster: str) -> ClusterRow:
    """The cluster's row, inserted if new, and locked until commit. Lock it before an agent's row."""
    await session.execute(
        insert(dialect_of(session), ClusterRow).values(cluster=cluster, epoch=0).on_conflict_do_nothing()
    )
    return await session.get_one(ClusterRow, cluster, with_for_update=True)


async def upsert(session: WriteSession, cluster: str, node: str, **values: Any) -> None:  # noqa: ANN401
    """Set columns of the agent's row, unless it has a later state. A new row needs every column without a default.

    Heartbeat A says "nothing mounted" and is delayed; B says "mounted" and is recorded; A must not undo that.
    """
    new = insert(dialect_of(session), AgentRow).values(**{"cluster": cluster, "node": node, **values})
    is_later = or_(
        AgentRow.boot_id != new.excluded.boot_id,
        func.coalesce(AgentRow.state_at <= new.excluded.state_at, true()),  # an agent of an earlier version has none
    )
    await session.execute(new.on_conflict_do_update(index_elements=["cluster", "node"], set_=values, where=is_later))


async def who_is(session: ReadSession, cluster: str, node: str) -> AgentRow | None:
    """The agent's row, with its ``stages``."""
    query = select(AgentRow).options(undefer(AgentRow.stages))
    query = query.where(AgentRow.cluster == cluster, AgentRow.node == node)
    return (await session.execute(query, execution_options={"populate_existing": True})).scalar()


async def hold(session: WriteSession, cluster: str, node: str, change: HoldingsChange) -> str:
    """Apply a change of an agent's holdings. Returns the digest of the holdings afterwards.

    A change whose base is not the recorded digest changes nothing.
    """
    own = and_(HoldingRow.cluster == cluster, HoldingRow.node == node)
    agent = and_(AgentRow.cluster == cluster, AgentRow.node == node)
    before = (await session.execute(select(AgentRow.holdings_digest).where(agent))).scalar_one() or ""
    if change.base is None:
        await session.execute(delete(HoldingRow).where(own))
    elif change.base != before:
        return before
    for batch in batches([name.removeprefix("b3:") for name in change.gone]):
        await session.execute(delete(HoldingRow).where(own, HoldingRow.manifest.in_(batch)))
    rows = {
        holding.manifest: {
            "cluster": cluster,
            "node": node,
            "manifest": holding.manifest.removeprefix("b3:"),
            "in_use": bool(holding.held_by),
            "document": holding.model_dump(exclude={"manifest"}, exclude_defaults=True) | {"bytes": holding.bytes},
        }
        for holding in change.held
    }
    new = insert(dialect_of(session), HoldingRow)
    columns = {"in_use": new.excluded.in_use, "document": new.excluded.document}
    key = ["cluster", "node", "manifest"]
    await insert_new(session, HoldingRow, [*rows.values()], new.on_conflict_do_update(index_elements=key, set_=columns))
    count = select(func.count()).select_from(HoldingRow).where(own).scalar_subquery()
    await session.execute(update(AgentRow).where(agent).values(holdings_digest=change.digest or None, manifests=count))
    return change.digest


async def manifests_on(session: ReadSession, cluster: str, node: str) -> set[str]:
    """The digests of the manifests that an agent holds, in whole or in part."""
    query = select(HoldingRow.manifest).where(HoldingRow.cluster == cluster, HoldingRow.node == node)
    return set((await session.execute(query)).scalars())


async def count_holders(session: ReadSession, manifests: Sequence[str]) -> dict[str, int]:
    """How many agents hold each of these manifests, in whole or in part."""
    query = select(HoldingRow.manifest, func.count()).group_by(HoldingRow.manifest)
    return {name: count async for name, count in select_in(session, query, HoldingRow.manifest, manifests)}


async def holdings_of(
    session: ReadSession, manifests: Sequence[str], holder: Name | None = None
) -> dict[str, dict[Name, Holding]]:
    """The holdings of each of these manifests, in the order of the agents' names; of one ``holder`` if it is set."""
    query = select(HoldingRow.manifest, HoldingRow.cluster, HoldingRow.node, HoldingRow.document)
    query = query.order_by(HoldingRow.cluster, HoldingRow.node)
    if holder is not None:
        query = query.where(HoldingRow.cluster == holder[0], HoldingRow.node == holder[1])
    found: dict[str, dict[Name, Holding]] = {}
    async for manifest, cluster, node, document in select_in(session, query, HoldingRow.manifest, manifests):
        holding = Holding.model_validate({**document, "manifest": f"b3:{manifest}"})
        found.setdefault(manifest, {})[cluster, node] = holding
    return found


async def holders(session: ReadSession, manifests: Sequence[str]) -> dict[str, list[str]]:
    """The jobs that hold each of these manifests, as ``job on node``."""
    query = select(HoldingRow.manifest, HoldingRow.node, HoldingRow.document).where(HoldingRow.in_use)
    query = query.order_by(HoldingRow.manifest, HoldingRow.cluster, HoldingRow.node)
    found: dict[str, list[str]] = {}
    async for manifest, node, document in select_in(session, query, HoldingRow.manifest, manifests):
        found.setdefault(manifest, []).extend(f"{holder[:_JOB]} on {node}" for holder in document["held_by"])
    return found


async def living_holders(session: ReadSession, manifest: str, since: float, limit: int) -> list[AgentRow]:
    """Some members with a heartbeat since then and an address, that hold the manifest in whole or in part."""
    held = and_(HoldingRow.cluster == AgentRow.cluster, HoldingRow.node == AgentRow.node)
    query = select(AgentRow).join(HoldingRow, held).where(HoldingRow.manifest == manifest, _lives(since))
    query = query.where(AgentRow.advertise.is_not(None)).order_by(AgentRow.cluster, AgentRow.node).limit(limit)
    return list((await session.execute(query)).scalars())


async def members_of(session: ReadSession, cluster: str) -> list[AgentRow]:
    """The members of a cluster in the order of their names, without ``tiers``."""
    query = select(AgentRow).options(defer(AgentRow.tiers, raiseload=True)).order_by(AgentRow.node)
    found = await session.execute(query.where(AgentRow.cluster == cluster, AgentRow.joined_at.is_not(None)))
    return list(found.scalars())


async def is_one_silent(session: ReadSession, cluster: str, since: float) -> bool:
    """Whether a member sent no heartbeat since then."""
    silent = exists().where(
        AgentRow.cluster == cluster, AgentRow.joined_at.is_not(None), AgentRow.last_heartbeat < since
    )
    return bool((await session.execute(select(silent))).scalar())


async def drop_silent(session: WriteSession, cluster: str, since: float) -> list[str]:
    """Remove members without a heartbeat since ``since``. Returns their names."""
    silent = update(AgentRow).where(
        AgentRow.cluster == cluster, AgentRow.joined_at.is_not(None), AgentRow.last_heartbeat < since
    )
    dropped = await session.execute(silent.values(joined_at=None).returning(AgentRow.node))
    return sorted(dropped.scalars())


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat that says nothing new but the progress of stages, or that neither (``stages`` None)."""

    at: float
    boot_id: str
    state_at: float | None
    stages: list[Any] | None


_HEARD: Final = (
    update(AgentRow)
    .where(AgentRow.cluster == bindparam("its_cluster"), AgentRow.node == bindparam("its_node"))
    .where(AgentRow.joined_at.is_not(None), AgentRow.last_heartbeat < bindparam("at"))
    .values(last_heartbeat=bindparam("at"))
)
_PROGRESSED: Final = (
    update(AgentRow)
    .where(AgentRow.cluster == bindparam("its_cluster"), AgentRow.node == bindparam("its_node"))
    .where(AgentRow.boot_id == bindparam("its_boot"))
    .where(func.coalesce(AgentRow.state_at <= bindparam("its_state_at"), true()))  # as ``upsert``
    .values(stages=bindparam("its_stages"), state_at=bindparam("its_state_at"))
)


async def note_heard(session: WriteSession, heard: Mapping[Name, Heard]) -> None:
    """Record the time of the last heartbeat of these agents, as far as they are members, and the progress of stages.

    The progress of a heartbeat is not written over a later state of another heartbeat.
    """
    names = [({"its_cluster": name[0], "its_node": name[1]}, one) for name, one in sorted(heard.items())]
    connection = await session.connection()
    await connection.execute(_HEARD, [{**name, "at": one.at} for name, one in names])
    said = [
        {**name, "its_boot": one.boot_id, "its_state_at": one.state_at, "its_stages": one.stages}
        for name, one in names
        if one.stages is not None
    ]
    if said:
        await connection.execute(_PROGRESSED, said)


async def stages_of(session: ReadSession, job: str, since: float) -> list[tuple[AgentRow, Json]]:
    """The stages of this job (``StageReport``) on agents that have not left and sent a heartbeat since then."""
    names_job = cast(AgentRow.stages, Text).contains(json.dumps(job), autoescape=True)  # as the column is written
    query = select(AgentRow).options(undefer(AgentRow.stages))
    query = query.where(AgentRow.left_at.is_(None), AgentRow.last_heartbeat > since, names_job)
    found = (await session.execute(query)).scalars()
    return [(row, stage) for row in found for stage in row.stages or () if stage["job"] == job]


async def stages_on(session: ReadSession, cluster: str, nodes: Collection[str]) -> dict[str, list[Json]]:
    """All stages (``StageReport``) of the agents on these nodes, by node."""
    query = select(AgentRow.node, AgentRow.stages).where(AgentRow.cluster == cluster, AgentRow.node.in_(nodes))
    return {node: list(stages or ()) for node, stages in (await session.execute(query)).all()}


async def remove(session: WriteSession, cluster: str, node: str) -> None:
    await session.execute(delete(AgentRow).where(AgentRow.cluster == cluster, AgentRow.node == node))


async def page(session: ReadSession, after: Name | None, limit: int) -> list[AgentRow]:
    """Agents that ever sent a heartbeat and were not removed, in the order of their names, after this one."""
    query = select(AgentRow).order_by(AgentRow.cluster, AgentRow.node).limit(limit)
    if after is not None:
        query = query.where(tuple_(AgentRow.cluster, AgentRow.node) > after)
    return list((await session.execute(query)).scalars())


async def named(session: ReadSession, cluster: str | None, node: str | None) -> list[AgentRow]:
    """The agents of this cluster and of this name; None is any."""
    query = select(AgentRow).order_by(AgentRow.cluster, AgentRow.node)
    if cluster is not None:
        query = query.where(AgentRow.cluster == cluster)
    if node is not None:
        query = query.where(AgentRow.node == node)
    return list((await session.execute(query)).scalars())


async def count_alive(session: ReadSession, now: float) -> int:
    query = select(func.count()).select_from(AgentRow).where(_lives(now - ALIVE_SECONDS))
    return (await session.execute(query)).scalar_one()


async def count_silent(session: ReadSession, now: float) -> int:
    """Agents without a heartbeat in the last ``ALIVE_SECONDS`` that neither announced a departure nor were removed."""
    is_silent = and_(AgentRow.left_at.is_(None), AgentRow.last_heartbeat <= now - ALIVE_SECONDS)
    return (await session.execute(select(func.count()).select_from(AgentRow).where(is_silent))).scalar_one()


def _lives(since: float) -> ColumnElement[bool]:
    return and_(AgentRow.joined_at.is_not(None), AgentRow.last_heartbeat > since)


async def heard_at(session: ReadSession) -> dict[Name, float]:
    query = select(AgentRow.cluster, AgentRow.node, AgentRow.last_heartbeat)
    return {(cluster, node): at for cluster, node, at in await session.execute(query)}


async def epoch_of(session: ReadSession, cluster: str) -> int:
    """The cluster's epoch; 0 if no agent ever joined it."""
    return (await session.execute(select(ClusterRow.epoch).where(ClusterRow.cluster == cluster))).scalar() or 0


async def epochs(session: ReadSession) -> dict[str, int]:
    return {row.cluster: row.epoch for row in (await session.execute(select(ClusterRow))).scalars()}
