"""The states of a training job, as a table: what a row, its ranks and the time make of it."""

from dataclasses import replace
from typing import Any, Final

import pytest

from bdn.core.training.states import (
    LAST_PUSH_SECONDS,
    STAGE_SECONDS,
    Failure,
    Job,
    JobRank,
    RankState,
    Status,
    advance,
    can_follow,
    slowest,
    wanted,
)

BEGAN: Final = 1000.0
NOW: Final = BEGAN + 10
FULL: Final = Failure("SCRATCH_FULL", "scratch is full")


def rank(state: RankState, **fields: Any) -> JobRank:
    return JobRank("n1", state, **fields)


def ended(code: int = 0, **fields: Any) -> JobRank:
    return rank("ENDED", exit_code=code, exited_at=NOW - 1, **fields)


def job(status: Status, *ranks: JobRank, **fields: Any) -> Job:
    return Job(status, BEGAN, ranks, **fields)


STOPPING: Final[dict[str, Any]] = {"ending_at": NOW - 5}
FAILING: Final[dict[str, Any]] = {"ending_at": NOW - 5, "failure": FULL}
STEPS: Final = [
    (job("CREATED"), NOW, "CREATED", None),
    (job("PENDING"), NOW + 10**6, "PENDING", None),
    (job("CREATED", **STOPPING), NOW, "STOPPED", None),
    (job("PENDING", **STOPPING), NOW, "STOPPED", None),
    (job("PENDING", **FAILING), NOW, "DEPLOY_FAILED", "SCRATCH_FULL"),
    # the barrier
    (job("DEPLOYING", rank("STAGED"), rank("STAGING")), NOW, "DEPLOYING", None),
    (job("DEPLOYING", rank("STAGED"), rank("STAGED")), NOW, "RUNNING", None),
    (job("DEPLOYING", rank("STAGING", failure=FULL)), NOW, "DEPLOYING", None),  # its agent retries
    (job("DEPLOYING", ended(failure=FULL)), NOW, "DEPLOY_FAILED", "SCRATCH_FULL"),
    (job("DEPLOYING", ended()), NOW, "DEPLOY_FAILED", "COMMAND_FAILED"),
    (job("DEPLOYING", ended(failure=FULL), rank("STAGED")), NOW, "DEPLOYING", "SCRATCH_FULL"),
    (job("DEPLOYING", rank("STAGED"), rank("LOST")), NOW, "DEPLOYING", "NODE_LOST"),
    (job("DEPLOYING", rank("STAGING")), BEGAN + STAGE_SECONDS - 1, "DEPLOYING", None),
    (job("DEPLOYING", rank("STAGING")), BEGAN + STAGE_SECONDS, "DEPLOYING", "STAGE_TIMEOUT"),
    (job("DEPLOYING", rank("STAGED"), rank("STAGED"), **STOPPING), NOW, "DEPLOYING", None),
    (job("DEPLOYING", ended(143), rank("LOST"), **STOPPING), NOW, "STOPPED", None),
    # the end
    (job("RUNNING", rank("RUNNING"), ended()), NOW, "RUNNING", None),
    (job("RUNNING", ended(), ended()), NOW, "COMPLETED", None),
    (job("RUNNING", ended(), ended(3)), NOW, "FAILED", "COMMAND_FAILED"),
    (job("RUNNING", ended(3), rank("RUNNING")), NOW, "RUNNING", "COMMAND_FAILED"),
    (job("RUNNING", rank("RUNNING", exit_code=3, exited_at=NOW - 1)), NOW, "RUNNING", "COMMAND_FAILED"),
    (job("RUNNING", ended(143, failure=FULL)), NOW, "FAILED", "SCRATCH_FULL"),
    (job("RUNNING", rank("RUNNING", failure=FULL)), NOW, "RUNNING", "SCRATCH_FULL"),
    (job("RUNNING", rank("LOST")), NOW, "FAILED", "NODE_LOST"),
    (job("RUNNING", rank("LOST"), rank("RUNNING")), NOW, "RUNNING", "NODE_LOST"),
    (job("RUNNING", ended(143), **FAILING), NOW, "FAILED", "SCRATCH_FULL"),
    (job("RUNNING", ended(143), **STOPPING), NOW, "STOPPED", None),
    (job("RUNNING", ended(), rank("RUNNING"), **STOPPING), NOW, "RUNNING", None),
    # the last push
    (job("RUNNING", rank("RUNNING", exit_code=0, exited_at=BEGAN)), BEGAN + LAST_PUSH_SECONDS - 1, "RUNNING", None),
    (
        job("RUNNING", rank("RUNNING", exit_code=0, exited_at=BEGAN)),
        BEGAN + LAST_PUSH_SECONDS,
        "FAILED",
        "CHECKPOINT_SYNC_FAILED",
    ),
    (job("RUNNING", rank("RUNNING"), ending_at=BEGAN), BEGAN + LAST_PUSH_SECONDS - 1, "RUNNING", None),
    (job("RUNNING", rank("RUNNING"), ending_at=BEGAN), BEGAN + LAST_PUSH_SECONDS, "STOPPED", None),
    # what has ended stays
    (job("STOPPED", ended(3)), NOW, "STOPPED", None),
    (job("COMPLETED", rank("LOST")), NOW, "COMPLETED", None),
]


@pytest.mark.parametrize(("before", "now", "status", "code"), STEPS)
def test_advance(before: Job, now: float, status: Status, code: str | None) -> None:
    after = advance(before, now)
    assert (after.status, after.failure and after.failure.code) == (status, code)
    assert (after is before) == (after == before)
    assert after.since == (now if after.status != before.status else BEGAN)
    assert advance(after, now) is after
    if code is not None and before.failure is None:
        assert after.ending_at == now


WANTS: Final = [
    (job("DEPLOYING"), "STAGING", "stage"),
    (job("DEPLOYING"), "STAGED", None),
    (job("RUNNING"), "STAGED", "go"),
    (job("RUNNING"), "RUNNING", "go"),
    (job("RUNNING"), "ENDED", None),
    (job("DEPLOYING", **STOPPING), "STAGING", "stop"),
    (job("DEPLOYING", **STOPPING), "STAGED", "stop"),
    (job("RUNNING", **FAILING), "RUNNING", "stop"),
    (job("RUNNING", **FAILING), "LOST", None),
    (job("FAILED", **FAILING), "RUNNING", None),
]


@pytest.mark.parametrize(("of", "state", "want"), WANTS)
def test_wanted(of: Job, state: RankState, want: str | None) -> None:
    assert wanted(of, rank(state)) == want


def test_can_follow__only_forwards_and_not_after_the_end() -> None:
    order: list[RankState] = ["STAGING", "STAGED", "RUNNING", "ENDED"]
    for first, before in enumerate(order):
        for second, after in enumerate(order):
            assert can_follow(before, after) == (first <= second and before != "ENDED")
    assert can_follow("RUNNING", "LOST")
    assert not can_follow("LOST", "RUNNING")
    assert not can_follow("LOST", "ENDED")


def test_slowest__is_the_staging_rank_with_the_smallest_part() -> None:
    half, most = rank("STAGING", bytes_done=5, bytes_total=10), rank("STAGING", bytes_done=9, bytes_total=10)
    empty = rank("STAGING", bytes_total=0)
    assert slowest([most, half, empty, rank("STAGED")]) == 1
    assert slowest([half, rank("STAGING")]) == 1
    assert slowest([rank("STAGED")]) is None


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exit code 3"), (137, "memory"), (143, "exit code 143, from signal 15")],
)
def test_a_failed_command__is_named_with_its_rank_and_code(code: int, words: str) -> None:
    failure = advance(job("RUNNING", ended(), replace(ended(code), node="n7")), NOW).failure
    assert failure is not None
    assert words in failure.message
    assert "rank 1 on node n7" in str(failure)
    assert str(failure).endswith("[COMMAND_FAILED]")


def test_a_stage_timeout__names_the_slowest_rank() -> None:
    slow = JobRank("n2", "STAGING", bytes_done=3, bytes_total=7)
    failure = advance(job("DEPLOYING", rank("STAGED"), slow), BEGAN + STAGE_SECONDS).failure
    assert failure is not None
    assert "rank 1 on node n2 had staged 3 of 7 bytes" in failure.message
