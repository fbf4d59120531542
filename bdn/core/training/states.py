"""The states of a training job: what its row, its ranks and the time make of it, and what its agents are commanded.

    CREATED → PENDING → DEPLOYING → RUNNING → COMPLETED
    A failure before RUNNING ends as DEPLOY_FAILED, a later one as FAILED, a requested stop as STOPPED.

A job ends only once its ranks have: a rank has ended, its node is lost, or its last push has taken too long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

Status = Literal["CREATED", "PENDING", "DEPLOYING", "RUNNING", "COMPLETED", "FAILED", "DEPLOY_FAILED", "STOPPED"]
RankState = Literal["STAGING", "STAGED", "RUNNING", "ENDED", "LOST"]
Want = Literal["stage", "go", "stop"]

ACTIVE: Final[tuple[Status, ...]] = ("CREATED", "PENDING", "DEPLOYING", "RUNNING")
OVER: Final[tuple[RankState, ...]] = ("ENDED", "LOST")
STAGE_SECONDS: Final = 3600.0  # from the placement until every rank is STAGED
LAST_PUSH_SECONDS: Final = 3600.0  # from the end of a rank's commands until its checkpoints are pushed
SILENT_SECONDS: Final = 60.0  # without a heartbeat, after which a node is lost
_ORDER: Final[dict[RankState, int]] = {"STAGING": 0, "STAGED": 1, "RUNNING": 2, "ENDED": 3, "LOST": 3}
_SIGNALS: Final = 128  # a rank that signal n killed has the exit code 128 + n (POSIX shells)
_KILLED: Final = 137


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed. ``code`` is one of docs/contract.md."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


@dataclass(frozen=True, slots=True)
class JobRank:
    """A rank as its agent reported it last. ``exited_at``: when its commands were known to have ended."""

    node: str
    state: RankState = "STAGING"
    exit_code: int | None = None
    failure: Failure | None = None
    exited_at: float | None = None
    bytes_done: int = 0
    bytes_total: int | None = None

    @property
    def fraction(self) -> float:
        return self.bytes_done / self.bytes_total if self.bytes_total else float(self.bytes_total == 0)


@dataclass(frozen=True, slots=True)
class Job:
    """``since``: when it entered its status. ``ending_at``: when its end was requested or decided.

    With ``failure`` it ends as failed, otherwise with ``ending_at`` as stopped.
    """

    status: Status
    since: float
    ranks: tuple[JobRank, ...] = field(default=())
    ending_at: float | None = None
    failure: Failure | None = None

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE


def can_follow(before: RankState, after: RankState) -> bool:
    """Whether a report of ``after`` is news: reports may be repeated, and arrive late."""
    return before not in OVER and _ORDER[after] >= _ORDER[before]


def advance(job: Job, now: float) -> Job:
    """The job after all steps that are due at ``now``; the same job if none is.

    The step from CREATED or PENDING to DEPLOYING is not among them: it takes nodes (``placement``).
    """
    if not job.is_active:
        return job
    if job.ending_at is None and (failure := _failure(job, now)) is not None:
        job = replace(job, failure=failure, ending_at=now)
    if job.ending_at is not None:
        return _entered(job, _end(job), now) if all(_is_over(rank, job, now) for rank in job.ranks) else job
    if job.status == "DEPLOYING" and all(rank.state == "STAGED" for rank in job.ranks):
        return _entered(job, "RUNNING", now)
    if job.status == "RUNNING" and all(rank.state == "ENDED" for rank in job.ranks):
        return _entered(job, "COMPLETED", now)
    return job


def wanted(job: Job, rank: JobRank) -> Want | None:
    """The command to the rank's agent; None if there is nothing left to do."""
    if not job.is_active or rank.state in OVER:
        return None
    if job.ending_at is not None:
        return "stop"
    if job.status == "RUNNING":
        return "go"
    return "stage" if rank.state == "STAGING" else None


def slowest(ranks: Sequence[JobRank]) -> int | None:
    """The rank that has staged the smallest part of its bytes; None if none is STAGING."""
    staging = [number for number, rank in enumerate(ranks) if rank.state == "STAGING"]
    return min(staging, key=lambda number: ranks[number].fraction, default=None)


def _entered(job: Job, status: Status, now: float) -> Job:
    return replace(job, status=status, since=now)


def _end(job: Job) -> Status:
    if job.failure is None:
        return "STOPPED"
    return "FAILED" if job.status == "RUNNING" else "DEPLOY_FAILED"


def _is_over(rank: JobRank, job: Job, now: float) -> bool:
    since = (job.ending_at or now) if rank.exited_at is None else rank.exited_at
    return rank.state in OVER or now - since >= LAST_PUSH_SECONDS


def _failure(job: Job, now: float) -> Failure | None:
    for number, rank in enumerate(job.ranks):
        if (failure := _failure_of(number, rank, job.status, now)) is not None:
            return failure
    if job.status == "DEPLOYING" and now - job.since >= STAGE_SECONDS and (late := slowest(job.ranks)) is not None:
        rank = job.ranks[late]
        done = f"{rank.bytes_done} of {rank.bytes_total} bytes" if rank.bytes_total else "nothing"
        return Failure(
            "STAGE_TIMEOUT",
            f"rank {late} on node {rank.node} had staged {done} after {STAGE_SECONDS / 60:.0f} minutes; "
            "'bdn jobs show JOB' shows its ranks",
        )
    return None


def _failure_of(number: int, rank: JobRank, status: Status, now: float) -> Failure | None:
    named = f"rank {number} on node {rank.node}"
    if rank.state == "LOST":
        return rank.failure or Failure("NODE_LOST", f"{named}: the node is lost, or restarted without the run")
    if rank.failure is not None and rank.state in ("RUNNING", "ENDED"):  # before that its agent retries
        return Failure(rank.failure.code, f"{named}: {rank.failure.message}")
    if rank.exit_code:
        return Failure("COMMAND_FAILED", f"{named} {_exit(rank.exit_code)}")
    if rank.state == "ENDED" and status != "RUNNING":
        return Failure("COMMAND_FAILED", f"{named} ended before its commands were started")
    if rank.exited_at is not None and rank.state != "ENDED" and now - rank.exited_at >= LAST_PUSH_SECONDS:
        return Failure(
            "CHECKPOINT_SYNC_FAILED",
            f"{named}: its checkpoints were not pushed within {LAST_PUSH_SECONDS / 60:.0f} minutes of the end of its commands",
        )
    return None


def _exit(code: int) -> str:
    if code == _KILLED:
        return f"was killed (exit code {code}), as happens when memory runs out"
    by = f", from signal {code - _SIGNALS}" if code > _SIGNALS else ""
    return f"ended with exit code {code}{by}"
