"""The routes of runs, which agents call about the ranks that they were commanded to start, and pods about themselves."""

from typing import Annotated

from fastapi import Path, Query, Response

from bdn.mirror.api.callers import TEXT, RankCaller
from bdn.mirror.training.runs import JobRuns
from bdn.net.api_server import new_router, provided
from bdn.wire.run_schema import RunOutput, RunSpec

_Runs = Annotated[JobRuns, provided(JobRuns)]
_RunId = Annotated[str, Path(pattern=r"^[a-z0-9]{10}$")]
_Rank = Annotated[int, Path(ge=0, lt=1000)]
_Named = Annotated[str, Query(min_length=1, max_length=256, pattern=TEXT)]

runs_router = new_router("runs")


@runs_router.get("/runs/{run}/{rank}", summary="Agents and pods of jobs only: all that a rank needs, secrets included")
async def run_spec(
    *,
    runs: _Runs,
    run: _RunId,
    rank: _Rank,
    caller: RankCaller,
    response: Response,
    node: _Named,
    boot_id: _Named,
    volume_id: Annotated[str | None, Query(pattern=r"^[0-9a-f]{32}$")] = None,
) -> RunSpec:
    response.headers["Cache-Control"] = "no-store"
    return await runs.spec(run, rank, caller, node=node, boot_id=boot_id, volume=volume_id)


@runs_router.post(
    "/runs/{run}/{rank}/logs", status_code=204, summary="Agents and pods of jobs only: store lines of a rank's output"
)
async def add_output(runs: _Runs, run: _RunId, rank: _Rank, body: RunOutput, caller: RankCaller) -> None:
    await runs.append(run, rank, caller, body)
