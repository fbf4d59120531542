"""Every statement about training caches: where projects have them, what they held, and what is left of deleted projects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import delete, select

from bdn.mirror.db import projects
from bdn.mirror.db.database import ReadSession, WriteSession, dialect_of, insert, insert_new
from bdn.mirror.db.tables import (
    AgentRow,
    CacheDirectoryRow,
    CachePinRow,
    CacheSummaryRow,
    OperationPartRow,
    OperationRow,
    ProjectRow,
)

REMOVAL: Final = "cache removal"  # the kind of operation
_LEFT: Final = ("PENDING", "RUNNING", "FAILED")


@dataclass
class CacheState:
    """A project that has caches, and each of them by its cluster, with the newest summary of each."""

    project: str
    name: str
    pin: CachePinRow
    directories: list[CacheDirectoryRow] = field(default_factory=list)
    summaries: dict[str, CacheSummaryRow] = field(default_factory=dict)


async def pin(session: WriteSession, project: ProjectRow, cluster: str, now: float) -> CachePinRow:
    """Where the project is pinned to: to this cluster, if to none before. Whoever else asks waits for this transaction."""
    await projects.make_team(session, project.organisation, project.team, now)
    (team,) = await projects.teams(session, project.organisation, project.team)
    row = {"project": project.id, "organisation": project.organisation, "team": team.id, "cluster": cluster}
    await insert_new(session, CachePinRow, [row | {"limit_bytes": None, "created_at": now}])
    query = select(CachePinRow).where(CachePinRow.project == project.id).with_for_update()
    return (await session.execute(query)).scalar_one()


async def pinned(session: ReadSession, project: str) -> CachePinRow | None:
    """Of a project by its id; None: it has no cache."""
    return await session.get(CachePinRow, project)


async def volume(session: WriteSession, project: str, cluster: str, asked: str, now: float) -> str:
    """The volume on which the project has its cache in this cluster: this one, if none before."""
    row = {"project": project, "cluster": cluster, "volume": asked, "created_at": now}
    await insert_new(session, CacheDirectoryRow, [row])
    found = await session.get(CacheDirectoryRow, (project, cluster))
    return asked if found is None else found.volume


async def mounted(session: ReadSession, project: str, since: float) -> list[str]:
    """The job volumes that have the project's cache mounted, with their nodes, as agents reported that were heard of since then."""
    in_clusters = AgentRow.cluster.in_(select(CacheDirectoryRow.cluster).where(CacheDirectoryRow.project == project))
    query = select(AgentRow.node, AgentRow.caches).where(in_clusters, AgentRow.last_heartbeat > since)
    found = await session.execute(query.order_by(AgentRow.cluster, AgentRow.node))
    return [
        f"{holder} on {node}"
        for node, uses in found
        for use in uses or ()
        if use["project"] == project
        for holder in use["holders"]
    ]


async def directory(session: ReadSession, project: str, cluster: str) -> CacheDirectoryRow | None:
    """A project's cache in a cluster."""
    return await session.get(CacheDirectoryRow, (project, cluster))


async def summary(session: ReadSession, project: str, cluster: str) -> CacheSummaryRow | None:
    """The newest one."""
    return await session.get(CacheSummaryRow, (project, cluster))


async def record(session: WriteSession, row: Mapping[str, object]) -> None:
    """Keep a summary, unless there is a newer one."""
    statement = insert(dialect_of(session), CacheSummaryRow)
    newer = {name: statement.excluded[name] for name in ("captured_at", "size_bytes", "files", "packed")}
    statement = statement.on_conflict_do_update(
        index_elements=["project", "cluster"],
        set_=newer,
        where=CacheSummaryRow.captured_at <= statement.excluded.captured_at,
    )
    await insert_new(session, CacheSummaryRow, [dict(row)], statement)


async def listed(session: ReadSession, organisation: str, team: str | None) -> list[CacheState]:
    """Those of an organisation, or of a team, by the names of their projects. Summaries without their entries."""
    whose = [CachePinRow.organisation == organisation] + ([ProjectRow.team == team] if team is not None else [])
    query = (
        select(CachePinRow, ProjectRow.name)
        .join(ProjectRow, ProjectRow.id == CachePinRow.project)
        .where(*whose)
        .order_by(ProjectRow.name, ProjectRow.id)
    )
    found = {row.project: CacheState(row.project, name, row) for row, name in (await session.execute(query)).all()}
    of_these = select(CachePinRow.project).join(ProjectRow, ProjectRow.id == CachePinRow.project).where(*whose)
    rows = select(CacheDirectoryRow).where(CacheDirectoryRow.project.in_(of_these)).order_by(CacheDirectoryRow.cluster)
    for row in (await session.execute(rows)).scalars():
        found[row.project].directories.append(row)
    sums = select(
        CacheSummaryRow.project,
        CacheSummaryRow.cluster,
        CacheSummaryRow.captured_at,
        CacheSummaryRow.size_bytes,
        CacheSummaryRow.files,
    ).where(CacheSummaryRow.project.in_(of_these))
    for project, cluster, captured_at, size, files in (await session.execute(sums)).all():
        found[project].summaries[cluster] = CacheSummaryRow(
            project=project, cluster=cluster, captured_at=captured_at, size_bytes=size, files=files, packed=""
        )
    return list(found.values())


async def removals(session: ReadSession, organisation: str) -> Sequence[tuple[OperationRow, OperationPartRow]]:
    """What no agent has removed yet, or could not, oldest first."""
    query = (
        select(OperationRow, OperationPartRow)
        .join(OperationPartRow, OperationPartRow.operation == OperationRow.id)
        .where(OperationRow.kind == REMOVAL, OperationRow.organisation == organisation)
        .where(OperationPartRow.state.in_(_LEFT))
        .order_by(OperationRow.created_at, OperationPartRow.cluster)
    )
    return [(row, part) for row, part in (await session.execute(query)).all()]


async def forget_directory(session: WriteSession, project: str, cluster: str) -> bool:
    """Forget on which volume of a cluster a project has its cache, and what it held; whether it had one there."""
    found = await session.get(CacheDirectoryRow, (project, cluster))
    for table in (CacheSummaryRow, CacheDirectoryRow):
        await session.execute(delete(table).where(table.project == project, table.cluster == cluster))
    return found is not None


async def forget(session: WriteSession, project: str) -> list[CacheDirectoryRow]:
    """Forget where a project has caches, and what they held. Returns where."""
    query = select(CacheDirectoryRow).where(CacheDirectoryRow.project == project).with_for_update()
    found = list((await session.execute(query)).scalars())
    for table in (CacheSummaryRow, CacheDirectoryRow, CachePinRow):
        await session.execute(delete(table).where(table.project == project))
    return found
