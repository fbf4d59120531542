"""A job's row as the rules see it, and the steps that they make due: written with the lines that report them.

Every transaction that changes what the rules read (a report, a stop, a lost node) takes the due steps itself. So no step
waits for another process, and two processes cannot take one twice: they lock the row.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from bdn.core.errors import BdnError
from bdn.core.training.states import ACTIVE, Failure, Job, JobRank, Status, Want, advance, wanted
from bdn.mirror.db import mirrors, training
from bdn.mirror.db.database import WriteSession
from bdn.mirror.db.tables import Json, TrainingJobRow
from bdn.mirror.db.training import OWN
from bdn.wire.run_schema import LONGEST_LINE

logger = logging.getLogger(__name__)
_ENTERED: Final[dict[Status, str]] = {
    "RUNNING": "all ranks are staged; their commands start",
    "COMPLETED": "the job completed",
    "STOPPED": "the job was stopped",
}


def ns_of(seconds: float) -> int:
    """Nanoseconds since the epoch, exact to the microsecond, which documents show."""
    return round(seconds * 1e6) * 1000


def failure_of(error: BdnError) -> Failure:
    return Failure(error.code, str(error))


def job_of(row: TrainingJobRow) -> Job:
    status: Status = row.status  # type: ignore[assignment] # only statuses are written
    return Job(status, row.since, tuple(map(_rank_of, row.ranks)), row.ending_at, failure_in(row.failure))


def failure_in(error: Json | None) -> Failure | None:
    return Failure(error["code"], error["message"]) if error else None


def _rank_of(record: Json) -> JobRank:
    return JobRank(
        record["node"],
        record["state"],
        record.get("exit_code"),
        failure_in(record.get("error")),
        record.get("exited_at"),
        record.get("bytes_done", 0),
        record.get("bytes_total"),
    )


def wants_of(row: TrainingJobRow) -> list[Want | None]:
    job = job_of(row)
    return [wanted(job, rank) for rank in job.ranks]


@dataclass(frozen=True)
class Steps:
    """``on_phase`` is called with the status that a job leaves, and the seconds that it was in it."""

    on_phase: Callable[[str, float], None]

    async def say(self, session: WriteSession, row: TrainingJobRow, now: float, *lines: str) -> None:
        """Append lines of the mirror to the log of a job, whose row is locked, after all its other lines."""
        at = max(ns_of(now), await training.last_ns(session, row.id) + 1, ns_of(row.created_at))
        known = await training.newest_batch(session, row.id, OWN)
        batch = [(at + number, line[: LONGEST_LINE // 4]) for number, line in enumerate(lines)]
        await training.add_batch(session, row.id, OWN, 0 if known is None else known.seq + 1, batch)

    async def stop(self, session: WriteSession, row: TrainingJobRow, now: float) -> None:
        """Request the end of a job, whose row is locked. A job that ends already goes on ending as it was decided."""
        if row.status in ACTIVE and row.ending_at is None:
            row.is_stopping, row.ending_at, row.updated_at = True, now, now
            await self.say(session, row, now, "a stop was requested")
            training.note_change(session, row)
        await self.take(session, row, now)

    async def fail(self, session: WriteSession, row: TrainingJobRow, now: float, failure: Failure) -> None:
        """End a job, whose row is locked, for this reason, unless its end was decided before."""
        if row.status in ACTIVE and row.ending_at is None:
            row.failure, row.ending_at, row.updated_at = asdict(failure), now, now
            training.note_change(session, row)
        await self.take(session, row, now)

    async def take(self, session: WriteSession, row: TrainingJobRow, now: float) -> None:
        """Take all due steps of a job, whose row is locked, and wake all that wait for them."""
        while (job := job_of(row)) is not (after := advance(job, now)):
            if after.failure is not job.failure and after.failure is not None:
                row.failure, row.ending_at = asdict(after.failure), after.ending_at
                if after.status == job.status:
                    await self.say(session, row, now, f"{after.failure}; the other ranks are stopped")
            if after.status != job.status:
                await self.enter(session, row, now, after.status, _ENTERED.get(after.status))
            row.updated_at = now
            training.note_change(session, row)

    async def enter(
        self, session: WriteSession, row: TrainingJobRow, now: float, status: Status, line: str | None = None
    ) -> None:
        """Write a new status of a job, whose row is locked."""
        before, row.status = row.status, status
        seconds = now - row.since
        facts = {"job": row.id, "organisation": row.organisation, "status": status, "seconds": round(seconds, 3)}
        logger.info("training job changed", extra=facts)
        self.on_phase(before, seconds)
        row.since = row.updated_at = now
        row.waiting_for = None
        if status not in ACTIVE:
            row.claimed_by = row.claim_expires_at = None
            if before == "CREATED" and row.mirror_id is not None and is_own_mirror(row.extras):
                await mirrors.finish(session, row.mirror_id, "CANCELED", now=now)
        failure = failure_in(row.failure)
        await self.say(session, row, now, line or (f"the job failed: {failure}" if failure else f"the job is {status}"))


def is_own_mirror(extras: Sequence[Json]) -> bool:
    """Whether no other job can have the same mirror: its archive is among the sources."""
    return any(extra["is_archive"] for extra in extras)
