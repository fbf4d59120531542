"""Every statement about teams, and about projects, which belong to teams.

A team is identified by its name, which never changes, so rows of an earlier version may name a team without a row of
its own. Where a statement takes ``team``, None means any.
"""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select
from sqlalchemy.orm import aliased

from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.core.training.checkpoints import LOOSE
from bdn.mirror.db.database import ReadSession, WriteSession, insert_new
from bdn.mirror.db.tables import CheckpointRow, ManifestRow, ProjectRow, TeamRow
from bdn.wire.access_schema import DEFAULT_TEAM

_ID_SIGNS: Final = string.ascii_lowercase + string.digits
_ID_LENGTH: Final = 10


def new_id() -> str:
    """The permanent id of a team or a project."""
    return "".join(secrets.choice(_ID_SIGNS) for _ in range(_ID_LENGTH))


# --- teams ---


async def make_team(session: WriteSession, organisation: str, name: str, now: float) -> None:
    row = {"id": new_id(), "organisation": organisation, "name": name, "created_at": now}
    await insert_new(session, TeamRow, [row])


async def teams(session: ReadSession, organisation: str, name: str | None = None) -> list[TeamRow]:
    """The teams of an organisation, oldest first; or the one of this name."""
    query = select(TeamRow).where(TeamRow.organisation == organisation).order_by(TeamRow.created_at, TeamRow.id)
    if name is not None:
        query = query.where(TeamRow.name == name)
    return list((await session.execute(query)).scalars())


async def check_team(session: WriteSession, organisation: str, name: str, now: float) -> None:
    """Raise ``NotFoundError`` unless the organisation has this team. Creates the team Default if needed."""
    if name == DEFAULT_TEAM:
        await make_team(session, organisation, name, now)
    elif not await teams(session, organisation, name):
        raise NotFoundError(f"team {name!r} of organisation {organisation!r}")


# --- projects ---


@dataclass(frozen=True, slots=True)
class ProjectState:
    """A project, with the number and bytes of its checkpoints."""

    row: ProjectRow
    checkpoints: int
    bytes_total: int


async def find(session: ReadSession, organisation: str, name: str, team: str | None = None) -> ProjectRow | None:
    """The project of this id, or else of this name: of several teams, the project of the team Default.

    The id goes first: it is random, so no project is hidden behind another's name. Raises ``InvalidRequestError`` if
    several other teams have the name.
    """
    query = select(ProjectRow).where(
        ProjectRow.organisation == organisation, or_(ProjectRow.name == name, ProjectRow.id == name)
    )
    if team is not None:
        query = query.where(ProjectRow.team == team)
    known = list((await session.execute(query.order_by(ProjectRow.team))).scalars())
    for is_meant in (lambda one: one.id == name, lambda one: one.team == DEFAULT_TEAM, lambda _: len(known) == 1):
        if (first := next(filter(is_meant, known), None)) is not None:
            return first
    if known:
        having = ", ".join(repr(one.team) for one in known)
        raise InvalidRequestError(
            f"several teams have a project {name!r} ({having}): name it by its id, which GET /projects and "
            "'bdn-admin projects ls' show"
        )
    return None


async def get(session: ReadSession, project_id: str) -> ProjectRow | None:
    return await session.get(ProjectRow, project_id)


async def project(session: WriteSession, organisation: str, team: str, name: str, now: float) -> ProjectRow:
    """A team's project by its name or id, created if there is none. It is locked until commit."""
    known = await find(session, organisation, name, team)
    if known is None:
        await check_team(session, organisation, team, now)
        row = {"id": new_id(), "organisation": organisation, "team": team, "name": name, "created_at": now}
        await insert_new(session, ProjectRow, [row])
        known = await find(session, organisation, name, team)  # or the project of a faster caller
    if known is None or not await lock(session, known.id):
        raise NotFoundError(f"project {name!r}")
    return known


async def lock(session: WriteSession, project_id: str) -> bool:
    """Whether the project exists. Until commit no other transaction deletes it, or commits a checkpoint of it."""
    query = select(ProjectRow.id).where(ProjectRow.id == project_id).with_for_update()
    return (await session.execute(query)).scalar() is not None


def is_hidden() -> ColumnElement[bool]:
    """Whether a caller without a team gets another project by this one's name, and must use its id."""
    other = aliased(ProjectRow)
    has_its_name = and_(other.organisation == ProjectRow.organisation, other.name == ProjectRow.name)
    of_others = select(other.id).where(has_its_name, other.id != ProjectRow.id).correlate(ProjectRow)
    return and_(ProjectRow.team != DEFAULT_TEAM, exists(of_others))


def is_shown() -> ColumnElement[bool]:
    """Whether a ``CheckpointRow`` is a checkpoint to its users: see ``is_reserved``."""
    return or_(CheckpointRow.name == LOOSE, ~CheckpointRow.name.startswith("."))


async def listed(
    session: ReadSession, organisation: str, team: str | None = None, project_id: str | None = None
) -> list[ProjectState]:
    """Projects, oldest first, or this one. Archives, and checkpoints that were evicted and collected, do not count."""
    is_held = exists().where(ManifestRow.digest == CheckpointRow.manifest)
    counted = func.count(CheckpointRow.id), func.coalesce(func.sum(CheckpointRow.bytes_total), 0)
    query = (
        select(ProjectRow, *counted)
        .outerjoin(CheckpointRow, and_(CheckpointRow.project == ProjectRow.id, is_held, is_shown()))
        .where(ProjectRow.organisation == organisation)
        .group_by(ProjectRow.id)
        .order_by(ProjectRow.created_at, ProjectRow.id)
    )
    if team is not None:
        query = query.where(ProjectRow.team == team)
    if project_id is not None:
        query = query.where(ProjectRow.id == project_id)
    return [ProjectState(row, count, int(size)) for row, count, size in (await session.execute(query)).all()]


async def checkpoints_of(session: ReadSession, project_id: str, limit: int) -> Sequence[CheckpointRow]:
    """Some checkpoints and archives of a project, including those whose manifest was evicted and collected."""
    query = select(CheckpointRow).where(CheckpointRow.project == project_id).order_by(CheckpointRow.id).limit(limit)
    return (await session.execute(query)).scalars().all()


async def pushed_by(session: ReadSession, project_id: str, job: str) -> Sequence[CheckpointRow]:
    """All that a job of the project pushed, including those whose manifest was evicted and collected."""
    query = select(CheckpointRow).where(CheckpointRow.project == project_id, CheckpointRow.job == job)
    return (await session.execute(query.order_by(CheckpointRow.id))).scalars().all()


async def forget(session: WriteSession, project_id: str) -> None:
    """Delete the row of a project that has no checkpoints left."""
    await session.execute(delete(ProjectRow).where(ProjectRow.id == project_id))
