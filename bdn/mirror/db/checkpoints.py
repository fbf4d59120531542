"""Every statement about checkpoints, and about chunks that are pushed before a manifest names them.

The set of a push refers to its chunks. An identity records for the team's next push that the team has pushed a chunk.
"""

import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypedDict

from sqlalchemy import Select, delete, exists, select
from sqlalchemy.orm import defer

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError, RevisionNotFoundError, SourceNotFoundError
from bdn.core.source.upstream import Identity
from bdn.core.source.uri import CheckpointUri
from bdn.core.store import scope_of
from bdn.core.training.checkpoints import ARCHIVE, by_number
from bdn.core.training.states import ACTIVE
from bdn.mirror.db import chunks, identities, manifests, mirrors, projects
from bdn.mirror.db.database import ReadSession, WriteSession, delete_in, select_in
from bdn.mirror.db.identities import Known
from bdn.mirror.db.tables import (
    CheckpointRow,
    ChunkRow,
    Json,
    ManifestRow,
    MirrorRow,
    MirrorSourceRow,
    ProjectRow,
    SetChunkRow,
    TrainingJobRow,
)


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """A checkpoint, its project, and the name or id by which the caller finds the project."""

    row: CheckpointRow
    project: ProjectRow
    named: str

    @property
    def uri(self) -> CheckpointUri:
        return CheckpointUri(self.named, self.row.job, self.row.name, self.row.rank)


def _states(organisation: str, team: str | None) -> Select[CheckpointRow, ProjectRow, bool]:
    query = (
        select(CheckpointRow, ProjectRow, projects.is_hidden())
        .join(ProjectRow, ProjectRow.id == CheckpointRow.project)
        .where(CheckpointRow.organisation == organisation)
    )
    return query if team is None else query.where(ProjectRow.team == team)


def _state(team: str | None, row: CheckpointRow, project: ProjectRow, is_hidden: bool) -> CheckpointState:
    return CheckpointState(row, project, project.id if team is None and is_hidden else project.name)


async def listed(
    session: ReadSession,
    organisation: str,
    team: str | None = None,
    *,
    project: str | None = None,
    job: str | None = None,
    with_details: bool = True,
    with_archives: bool = False,
) -> list[CheckpointState]:
    """Checkpoints of an organisation or a team, of a project by name or id, of a job; in no order.

    Evicted and collected ones are left out. ``with_archives``: also what has a reserved name. Raises
    ``InvalidRequestError`` if several projects have the name.
    """
    query = _states(organisation, team).where(exists().where(ManifestRow.digest == CheckpointRow.manifest))
    if not with_archives:
        query = query.where(projects.is_shown())
    if not with_details:  # 64 KiB each
        query = query.options(defer(CheckpointRow.details, raiseload=True))
    if project is not None:
        found = await projects.find(session, organisation, project, team)
        query = query.where(CheckpointRow.project == (found.id if found else ""))
    if job is not None:
        query = query.where(CheckpointRow.job == job)
    return [_state(team, *one) for one in (await session.execute(query)).all()]


async def syncing(session: ReadSession, organisation: str) -> set[tuple[str, str, str, str]]:
    """Team, project as it was named, job and name of the checkpoints that a rank is pushing now."""
    return {
        (row.team, uri.project, uri.job or "", uri.checkpoint or "")
        for row, uri in await mirrors.pushes(session, organisation)
    }


async def found(
    session: ReadSession, organisation: str, uri: CheckpointUri, team: str | None = None
) -> CheckpointState:
    """The checkpoint that a source names now.

    Without a job: of the newest checkpoint's job. Without a checkpoint: the newest loadable one.

    Raises:
        SourceNotFoundError: the organisation or team has no such project, job or checkpoint.
        RevisionNotFoundError: the checkpoint exists, but not of this rank.
        InvalidRequestError: several teams have a project of this name.
    """
    known = await listed(
        session,
        organisation,
        team,
        project=uri.project,
        job=uri.job,
        with_details=False,
        with_archives=uri.checkpoint is not None,
    )
    named = [one for one in known if uri.checkpoint in (None, one.row.name)]
    if not named:
        raise SourceNotFoundError(str(uri), "no such checkpoint was pushed, or it was deleted")
    if uri.checkpoint is None:
        loadable = {(one.row.job, one.row.name) for one in named if one.row.is_loadable}
        named = [one for one in named if (one.row.job, one.row.name) in loadable]
    if not named:
        raise SourceNotFoundError(str(uri), "nothing pushed holds weights; name a checkpoint: bt://project@job/name")
    newest = max(named, key=lambda one: age(one.row)).row
    for one in named:
        if (one.row.job, one.row.name, one.row.rank) == (newest.job, newest.name, uri.rank):
            return one
    raise RevisionNotFoundError(str(uri), f"rank-{uri.rank}")


def age(row: CheckpointRow) -> tuple[float, tuple[tuple[int, str], ...], int]:
    """A sort key: by the commit of the first version, then by name, with numbers compared as numbers.

    The time is the database's: jobs can date their files as they like.
    """
    return row.created_at, by_number(row.name), row.rank


@dataclass(frozen=True, slots=True)
class PushScope:
    """The team that finds what it pushed: no other team can discover it, or make a checkpoint of it."""

    organisation: str
    team: str

    def identity(self, digest: Digest) -> Identity:
        """By which a chunk that this team pushed, or a file of its checkpoints, is found."""
        return Identity.of(scope_of(self.organisation), "push", digest.hex, self.team)


async def known_chunks(
    session: ReadSession, whose: PushScope, push_set: int, teams: Sequence[str | None], digests: Sequence[Digest]
) -> set[Digest]:
    """The ones of these chunks that need not be sent again, provided they are stored.

    They are in the push's set, this team pushed them before, or a manifest refers to them that one of these ``teams``
    (None: the organisation) may read.
    """
    known = set(await chunks.of(session, chunks.stored, digests, [push_set]))
    keys = {whose.identity(digest).key: digest for digest in digests}
    known.update(keys[key] for key in await identities.find(session, list(keys)))
    for team in teams:
        readable = _readable(whose.organisation, team)
        raw = [digest.to_bytes() for digest in digests]
        known.update(
            [Digest.from_bytes(found) async for (found,) in select_in(session, readable, ChunkRow.digest, raw)]
        )
    return known


def _readable(organisation: str, team: str | None) -> Select[bytes]:
    """Chunks of manifests that the organisation, or the team, may read."""
    may_read = (
        ManifestRow.set_id == SetChunkRow.set_id,
        mirrors.is_mirrored_for(organisation, ManifestRow.digest, team),
        ~mirrors.is_given_up(organisation, ManifestRow.digest),
    )
    return select(ChunkRow.digest).where(exists().where(SetChunkRow.chunk_id == ChunkRow.id, *may_read))


async def record(session: WriteSession, whose: PushScope, sizes: Mapping[Digest, int]) -> None:
    known = [Known(whose.identity(one).key, size, one, one.to_bytes()) for one, size in sizes.items()]
    await identities.record(session, known)


class Version(TypedDict):
    """What one push commits: columns of a ``CheckpointRow``."""

    mirror: str
    manifest: str
    created_at: float
    committed_at: float
    files_total: int
    bytes_total: int
    is_loadable: bool
    details: Json


async def put(session: WriteSession, whose: PushScope, uri: CheckpointUri, row: Version) -> str | None:
    """Record a checkpoint, or its next version, which keeps the time of the first.

    Returns the push of the previous version.
    """
    project = await projects.project(session, whose.organisation, whose.team, uri.project, row["committed_at"])
    key = {"project": project.id, "job": uri.job, "name": uri.checkpoint, "rank": uri.rank}
    query = select(CheckpointRow).filter_by(**key).with_for_update()
    known = (await session.execute(query)).scalar()
    if known is None:
        fresh = f"chk_{secrets.token_hex(12)}"
        session.add(CheckpointRow(id=fresh, organisation=whose.organisation, **key, **row))
        await session.flush()
        return None
    before = known.mirror
    first = {"created_at": known.details.get("created_at", known.created_at)}
    for name, value in row.items():
        if name != "created_at":
            setattr(known, name, value)
    known.details = {**known.details, **first}
    await session.flush()
    return before


async def committed(
    session: ReadSession, organisation: str, team: str | None, uri: CheckpointUri
) -> tuple[str, float] | None:
    """The push of the newest version of one checkpoint of one rank, and its time.

    The project belongs to this team; with None, to any.
    """
    project = await projects.find(session, organisation, uri.project, team)
    if project is None:
        return None
    named = {"project": project.id, "job": uri.job, "name": uri.checkpoint, "rank": uri.rank}
    found = await session.execute(select(CheckpointRow.mirror, CheckpointRow.committed_at).filter_by(**named))
    return None if (row := found.one_or_none()) is None else (row.mirror, row.committed_at)


async def archive(session: ReadSession, project_id: str, job: str) -> tuple[CheckpointRow, ProjectRow] | None:
    query = select(CheckpointRow, ProjectRow).join(ProjectRow, ProjectRow.id == CheckpointRow.project)
    query = query.where(CheckpointRow.project == project_id, CheckpointRow.job == job, CheckpointRow.name == ARCHIVE)
    found = (await session.execute(query)).one_or_none()
    return None if found is None else (found[0], found[1])


async def pushed(
    session: ReadSession, organisation: str, uri: CheckpointUri, team: str | None = None
) -> MirrorSourceRow:
    """The source of the push of a checkpoint; arguments and errors as in ``found``."""
    row = (await found(session, organisation, uri, team)).row
    query = select(MirrorSourceRow).where(MirrorSourceRow.mirror_id == row.mirror, MirrorSourceRow.position == 0)
    return (await session.execute(query)).scalar_one()


async def get(session: ReadSession, organisation: str, checkpoint_id: str, team: str | None = None) -> CheckpointState:
    query = _states(organisation, team).where(CheckpointRow.id == checkpoint_id)
    found = (await session.execute(query)).one_or_none()
    if found is None:
        raise NotFoundError(f"checkpoint {checkpoint_id}")
    return _state(team, *found)


async def remove(session: WriteSession, row: CheckpointRow) -> list[str]:
    """Delete a checkpoint and its push. Returns the manifests that were dropped: see ``drop_push``."""
    await session.execute(delete(CheckpointRow).where(CheckpointRow.id == row.id))
    copies = await _remove_copies(session, row.job) if row.name == ARCHIVE else set()
    return await drop_push(session, row.mirror, copies)


async def _remove_copies(session: WriteSession, job_id: str) -> set[str]:
    """Delete what the mirror of a job that has ended holds beside the weights: its archive and what it loaded.

    No other job has this mirror, since the archive is one of its sources. Returns the manifests.
    """
    job = await session.get(TrainingJobRow, job_id)
    if job is None or job.status in ACTIVE:
        return set()
    extras = [extra["source"] for extra in job.extras]
    its = delete(MirrorSourceRow).where(MirrorSourceRow.mirror_id == job.mirror_id, MirrorSourceRow.source.in_(extras))
    found = (await session.execute(its.returning(MirrorSourceRow.manifest))).scalars()
    return {name for name in found if name is not None}


async def drop_push(session: WriteSession, mirror_id: str, others: AbstractSet[str] = frozenset()) -> list[str]:
    """Delete a push, and drop its manifest, and others, if nothing names them. Returns the manifests that were dropped.

    They get no tombstone: a checkpoint cannot be restored.
    """
    query = select(MirrorSourceRow.manifest).where(MirrorSourceRow.mirror_id == mirror_id)
    named = sorted({str(name) for name in (await session.execute(query)).scalars() if name} | others)
    for column in (MirrorSourceRow.mirror_id, MirrorRow.id):
        await delete_in(session, column, [mirror_id])
    # A mirror that publishes the same manifest now commits before the next query, or publishes it anew.
    await manifests.lock(session, named)
    still_named = select(MirrorSourceRow.manifest).where(MirrorSourceRow.manifest.in_(named)).distinct()
    kept = set((await session.execute(still_named)).scalars())
    return await manifests.drop(session, [name for name in named if name not in kept])


async def bytes_with(session: ReadSession, whose: PushScope, uri: CheckpointUri, set_id: int) -> int:
    """Bytes of the distinct chunks of all checkpoints and archives, if this checkpoint had this set's chunks."""
    known = await projects.find(session, whose.organisation, uri.project, whose.team)
    replaced = (known and known.id, uri.job, uri.checkpoint, uri.rank)
    others = [
        one.row.manifest
        for one in await listed(session, whose.organisation, with_details=False, with_archives=True)
        if (one.row.project, one.row.job, one.row.name, one.row.rank) != replaced
    ]
    sets = await manifests.set_ids(session, sorted(set(others)))
    return await chunks.of(session, chunks.bytes_of, {*sets.values(), set_id})


async def archives_without_job(session: ReadSession, before: float) -> list[CheckpointRow]:
    """Some archives that were committed before then and whose job has no row."""
    has_job = exists().where(TrainingJobRow.id == CheckpointRow.job)
    query = select(CheckpointRow).where(CheckpointRow.committed_at < before, CheckpointRow.name == ARCHIVE, ~has_job)
    return list((await session.execute(query.limit(100))).scalars())


async def older_than(session: ReadSession, before: float) -> list[CheckpointRow]:
    """Some checkpoints that were committed before then, oldest first. An archive is kept as long as its job."""
    query = select(CheckpointRow).where(CheckpointRow.committed_at < before, projects.is_shown())
    query = query.order_by(CheckpointRow.committed_at)
    return list((await session.execute(query.limit(100))).scalars())
