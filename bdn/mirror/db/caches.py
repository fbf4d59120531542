"""Every statement about training caches: where they are, what they held, and the removals for deleted projects."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import defer, load_only

from bdn.mirror.db import projects
from bdn.mirror.db.database import ReadSession, WriteSession, changed, insert_new
from bdn.mirror.db.tables import (
    AgentRow,
    CacheDirectoryRow,
    OperationPartRow,
    OperationRow,
    ProjectRow,
)

REMOVAL: Final = "cache removal"  # the kind of operation
_LEFT: Final = ("PENDING", "RUNNING", "FAILED")
_MOUNTS: Final = (AgentRow.caches, AgentRow.last_heartbeat, AgentRow.joined_at)


@dataclass
class CacheState:
    """A project that has caches, and each of them by its cluster, without ``packed``."""

    project: ProjectRow
    directories: list[CacheDirectoryRow] = field(default_factory=list)


async def pin(session: WriteSession, project: ProjectRow, cluster: str, now: float) -> ProjectRow:
    """Pin the project to this cluster, unless it is pinned already. Other callers wait for this transaction."""
    await projects.make_team(session, project.organisation, project.team, now)
    (team,) = await projects.teams(session, project.organisation, project.team)
    query = select(ProjectRow).where(ProjectRow.id == project.id).with_for_update()
    row = (await session.execute(query.execution_options(populate_existing=True))).scalar_one()
    if row.cache_cluster is None:
        row.cache_team, row.cache_cluster = team.id, cluster
        await session.flush()
    return row


async def volume(session: WriteSession, project: str, cluster: str, asked: str, now: float) -> str:
    """The volume of the project's cache in this cluster, set to ``asked`` if there was none."""
    row = {"project": project, "cluster": cluster, "volume": asked, "created_at": now}
    await insert_new(session, CacheDirectoryRow, [row])
    found = await session.get(CacheDirectoryRow, (project, cluster))
    return asked if found is None else found.volume


async def mounted(session: ReadSession, project: str) -> list[tuple[AgentRow, list[str]]]:
    """The agents whose last heartbeat has the project's cache mounted, each with the job volumes. Reads all agents."""
    query = select(AgentRow).options(load_only(*_MOUNTS, raiseload=True)).where(AgentRow.caches.is_not(None))
    found = (await session.execute(query.order_by(AgentRow.cluster, AgentRow.node))).scalars()
    return [(row, use["holders"]) for row in found for use in row.caches or () if use["project"] == project]


async def directory(session: ReadSession, project: str, cluster: str) -> CacheDirectoryRow | None:
    return await session.get(CacheDirectoryRow, (project, cluster))


async def record(session: WriteSession, project: str, cluster: str, captured_at: float, **held: object) -> None:
    """Store what the cache held, unless a later scan is known."""
    row = CacheDirectoryRow
    statement = update(row).where(row.project == project, row.cluster == cluster)
    statement = statement.where(func.coalesce(row.captured_at, 0.0) <= captured_at)
    await session.execute(statement.values(captured_at=captured_at, **held))


async def listed(session: ReadSession, organisation: str, team: str | None) -> list[CacheState]:
    """The caches of an organisation or a team, by the names of their projects."""
    whose = [ProjectRow.organisation == organisation, ProjectRow.cache_cluster.is_not(None)]
    whose += [ProjectRow.team == team] if team is not None else []
    query = select(ProjectRow).where(*whose).order_by(ProjectRow.name, ProjectRow.id)
    found = {row.id: CacheState(row) for row in (await session.execute(query)).scalars()}
    of_these = select(ProjectRow.id).where(*whose)
    rows = select(CacheDirectoryRow).where(CacheDirectoryRow.project.in_(of_these)).order_by(CacheDirectoryRow.cluster)
    for row in (await session.execute(rows.options(defer(CacheDirectoryRow.packed, raiseload=True)))).scalars():
        found[row.project].directories.append(row)
    return list(found.values())


async def removals(session: ReadSession, organisation: str) -> Sequence[tuple[OperationRow, OperationPartRow]]:
    """The removals that no agent has completed, oldest first, including failed ones."""
    query = (
        select(OperationRow, OperationPartRow)
        .join(OperationPartRow, OperationPartRow.operation == OperationRow.id)
        .where(OperationRow.kind == REMOVAL, OperationRow.organisation == organisation)
        .where(OperationPartRow.state.in_(_LEFT))
        .order_by(OperationRow.created_at, OperationPartRow.cluster)
    )
    return [(row, part) for row, part in (await session.execute(query)).all()]


async def forget_directory(session: WriteSession, project: str, cluster: str) -> bool:
    """Delete the record of a project's cache in a cluster. Returns whether there was one."""
    row = CacheDirectoryRow
    return await changed(session, delete(row).where(row.project == project, row.cluster == cluster)) > 0


async def forget(session: WriteSession, project: str) -> list[CacheDirectoryRow]:
    """Delete the records of all caches of a project. Returns them."""
    query = select(CacheDirectoryRow).where(CacheDirectoryRow.project == project).with_for_update()
    found = list((await session.execute(query)).scalars())
    await session.execute(delete(CacheDirectoryRow).where(CacheDirectoryRow.project == project))
    return found
