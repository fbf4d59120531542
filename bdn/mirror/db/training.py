"""Every statement about training jobs and their logs."""

import json
import zlib
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Select, delete, exists, func, or_, select, update
from sqlalchemy.orm import defer

from bdn.core.errors import NotFoundError
from bdn.core.training.states import ACTIVE, SILENT_SECONDS
from bdn.mirror.db.agents import FORGOTTEN_SECONDS, Name
from bdn.mirror.db.database import ReadSession, WriteSession, changed, insert_new, tell
from bdn.mirror.db.tables import (
    AgentRow,
    FactRow,
    Json,
    MirrorRow,
    MirrorSourceRow,
    ProjectRow,
    TrainingJobRow,
    TrainingLogRow,
)
from bdn.mirror.db.waiting import JOBS_CHANGED, agent_topic
from bdn.wire.training_schema import JOBS_AT_ONCE

OWN: Final = -1  # the rank of the mirror's own lines
DROPPED: Final = -2  # the rank of the line that counts the lines dropped from a long log
_SEARCHED: Final = 10_000  # newest jobs of an organisation, by their names and parts of their ids
_PLACEMENT: Final = "placement"
Line = tuple[int, str]  # its time in nanoseconds since the epoch, and its text


@dataclass(frozen=True, slots=True)
class JobState:
    row: TrainingJobRow
    project: ProjectRow


# --- jobs ---


async def insert_job(session: WriteSession, row: TrainingJobRow) -> None:
    session.add(row)
    await session.flush()
    tell(session, JOBS_CHANGED)


async def next_number(session: WriteSession, project: str) -> int:
    """The number of the project's next job, from 1. The caller has locked the project."""
    query = select(func.coalesce(func.max(TrainingJobRow.number), 0)).where(TrainingJobRow.project == project)
    return (await session.execute(query)).scalar_one() + 1


def _states(organisation: str, team: str | None) -> Select[TrainingJobRow, ProjectRow]:
    query = (
        select(TrainingJobRow, ProjectRow)
        .join(ProjectRow, ProjectRow.id == TrainingJobRow.project)
        .where(TrainingJobRow.organisation == organisation)
    )
    return query if team is None else query.where(ProjectRow.team == team)


async def get(session: ReadSession, organisation: str, team: str | None, project: str, job: str) -> JobState:
    """Raises ``NotFoundError`` for missing and for foreign jobs alike."""
    query = _states(organisation, team).where(TrainingJobRow.id == job, TrainingJobRow.project == project)
    if (found := (await session.execute(query)).one_or_none()) is None:
        raise NotFoundError(f"training job {job}")
    return JobState(*found)


async def listed(
    session: ReadSession,
    organisation: str,
    team: str | None,
    *,
    project: str | None = None,
    job: str | None = None,
    statuses: Collection[str] | None = None,
    is_ascending: bool = False,
) -> list[JobState]:
    """The newest ``JOBS_AT_ONCE`` jobs, newest first unless ``is_ascending``."""
    query = _states(organisation, team)
    if project is not None:
        query = query.where(TrainingJobRow.project == project)
    if job is not None:
        query = query.where(TrainingJobRow.id == job)
    if statuses is not None:
        query = query.where(TrainingJobRow.status.in_(statuses))
    query = query.order_by(TrainingJobRow.created_at.desc(), TrainingJobRow.id.desc()).limit(JOBS_AT_ONCE)
    found = [JobState(*one) for one in (await session.execute(query)).all()]
    return found[::-1] if is_ascending else found


async def named(
    session: ReadSession, organisation: str, team: str | None, part: str, limit: int
) -> list[tuple[str, str, str]]:
    """Id, name and project of jobs with ``part`` in their id or name in any case, newest first.

    Among the newest 10,000 jobs of the organisation: no index has parts of names.
    """
    job = TrainingJobRow
    newest = select(job.id, job.name, job.project, job.created_at).where(job.organisation == organisation)
    recent = newest.order_by(job.created_at.desc(), job.id.desc()).limit(_SEARCHED).subquery()
    query = select(recent.c.id, recent.c.name, ProjectRow.name).join(ProjectRow, ProjectRow.id == recent.c.project)
    query = query.where(
        or_(recent.c.id.icontains(part, autoescape=True), recent.c.name.icontains(part, autoescape=True))
    )
    if team is not None:
        query = query.where(ProjectRow.team == team)
    query = query.order_by(recent.c.created_at.desc(), recent.c.id.desc()).limit(limit)
    return [(found, name, project) for found, name, project in (await session.execute(query)).all()]


async def latest(session: ReadSession, organisation: str, project: str | None = None) -> dict[str, TrainingJobRow]:
    """The newest job of each project that has one, by the project's id."""
    newest = select(TrainingJobRow.project, func.max(TrainingJobRow.number).label("number"))
    newest = newest.where(TrainingJobRow.organisation == organisation)
    if project is not None:
        newest = newest.where(TrainingJobRow.project == project)
    of_each = newest.group_by(TrainingJobRow.project).subquery()
    query = select(TrainingJobRow).join(
        of_each, (of_each.c.project == TrainingJobRow.project) & (of_each.c.number == TrainingJobRow.number)
    )
    return {row.project: row for row in (await session.execute(query)).scalars()}


async def active_jobs(session: ReadSession, project: ProjectRow, _: float) -> list[str]:
    """The project's jobs that have not ended, as uses of the project."""
    query = select(TrainingJobRow.id).where(TrainingJobRow.project == project.id, TrainingJobRow.status.in_(ACTIVE))
    return [f"training job {job}" for job in (await session.execute(query.order_by(TrainingJobRow.number))).scalars()]


async def active(session: ReadSession) -> list[TrainingJobRow]:
    """All jobs that have not ended, without their requests: by priority (descending), then age."""
    query = select(TrainingJobRow).where(TrainingJobRow.status.in_(ACTIVE))
    query = query.options(defer(TrainingJobRow.request, raiseload=True))
    order = (TrainingJobRow.priority.desc(), TrainingJobRow.created_at, TrainingJobRow.id)
    return list((await session.execute(query.order_by(*order))).scalars())


def _one(job: str, has_request: bool) -> Select[TrainingJobRow]:
    query = select(TrainingJobRow).where(TrainingJobRow.id == job)
    return query if has_request else query.options(defer(TrainingJobRow.request, raiseload=True))


async def read(session: ReadSession, job: str, *, has_request: bool = True) -> TrainingJobRow | None:
    """The job, of any organisation; without its request, which may be megabytes, unless ``has_request``."""
    return (await session.execute(_one(job, has_request))).scalar()


async def lock(session: WriteSession, job: str, *, has_request: bool = True) -> TrainingJobRow | None:
    query = _one(job, has_request).with_for_update()
    return (await session.execute(query.execution_options(populate_existing=True))).scalar()


async def read_request(session: ReadSession, row: TrainingJobRow) -> Json:
    """The request of a row that was read without it."""
    return (await session.execute(select(TrainingJobRow.request).where(TrainingJobRow.id == row.id))).scalar_one()


async def project_of(session: ReadSession, row: TrainingJobRow) -> ProjectRow:
    return await session.get_one(ProjectRow, row.project)


async def claim(session: WriteSession, job: str, claimant: str, now: float, until: float) -> bool:
    """Claim a job that has to be prepared. Returns False if another worker has it, or nothing is left to prepare."""
    row = TrainingJobRow
    statement = update(row).where(row.id == job, row.status == "CREATED", row.mirror_id.is_(None))
    statement = statement.where(
        row.ending_at.is_(None), or_(row.claim_expires_at.is_(None), row.claim_expires_at < now)
    )
    return await changed(session, statement.values(claimed_by=claimant, claim_expires_at=until)) == 1


async def release_claims(session: WriteSession) -> None:
    """Release all claims: only when no worker runs."""
    statement = update(TrainingJobRow).where(TrainingJobRow.claimed_by.is_not(None))
    await session.execute(statement.values(claimed_by=None, claim_expires_at=None))


async def remove(session: WriteSession, job: str) -> None:
    await session.execute(delete(TrainingJobRow).where(TrainingJobRow.id == job))
    tell(session, JOBS_CHANGED)


async def count_by_status(session: ReadSession) -> dict[str, int]:
    query = select(TrainingJobRow.status, func.count()).group_by(TrainingJobRow.status)
    return {status: count for status, count in (await session.execute(query)).all()}  # noqa: C416 - rows are not pairs


def note_change(session: WriteSession, row: TrainingJobRow) -> None:
    """Once committed, wake the controller and the agents of the job."""
    tell(session, JOBS_CHANGED)
    for node in {rank["node"] for rank in row.ranks}:
        tell(session, agent_topic(str(row.cluster), node))


def is_pod(rank: Json) -> bool:
    """Whether a rank is a pod of Kubernetes rather than an agent's."""
    return "pod" in rank


def runs_as_pods(row: TrainingJobRow) -> bool:
    return any(map(is_pod, row.ranks))


# --- what jobs wait for ---


async def mirrors_that_ended(session: ReadSession, mirrors: Sequence[str]) -> dict[str, tuple[str, Json | None]]:
    """Status and error of each of these mirrors that has ended."""
    query = select(MirrorRow.id, MirrorRow.status, MirrorRow.error)
    query = query.where(MirrorRow.id.in_(mirrors), MirrorRow.completed_at.is_not(None))
    return {found: (status, error) for found, status, error in (await session.execute(query)).all()}


async def mirrored(session: ReadSession, mirror: str) -> list[MirrorSourceRow]:
    """The sources of a mirror, in the order of the request."""
    query = select(MirrorSourceRow).where(MirrorSourceRow.mirror_id == mirror).order_by(MirrorSourceRow.position)
    return list((await session.execute(query)).scalars())


async def lock_placement(session: WriteSession) -> None:
    """Blocks all other placements until commit: two jobs must not take the same GPUs."""
    await insert_new(session, FactRow, [{"name": _PLACEMENT, "value": {}}])
    await session.get_one(FactRow, _PLACEMENT, with_for_update=True)


@dataclass(frozen=True, slots=True)
class JobAgent:
    """An agent that runs jobs, with its ``NodeCapacity``. ``is_member`` of its cluster."""

    cluster: str
    node: str
    boot_id: str
    advertise: str | None
    capacity: Json
    last_heartbeat: float
    is_member: bool

    def is_alive(self, now: float) -> bool:
        return self.is_member and now - self.last_heartbeat < SILENT_SECONDS


async def job_agents(session: ReadSession, now: float) -> dict[Name, JobAgent]:
    """The agents with the role ``job`` that sent a heartbeat within a day."""
    row = AgentRow
    query = select(
        row.cluster, row.node, row.boot_id, row.advertise, row.capacity, row.last_heartbeat, row.joined_at, row.roles
    ).where(row.capacity.is_not(None), row.last_heartbeat > now - FORGOTTEN_SECONDS)
    return {
        (cluster, node): JobAgent(cluster, node, boot, advertise, capacity or {}, heard, joined is not None)
        for cluster, node, boot, advertise, capacity, heard, joined, roles in (await session.execute(query)).all()
        if "job" in roles
    }


# --- logs ---


def pack(lines: Sequence[Line]) -> tuple[bytes, int]:
    """The lines as they are stored, and their size before compression."""
    content = json.dumps(lines, ensure_ascii=False, separators=(",", ":")).encode()
    return zlib.compress(content, 3), len(content)


def unpack(packed: bytes) -> list[Line]:
    return [(at, text) for at, text in json.loads(zlib.decompress(packed))]


@dataclass(frozen=True, slots=True)
class Newest:
    seq: int
    last_ns: int
    lines: int


async def newest_batch(session: ReadSession, job: str, rank: int) -> Newest | None:
    row = TrainingLogRow
    query = select(row.seq, row.last_ns, row.lines).where(row.job == job, row.rank == rank)
    found = (await session.execute(query.order_by(row.seq.desc()).limit(1))).one_or_none()
    return None if found is None else Newest(*found)


async def last_ns(session: ReadSession, job: str) -> int:
    query = select(func.max(TrainingLogRow.last_ns)).where(TrainingLogRow.job == job)
    return (await session.execute(query)).scalar() or 0


async def silent_since(session: ReadSession, before_ns: int) -> list[str]:
    """The ids of the jobs that have not ended and have no line since then."""
    has_line = exists().where(TrainingLogRow.job == TrainingJobRow.id, TrainingLogRow.last_ns >= before_ns)
    query = select(TrainingJobRow.id).where(TrainingJobRow.status.in_(ACTIVE), ~has_line)
    return list((await session.execute(query)).scalars())


def _values(lines: Sequence[Line]) -> dict[str, Any]:
    packed, size = pack(lines)
    return {"first_ns": lines[0][0], "last_ns": lines[-1][0], "lines": len(lines), "size": size, "packed": packed}


async def add_batch(session: WriteSession, job: str, rank: int, seq: int, lines: Sequence[Line]) -> None:
    """Store lines in the order of their times; nothing if the batch is there."""
    await insert_new(session, TrainingLogRow, [{"job": job, "rank": rank, "seq": seq, **_values(lines)}])


async def extend_batch(session: WriteSession, job: str, rank: int, newest: Newest, lines: Sequence[Line]) -> None:
    """Append lines to the newest batch of a rank; nothing if another caller was faster."""
    row = TrainingLogRow
    this = (row.job == job, row.rank == rank, row.seq == newest.seq, row.lines == newest.lines)
    packed = (await session.execute(select(row.packed).where(*this))).scalar()
    if packed is not None:
        await session.execute(update(row).where(*this).values(_values([*unpack(packed), *lines])))


async def log_size(session: ReadSession, job: str) -> int:
    query = select(func.coalesce(func.sum(TrainingLogRow.size), 0)).where(TrainingLogRow.job == job)
    return int((await session.execute(query)).scalar_one())


async def drop_oldest(session: WriteSession, job: str, size: int) -> int:
    """Delete the oldest batches until so many bytes are freed, but no rank's newest one. Returns their lines."""
    row = TrainingLogRow
    newest = select(row.rank, func.max(row.seq)).where(row.job == job).group_by(row.rank)
    kept = {(rank, seq) for rank, seq in (await session.execute(newest)).all()}
    query = select(row.rank, row.seq, row.size, row.lines).where(row.job == job, row.rank >= 0)
    dropped = 0
    for rank, seq, freed, lines in (await session.execute(query.order_by(row.last_ns, row.rank, row.seq))).all():
        if size <= 0:
            break
        if (rank, seq) not in kept:
            await session.execute(delete(row).where(row.job == job, row.rank == rank, row.seq == seq))
            size, dropped = size - freed, dropped + lines
    return dropped


async def note_dropped(session: WriteSession, job: str, at_ns: int, count: int, text: str) -> None:
    """Count the dropped lines in the job's line about them, which is as old as the job. ``text`` has a ``{count}``."""
    row = TrainingLogRow
    known = (await session.execute(select(row.seq).where(row.job == job, row.rank == DROPPED))).scalar() or 0
    total = known + count
    await session.execute(delete(row).where(row.job == job, row.rank == DROPPED))
    await add_batch(session, job, DROPPED, total, [(at_ns, text.format(count=total))])


async def window(
    session: ReadSession, job: str, first_ns: int, last_ns: int, *, is_ascending: bool
) -> AsyncGenerator[TrainingLogRow]:
    """The batches with lines between these times, by their first lines, or descending by their last lines."""
    row = TrainingLogRow
    query = select(row).where(row.job == job, row.last_ns >= first_ns, row.first_ns <= last_ns)
    query = (
        query.order_by(row.first_ns, row.rank, row.seq)
        if is_ascending
        else query.order_by(row.last_ns.desc(), row.rank.desc(), row.seq.desc())
    )
    found = await session.stream_scalars(query.execution_options(yield_per=20))
    try:
        async for one in found:
            yield one
    finally:
        await found.close()


async def expire_logs(session: WriteSession, before: float) -> None:
    """Delete the logs of jobs that ended before then."""
    ended = select(TrainingJobRow.id).where(TrainingJobRow.status.not_in(ACTIVE), TrainingJobRow.since < before)
    await session.execute(delete(TrainingLogRow).where(TrainingLogRow.job.in_(ended)))
