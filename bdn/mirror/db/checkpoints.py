"""Every statement about checkpoints, and about chunks that are pushed before a manifest names them.

A chunk that was pushed is a content of its own, which no manifest names, and which its organisation finds by an identity. So it is
collected as any content that nobody needs: not beside a push at work that began earlier. Its team finds it alone, as what the
team pushed.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from sqlalchemy import BindParameter, Select, and_, bindparam, delete, exists, func, or_, select
from sqlalchemy.orm import defer

from bdn.core.chunk import Digest, FileLayout, chunk_range
from bdn.core.errors import NotFoundError, RevisionNotFoundError, SourceNotFoundError
from bdn.core.source.upstream import Identity
from bdn.core.source.uri import CheckpointUri
from bdn.core.store import scope_of, split_digests
from bdn.core.training.checkpoints import by_number
from bdn.mirror.db import contents, mirrors, projects
from bdn.mirror.db.database import ReadSession, WriteSession, batches, delete_in, insert_new, select_in
from bdn.mirror.db.tables import (
    CheckpointRow,
    ContentChunkRow,
    ContentRow,
    DraftRow,
    IdentityRow,
    ManifestContentRow,
    ManifestRow,
    MirrorRow,
    MirrorSourceRow,
    ProjectRow,
)
from bdn.wire.access_schema import DEFAULT_TEAM

_CHUNKS_AT_ONCE: Final = 2000


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """A checkpoint, its project, and the name or id by which whoever asked finds that."""

    row: CheckpointRow
    project: ProjectRow
    named: str

    @property
    def uri(self) -> CheckpointUri:
        """What it is mirrored by."""
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
) -> list[CheckpointState]:
    """Those of an organisation or a team, of a project by name or id, of a job; in no order. Not what was evicted and collected since.

    ``InvalidRequestError``: the name is that of several projects.
    """
    query = _states(organisation, team).where(exists().where(ManifestRow.digest == CheckpointRow.manifest))
    if not with_details:  # 64 KiB each
        query = query.options(defer(CheckpointRow.details, raiseload=True))
    if project is not None:
        found = await projects.find(session, organisation, project, team)
        query = query.where(CheckpointRow.project == (found.id if found else ""))
    if job is not None:
        query = query.where(CheckpointRow.job == job)
    return [_state(team, *one) for one in (await session.execute(query)).all()]


async def syncing(session: ReadSession, organisation: str) -> set[tuple[str, str, str, str]]:
    """Team, project as it was named, job and name of the checkpoints that some rank pushes now."""
    return {
        (row.team, uri.project, uri.job or "", uri.checkpoint or "")
        for row, uri in await mirrors.pushes(session, organisation)
    }


async def found(
    session: ReadSession, organisation: str, uri: CheckpointUri, team: str | None = None
) -> CheckpointState:
    """The checkpoint that a source names now. Without a job: of the newest checkpoint's job. Without a checkpoint: the newest loadable one.

    Raises:
        SourceNotFoundError: no such project, job or checkpoint is this organisation's, or this team's.
        RevisionNotFoundError: the checkpoint is there, and not of this rank.
        InvalidRequestError: several teams have a project of this name.
    """
    known = await listed(session, organisation, team, project=uri.project, job=uri.job, with_details=False)
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
    """Sorts the one whose first version was committed last to the end, by the database's time: jobs date their files as they like.

    Of equally old ones by name, with numbers compared as numbers.
    """
    return row.created_at, by_number(row.name), row.rank


@dataclass(frozen=True, slots=True)
class PushScope:
    """Who finds what was pushed: nobody else is told of it, nor may make a checkpoint of it."""

    organisation: str
    team: str

    def identity(self, digest: Digest) -> Identity:
        """By which a content that was pushed is found. That of the team Default is as it was before there were teams."""
        team = () if self.team == DEFAULT_TEAM else (self.team,)
        return Identity.of(scope_of(self.organisation), "push", digest.hex, *team)


_OF_SEVERAL_CHUNKS: Final = select(ContentChunkRow.content).distinct()
_PUSHED: Final = (
    select(IdentityRow.key, ContentRow.size)
    .join(ContentRow, ContentRow.digest == IdentityRow.content)
    .where(ContentRow.recorded_at >= bindparam("since"), or_(ContentRow.chunks != b"", ContentRow.size == 0))
    .where(contents.chunks_are_sound())
)


@cache
def _readable(*, is_of_team: bool) -> Select[str, int, bytes]:
    organisation: BindParameter[str] = bindparam("organisation")
    team: BindParameter[str] | None = bindparam("team") if is_of_team else None
    may_read = (
        mirrors.is_mirrored_for(organisation, ManifestContentRow.manifest, team),
        ~mirrors.is_given_up(organisation, ManifestContentRow.manifest),
        ManifestContentRow.content == ContentRow.digest,
    )
    is_named = select(ManifestContentRow.content).where(*may_read).exists()
    is_whole = and_(ContentRow.chunks != b"", contents.chunks_are_sound(), is_named)
    return select(ContentRow.digest, ContentRow.size, ContentRow.chunks).where(is_whole)


async def readable_chunks(
    session: ReadSession, organisation: str, chunks: Sequence[Digest], team: str | None = None
) -> dict[Digest, int]:
    """Those of these chunks that are held as such and belong to what the organisation, or the team, may read; and their sizes in bytes."""
    wanted = {chunk.hex for chunk in chunks}
    whose = {"organisation": organisation} | ({} if team is None else {"team": team})
    sizes: dict[Digest, int] = {}
    named = {
        content async for (content,) in select_in(session, _OF_SEVERAL_CHUNKS, ContentChunkRow.chunk, sorted(wanted))
    }
    readable = _readable(is_of_team=team is not None)
    async for _, size, raw in select_in(session, readable, ContentRow.digest, sorted(wanted | named), **whose):
        for index, name in enumerate(split_digests(raw)):
            if name.hex() in wanted:
                sizes[Digest.from_bytes(name)] = chunk_range(size, index).size
    return sizes


async def pushed_chunks(
    session: ReadSession, whose: PushScope, chunks: Iterable[Digest], since: float = 0.0
) -> dict[Digest, int]:
    """Those of these contents that were pushed in this name, or need not be, since then; and their sizes in bytes."""
    keys = {whose.identity(chunk).key: chunk for chunk in chunks}
    return {
        keys[key]: size async for key, size in select_in(session, _PUSHED, IdentityRow.key, sorted(keys), since=since)
    }


async def record(session: WriteSession, whose: PushScope, layouts: Sequence[FileLayout], now: float) -> None:
    """Contents that the store holds, durably, by what they are found; none is collected beside a push that began before."""
    for some in batches(layouts, _CHUNKS_AT_ONCE):
        by_key = {whose.identity(layout.digest).key: layout for layout in some}
        await contents.record_contents(session, by_key, now)


async def put(session: WriteSession, whose: PushScope, uri: CheckpointUri, row: Mapping[str, object]) -> str | None:
    """Record a checkpoint, or its next version, whose time stays that of the first; the push that brought the version before."""
    now = float(str(row["committed_at"]))
    project = await projects.project(session, whose.organisation, whose.team, uri.project, now)
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
    """The push that brought the newest version of one checkpoint of one rank, and its time, in a project of this team, or of any."""
    project = await projects.find(session, organisation, uri.project, team)
    if project is None:
        return None
    named = {"project": project.id, "job": uri.job, "name": uri.checkpoint, "rank": uri.rank}
    found = await session.execute(select(CheckpointRow.mirror, CheckpointRow.committed_at).filter_by(**named))
    return None if (row := found.one_or_none()) is None else (row.mirror, row.committed_at)


async def get(session: ReadSession, organisation: str, checkpoint_id: str, team: str | None = None) -> CheckpointState:
    """One by its id, or ``NotFoundError``."""
    query = _states(organisation, team).where(CheckpointRow.id == checkpoint_id)
    found = (await session.execute(query)).one_or_none()
    if found is None:
        raise NotFoundError(f"checkpoint {checkpoint_id}")
    return _state(team, *found)


async def remove(session: WriteSession, row: CheckpointRow) -> list[str]:
    """Forget a checkpoint, and the push that brought it. Returns the manifest if nothing names it any more: see ``drop_push``."""
    await session.execute(delete(CheckpointRow).where(CheckpointRow.id == row.id))
    return await drop_push(session, row.mirror)


async def drop_push(session: WriteSession, mirror_id: str) -> list[str]:
    """Forget a push, and have the next collection take what nothing else names; the manifest, if it is such.

    It has no tombstone: nobody restores a checkpoint. The caller has called ``mirrors.hold_claims`` before it looked at anything: a
    mirror that publishes the same manifest meanwhile would find it gone.
    """
    query = select(MirrorSourceRow.manifest).where(MirrorSourceRow.mirror_id == mirror_id)
    named = {str(name) for name in (await session.execute(query)).scalars() if name}
    for column in (MirrorSourceRow.mirror_id, MirrorRow.id):
        await delete_in(session, column, [mirror_id])
    others = select(MirrorSourceRow.manifest).distinct()
    named -= {str(name) async for (name,) in select_in(session, others, MirrorSourceRow.manifest, sorted(named))}
    held = select(ManifestRow.digest)
    gone = sorted({name async for (name,) in select_in(session, held, ManifestRow.digest, sorted(named))})
    await insert_new(session, DraftRow, [{"manifest": name, "renewed_at": mirrors.COLLECTED} for name in gone])
    return gone


async def bytes_with(session: ReadSession, whose: PushScope, uri: CheckpointUri, contents: Mapping[str, int]) -> int:
    """Bytes of the distinct contents of all checkpoints of an organisation, were these, by digest, those of this checkpoint."""
    known = await projects.find(session, whose.organisation, uri.project, whose.team)
    replaced = (known and known.id, uri.job, uri.checkpoint, uri.rank)
    others = [
        one.row.manifest
        for one in await listed(session, whose.organisation)
        if (one.row.project, one.row.job, one.row.name, one.row.rank) != replaced
    ]
    named = select(ManifestContentRow.content).where(ManifestContentRow.manifest.in_(others))
    query = select(func.coalesce(func.sum(ContentRow.size), 0)).where(ContentRow.digest.in_(named))
    total = int((await session.execute(query)).scalar_one())
    of_others = select(ContentRow.digest).where(ContentRow.digest.in_(named))
    counted = {digest async for (digest,) in select_in(session, of_others, ContentRow.digest, sorted(contents))}
    return total + sum(size for digest, size in contents.items() if digest not in counted)


async def older_than(session: ReadSession, before: float) -> list[CheckpointRow]:
    """Some checkpoints that were committed before then."""
    query = select(CheckpointRow).where(CheckpointRow.committed_at < before).order_by(CheckpointRow.committed_at)
    return list((await session.execute(query.limit(100))).scalars())
