"""What a project is in use by. Until nothing is left, neither the project nor files of its training cache are deleted."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import InUseError
from bdn.mirror.db import agents, caches, mirrors, projects
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.db.tables import ProjectRow
from bdn.wire.shapes import Items, moment

_NAMED: Final = 10  # most in one error


# One kind of use: a name for each, such as ``push mir_0123``. The last argument is the database's time.
UseQuery = Callable[[ReadSession, ProjectRow, float], Awaitable[Sequence[str]]]


async def active_pushes(session: ReadSession, project: ProjectRow, _: float) -> list[str]:
    return [
        f"push {row.id}"
        for row, uri in await mirrors.pushes(session, project.organisation)
        if row.team == project.team and uri.project in (project.id, project.name)
    ]


async def mounted_caches(session: ReadSession, project: ProjectRow, now: float) -> list[str]:
    return await _mounts(session, project.id, now)


async def _mounts(session: ReadSession, project: str, now: float) -> list[str]:
    """The job volumes of all nodes whose last heartbeat has the project's cache mounted, however old it is.

    A silent node may still run its jobs, so it counts until an operator removes its agent.
    """
    return [
        f"{holder} on {agent.node}" + ("" if agents.is_alive(agent, now) else _silent(agent.node, agent.last_heartbeat))
        for agent, holders in await caches.mounted(session, project)
        for holder in holders
    ]


def _silent(node: str, heard_at: float) -> str:
    return f" (silent since {moment(heard_at):%Y-%m-%dT%H:%M:%SZ}; if the node is gone: bdn-admin agents rm {node})"


@dataclass(frozen=True)
class ProjectUses:
    """All kinds of use of a project: ``queries``."""

    database: Database
    queries: Sequence[UseQuery]

    async def check(self, session: ReadSession, project: ProjectRow) -> None:
        """Raises ``InUseError`` with the first uses."""
        if found := await self._found(session, project):
            raise InUseError(f"project {project.name!r} ({project.id})", tuple(found[:_NAMED]))

    async def of(self, project_id: str) -> Items[str]:
        """For an agent that is about to delete from the project's cache. A deleted project's may still be mounted."""
        async with self.database.read() as session:
            project = await projects.get(session, project_id)
            if project is None:
                found = await _mounts(session, project_id, self.database.now())
            else:
                found = await self._found(session, project)
        return Items[str](items=found[:_NAMED])

    async def _found(self, session: ReadSession, project: ProjectRow) -> list[str]:
        now = self.database.now()
        return [use for query in self.queries for use in await query(session, project, now)]
