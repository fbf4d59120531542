"""Teams, their projects, and the checkpoints that jobs pushed for these: listing and deletion.

With ``team`` None, a method covers the whole organisation; otherwise, other teams' objects are NOT_FOUND.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import Fact, NotFoundError
from bdn.core.events import Event
from bdn.mirror.db import checkpoints, events, projects, training
from bdn.mirror.db.checkpoints import CheckpointState
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.projects import ProjectState
from bdn.mirror.db.tables import CheckpointRow, ProjectRow, TeamRow
from bdn.mirror.jobs.caches import forget_caches
from bdn.mirror.jobs.uses import ProjectUses
from bdn.wire.access_schema import DEFAULT_TEAM, Team
from bdn.wire.push_schema import Checkpoint, Project
from bdn.wire.shapes import moment

_REMOVED_AT_ONCE: Final = 50  # checkpoints of one transaction


@dataclass(frozen=True)
class Projects:
    database: Database
    uses: ProjectUses

    async def make_team(self, organisation: str, name: str) -> Team:
        """Create a team, or return the existing team of this name."""
        async with self.database.write() as session:
            await projects.make_team(session, organisation, name, self.database.now())
            (row,) = await projects.teams(session, organisation, name)
        return _team(row)

    async def teams(self, organisation: str, team: str | None) -> list[Team]:
        """The teams of an organisation, oldest first. The first call creates the team named Default."""
        async with self.database.read() as session:
            found = await projects.teams(session, organisation)
        if not any(row.name == DEFAULT_TEAM for row in found):
            async with self.database.write() as session:
                await projects.make_team(session, organisation, DEFAULT_TEAM, self.database.now())
                found = await projects.teams(session, organisation)
        return [_team(row) for row in found if team in (None, row.name)]

    async def projects(self, organisation: str, team: str | None) -> list[Project]:
        async with self.database.read() as session:
            found = await projects.listed(session, organisation, team)
        return [_project(one) for one in found]

    async def jobs_named(
        self, organisation: str, team: str | None, part: str, limit: int
    ) -> list[tuple[str, str, str]]:
        """Id, name and project of training jobs with ``part`` in their id or name, newest first."""
        async with self.database.read() as session:
            return await training.named(session, organisation, team, part, limit)

    async def make_project(self, organisation: str, team: str, name: str) -> Project:
        """Create a project of a team, or return the existing one. Raises ``NotFoundError`` for an unknown team."""
        async with self.database.write() as session:
            row = await projects.project(session, organisation, team, name, self.database.now())
            (state,) = await projects.listed(session, organisation, project_id=row.id)
        return _project(state)

    async def remove_project(self, organisation: str, team: str | None, name: str) -> Project:
        """Delete a project, by its id or name, with its checkpoints and training caches, for good.

        What was mirrored from these stays. Checkpoints are deleted in batches; after a crash, the operator repeats the
        request. Returns the project as it was before.

        Raises:
            NotFoundError: the project does not exist, or belongs to another team.
            InvalidRequestError: several teams have a project of this name.
            InUseError: see ``bdn.mirror.jobs.uses``. A use that begins during the deletion leaves the project with its
                remaining checkpoints, or its caches on their volumes until they are unmounted.
        """
        async with self.database.read() as session:
            row = await projects.find(session, organisation, name, team)
            if row is None:
                raise NotFoundError(f"project {name!r}")
            (state,) = await projects.listed(session, organisation, project_id=row.id)
        while not await self._remove_some(row):
            pass
        return _project(state)

    async def _remove_some(self, project: ProjectRow) -> bool:
        async with self.database.write() as session:
            if not await projects.lock(session, project.id):
                return True
            await self.uses.check(session, project)
            found = await projects.checkpoints_of(session, project.id, _REMOVED_AT_ONCE)
            for row in found:
                state = CheckpointState(row, project, project.name)
                await self._forget(session, state, "its project was deleted")
            is_last = len(found) < _REMOVED_AT_ONCE
            if is_last:
                await forget_caches(session, project, self.database.now())
                await projects.forget(session, project.id)
        return is_last

    # --- checkpoints ---

    async def checkpoints(
        self, organisation: str, team: str | None, project: str | None, job: str | None
    ) -> list[Checkpoint]:
        async with self.database.read() as session:
            found = await checkpoints.listed(session, organisation, team, project=project, job=job)
            syncing = await checkpoints.syncing(session, organisation)
        return [_checkpoint(one, syncing) for one in sorted(found, key=lambda one: checkpoints.age(one.row))]

    async def remove(
        self, checkpoint_id: str, organisation: str, team: str | None = None, why: str = "it was deleted"
    ) -> Checkpoint:
        """Delete a checkpoint for good. What was mirrored from it stays."""
        async with self.database.write() as session:
            state = await checkpoints.get(session, organisation, checkpoint_id, team)
            document = _checkpoint(state, set())
            await self._forget(session, state, why)
        return document

    async def _forget(self, session: WriteSession, state: CheckpointState, why: str) -> None:
        row: CheckpointRow = state.row
        gone = await checkpoints.remove(session, row)
        await events.record(session, self.database.now(), gone_events(row.organisation, str(state.uri), gone, why))

    async def forget_job(self, session: WriteSession, project: ProjectRow, job: str) -> None:
        """Delete all that a job pushed, in the transaction that deletes the job."""
        for row in await projects.pushed_by(session, project.id, job):
            await self._forget(session, CheckpointState(row, project, project.name), "its job was deleted")

    async def expire(self, keep_seconds: float) -> None:
        """Delete some checkpoints that were committed more than ``keep_seconds`` ago."""
        async with self.database.read() as session:
            old = await checkpoints.older_than(session, self.database.now() - keep_seconds)
        for row in old:
            with suppress(NotFoundError):  # another process was faster
                await self.remove(row.id, row.organisation, why="it expired")

    async def remove_unused_archives(self, before: float) -> None:
        """Delete some archives from before then whose job was never recorded: its mirror stopped in between."""
        async with self.database.read() as session:
            unused = await checkpoints.archives_without_job(session, before)
        for row in unused:
            with suppress(NotFoundError):  # another process was faster
                await self.remove(row.id, row.organisation, why="no job uses it")


def gone_events(organisation: str, source: str, manifests: Sequence[str], why: str) -> list[Event]:
    """Events that no checkpoint names these manifests any more."""
    facts: dict[str, Fact] = {"source": source, "why": why}
    return [events.event_of("replaced", facts, manifest, organisation=organisation) for manifest in manifests]


def _team(row: TeamRow) -> Team:
    return Team(id=row.id, name=row.name, created_at=moment(row.created_at))


def _project(state: ProjectState) -> Project:
    row = state.row
    return Project(
        id=row.id,
        name=row.name,
        team=row.team,
        created_at=moment(row.created_at),
        checkpoints=state.checkpoints,
        size_bytes=state.bytes_total,
    )


def _checkpoint(state: CheckpointState, syncing: AbstractSet[tuple[str, str, str, str]]) -> Checkpoint:
    row, project = state.row, state.project
    names = {(project.team, name, row.job, row.name) for name in (project.name, project.id)}
    details = {**row.details}
    written_at = details.pop("created_at", row.created_at)
    return Checkpoint(
        id=row.id,
        checkpoint_id=row.name,
        source=str(state.uri),
        project_id=project.id,
        project_name=project.name,
        team=project.team,
        job=row.job,
        rank=row.rank,
        created_at=moment(written_at),
        committed_at=moment(row.committed_at),
        sync_status="SYNCING" if names & syncing else "COMPLETE",
        manifest=f"b3:{row.manifest}",
        files=row.files_total,
        size_bytes=row.bytes_total,
        is_loadable=row.is_loadable,
        **details,
    )
