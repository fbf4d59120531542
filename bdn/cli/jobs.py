"""``bdn jobs``: training jobs, the progress of their ranks, and their logs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import click

from bdn.cli.clients import mirror_client
from bdn.cli.output import DONE, FAILED, Output, command_line, table, waiting_for
from bdn.core.errors import NotFoundError
from bdn.core.training.states import ACTIVE, JobRank
from bdn.core.units import format_duration, format_size
from bdn.net.api_clients import MirrorClient
from bdn.net.client import OutageRetry
from bdn.wire.shapes import Items
from bdn.wire.stage_schema import JobStage
from bdn.wire.training_schema import (
    JOBS_AT_ONCE,
    LINES_AT_ONCE,
    PREFIX,
    LogLine,
    LogPage,
    LogQuery,
    RankDocument,
    TrainingJob,
    TrainingJobSearch,
)

_ACTIVE: Final = tuple(f"{PREFIX}{status}" for status in ACTIVE)
_FOLLOW_SECONDS: Final = 2.0
_LATE_NS: Final = 60 * 10**9  # the mirror dates a line at most 45 s before its arrival
_MILLI: Final = 10**6  # nanoseconds


@click.group()
def jobs() -> None:
    """List and stop training jobs, and print their logs."""


async def _found(client: MirrorClient, job_id: str) -> TrainingJob:
    for job in (await client.training_jobs(TrainingJobSearch(job_id=job_id))).training_jobs:
        return job
    raise NotFoundError(f"training job {job_id}")


@jobs.command("ls")
@click.option("--all", "is_all", is_flag=True, help="List jobs that have ended, too.")
@command_line
async def list_jobs(output: Output, *, is_all: bool) -> None:
    """List active training jobs, newest first, with what each waits for or why it failed.

    \b
    Example: bdn jobs ls
    Example: bdn jobs ls --all --json
    """
    async with mirror_client() as client:
        search = TrainingJobSearch(statuses=None if is_all else list(_ACTIVE))
        found = (await client.training_jobs(search)).training_jobs
    rows = [{**_row(job), "reason": job.error_message} for job in found]
    lines = table(rows, "no training jobs" if is_all else "no active training jobs; --all lists those that have ended")
    if len(found) == JOBS_AT_ONCE:
        output.warn(
            f"there may be more: these are the newest {JOBS_AT_ONCE:,}, and 'bdn jobs show JOB' finds older ones"
        )
    output.result(Items[TrainingJob](items=found), lines, [job.id for job in found])


@jobs.command()
@click.argument("job_id", metavar="JOB")
@command_line
async def show(output: Output, *, job_id: str) -> None:
    """Print a training job with its error and the progress of its ranks, the slowest rank first.

    \b
    Example: bdn jobs show 0a1b2c3d4e
    """
    async with mirror_client() as client:
        job = await _found(client, job_id)
        stages = await _stages(client, job)
    own = job.bdn
    row = {**_row(job), "needs": job.instance_type.name, "cluster": own.cluster, "mirror": own.mirror_id}
    ranks = sorted(own.ranks, key=lambda rank: _order(rank, stages.get(rank.node)))
    errors = [
        f"rank {rank.rank} on node {rank.node}: {rank.error.message} [{rank.error.code}]"
        for rank in ranks
        if rank.error is not None
    ]
    reason = [] if job.error_message is None else [job.error_message]
    output.result(
        job, [*table([row]), *reason, *table([_rank_row(rank, stages.get(rank.node)) for rank in ranks]), *errors]
    )


@jobs.command()
@click.argument("job_id", metavar="JOB")
@click.option("--follow", "-f", is_flag=True, help="Print lines as they come, until the job has ended.")
@command_line
async def logs(output: Output, *, job_id: str, follow: bool) -> int:
    """Print the log of a training job, oldest lines first, each line of rank N with (rN) before it.

    With --follow the exit code is 0 only if the job COMPLETED; interrupting the command does not stop the job.

    \b
    Example: bdn jobs logs 0a1b2c3d4e
    Example: bdn jobs logs 0a1b2c3d4e --follow
    """
    read = LogPage(logs=[])
    async with mirror_client() as client:
        job = await _found(client, job_id)
        waiting = waiting_for(output, f"training job {job_id}")
        before: dict[str | None, int] = {}
        while True:  # a job in a terminal state gets no more lines
            last = dict(before)
            async for page in _pages(client, waiting, job, max(before.values(), default=0) - _LATE_NS):
                new = [line for line in page if int(line.timestamp) > before.get(line.replica, -1)]
                last.update({line.replica: int(line.timestamp) for line in new})
                if output.as_json:
                    read.logs += new
                else:
                    output.result(LogPage(logs=new), list(map(_text, new)))
            if not follow or job.current_status not in _ACTIVE:
                break
            before = last
            await asyncio.sleep(_FOLLOW_SECONDS)
            job = await waiting.ask(partial(_found, client, job_id))
    if output.as_json:
        output.result(read, [])
    if not follow:
        return DONE
    output.say(f"training job {job_id} is {_status(job)}")
    return DONE if job.current_status == f"{PREFIX}COMPLETED" else FAILED


@jobs.command()
@click.argument("job_id", metavar="JOB")
@command_line
async def stop(output: Output, *, job_id: str) -> None:
    """Stop a training job: SIGTERM to its processes, SIGKILL after 30 s, and a last upload of its checkpoints.

    The command does not wait for the end. A job that has ended stays as it is, with exit code 0.

    \b
    Example: bdn jobs stop 0a1b2c3d4e
    """
    async with mirror_client() as client:
        before = await _found(client, job_id)
        job = await client.stop_training_job(before.training_project_id, before.id)
    if job.current_status in _ACTIVE:
        line = f"training job {job.id} is stopping; 'bdn jobs logs {job.id} --follow' ends when it has ended"
    elif before.current_status in _ACTIVE:
        line = f"training job {job.id} is {_status(job)}"
    else:
        line = f"training job {job.id} had ended already: {_status(job)}"
    output.result(job, [line])


async def _pages(
    client: MirrorClient, waiting: OutageRetry, job: TrainingJob, first_ns: int
) -> AsyncIterator[list[LogLine]]:
    """The lines of a log since then, in the order of their times."""
    start = max(0, first_ns // _MILLI)
    while True:
        query = LogQuery(start_epoch_millis=start, direction="asc", limit=LINES_AT_ONCE)
        page = (await waiting.ask(partial(client.training_log, job.training_project_id, job.id, query))).logs
        if page:
            yield page
        if len(page) < LINES_AT_ONCE:
            return
        start = int(page[-1].timestamp) // _MILLI + 1  # no page ends inside a millisecond


def _text(line: LogLine) -> str:
    return line.message if line.replica is None else f"({line.replica}) {line.message}"


def _status(job: TrainingJob) -> str:
    return job.current_status.removeprefix(PREFIX)


def _row(job: TrainingJob) -> dict[str, object]:
    return {
        "id": job.id,
        "name": job.name,
        "project": job.training_project.name,
        "status": f"{_status(job)}, stopping" if job.bdn.stopping else _status(job),
        "nodes": job.node_count,
        "created": job.created_at,
    }


async def _stages(client: MirrorClient, job: TrainingJob) -> dict[str, JobStage]:
    """The stages of a job that starts, by node; none from a mirror that is older than this command."""
    if job.current_status != f"{PREFIX}DEPLOYING":
        return {}
    with suppress(NotFoundError):
        return {stage.node: stage for stage in (await client.stages(job.id)).items if stage.cluster == job.bdn.cluster}
    return {}


@dataclass(frozen=True)
class _Filled:
    """How far a rank's files are: as its stage says while it is known, else as its last report did."""

    done: int
    total: int | None
    rate: int | None
    seconds_left: float | None

    @classmethod
    def of(cls, rank: RankDocument, stage: JobStage | None) -> Self:
        if stage is None:
            return cls(rank.bytes_done, rank.bytes_total, None, rank.eta_seconds)
        return cls(stage.bytes_done, stage.bytes_total, stage.bytes_per_second, stage.eta_seconds)

    def fraction(self, rank: RankDocument) -> float:
        return JobRank(rank.node, rank.state, bytes_done=self.done, bytes_total=self.total).fraction


def _order(rank: RankDocument, stage: JobStage | None) -> tuple[bool, float, int]:
    return rank.state != "STAGING", _Filled.of(rank, stage).fraction(rank), rank.rank


def _rank_row(rank: RankDocument, stage: JobStage | None) -> dict[str, object]:
    filled = _Filled.of(rank, stage)
    total = filled.total
    return {
        "rank": rank.rank,
        "node": rank.node,
        "state": rank.state,
        "bytes": format_size(filled.done) + ("" if total is None else f" of {format_size(total)}"),
        "percent": None if total is None else f"{int(100 * filled.fraction(rank))} %",
        "rate": None if filled.rate is None else f"{format_size(filled.rate)}/s",
        "time left": None if filled.seconds_left is None else format_duration(filled.seconds_left),
        "exit code": rank.exit_code,
    }
