"""What the page says of a training job: its phase, its slowest node, and what it waits for."""

from datetime import UTC, datetime
from typing import Any

import pytest

from bdn.mirror.page.job_nodes import lines_of_stages, slowest
from bdn.mirror.page.job_view import job_view, log_lines
from bdn.wire.shapes import ErrorBody
from bdn.wire.stage_schema import JobStage
from bdn.wire.training_schema import InstanceType, LogLine, OwnFields, ProjectName, RankDocument, TrainingJob

NOW = 1_800_000_000.0
NEEDS = InstanceType(id="H200:8", name="H200:8", memory_limit_mib=0, millicpu_limit=0, gpu_count=8, gpu_type="H200")


def job(
    status: str, *ranks: RankDocument, error: str | None = None, slowest: int | None = None, **own: Any
) -> TrainingJob:
    given: dict[str, Any] = {"mirror_id": None, "cluster": "c", "waiting_for": None, "stopping": False, **own}
    at = datetime.fromtimestamp(NOW - 120, UTC)
    return TrainingJob(
        id="0a1b2c3d4e", created_at=at, updated_at=at, current_status=f"TRAINING_JOB_{status}", error_message=error,
        instance_type=NEEDS, node_count=len(ranks) or 1, training_project_id="p123456789",
        training_project=ProjectName(id="p123456789", name="llama"), name="job-1", checkpoint_sync_status=None,
        priority=0, availability_model="dedicated",
        bdn=OwnFields(ranks=list(ranks), slowest_rank=slowest, **given),
    )  # fmt: skip


def rank(number: int, state: Any = "STAGING", **fields: Any) -> RankDocument:
    return RankDocument(rank=number, node=f"n{number}", state=state, **fields)


def test_a_deploying_job__names_its_slowest_node_and_lists_it_first() -> None:
    ranks = (
        rank(0, "STAGED", bytes_done=10, bytes_total=10),
        rank(1, bytes_done=9, bytes_total=10),
        rank(2, bytes_done=1, bytes_total=10, eta_seconds=65),
    )
    view = job_view(job("DEPLOYING", *ranks, slowest=2), NOW)

    assert view.answer == "The slowest node is c/n2 (rank 2): 10 % of its bytes, 1m 5s left."
    assert [(line.node, line.percent, line.bytes) for line in view.ranks] == [
        ("n2", 10, "1 B of 10 B"), ("n1", 90, "9 B of 10 B"), ("n0", 100, "10 B of 10 B"),
    ]  # fmt: skip


def test_phases__show_the_current_one() -> None:
    view = job_view(job("DEPLOYING", rank(0)), NOW)

    assert [(one.name, one.is_past, one.is_current) for one in view.phases] == [
        ("CREATED", True, False), ("PENDING", True, False), ("DEPLOYING", False, True), ("RUNNING", False, False),
        ("COMPLETED", False, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "ranks", "names"),
    [
        ("STOPPED", [], ["CREATED", "PENDING", "STOPPED"]),
        ("DEPLOY_FAILED", [rank(0)], ["CREATED", "PENDING", "DEPLOYING", "DEPLOY_FAILED"]),
        ("FAILED", [rank(0, "LOST")], ["CREATED", "PENDING", "DEPLOYING", "RUNNING", "FAILED"]),
        ("STOPPED", [rank(0, "ENDED")], ["CREATED", "PENDING", "DEPLOYING", "RUNNING", "STOPPED"]),
    ],
)
def test_phases_of_a_job_that_failed__end_where_it_did(
    status: str, ranks: list[RankDocument], names: list[str]
) -> None:
    view = job_view(job(status, *ranks), NOW)

    assert [one.name for one in view.phases] == names
    assert view.phases[-1].is_current
    assert not view.is_active


def test_a_job_that_waits_or_failed__says_why() -> None:
    assert job_view(job("PENDING", error="no node has 8 GPUs H200 free"), NOW).answer == (
        "Waits: no node has 8 GPUs H200 free."
    )
    failed = job(
        "FAILED", rank(0, "ENDED", exit_code=1), error="rank 0 on node n0 ended with exit code 1 [COMMAND_FAILED]"
    )
    assert job_view(failed, NOW).answer.startswith("rank 0 on node n0 ended")
    assert job_view(job("CREATED"), NOW).answer == "Now its weights are mirrored."


def test_a_rank__has_its_error_with_a_remedy() -> None:
    error = ErrorBody(code="CACHE_FULL", message="does not fit now", retryable=True)
    (line,) = job_view(job("DEPLOYING", rank(0, error=error)), NOW).ranks

    assert line.problem is not None
    assert line.problem.remedy == "Release stages, or wait for a job to end."
    assert (line.percent, line.bytes) == (None, "0 B")


def test_a_log__is_shown_oldest_first_with_the_time_of_day() -> None:
    lines = [
        LogLine(timestamp="1800000001000000000", message="step 2", replica="r0"),
        LogLine(timestamp="1800000000000000000", message="created", replica=None),
    ]

    assert [(line.at, line.replica, line.message) for line in log_lines(lines)] == [
        ("08:00:00", None, "created"), ("08:00:01", "r0", "step 2"),
    ]  # fmt: skip


def test_a_log__is_cut_where_a_job_writes_very_much_and_shows_no_control_characters() -> None:
    lines = [LogLine(timestamp="1800000000000000000", message="x" * 64_000, replica="r0") for _ in range(200)]
    shown = log_lines(lines)

    assert 20 < len(shown) < 40
    assert {len(line.message) for line in shown} == {2001}
    (line,) = log_lines([LogLine(timestamp="1800000000000000000", message="\x1b[31m\u202egnp", replica=None)])
    assert line.message == "\\u001b[31m\\u202egnp"


# --- stages: of jobs that others start, and of ranks ---


def stage(node: str, state: Any = "STAGING", *, done: int = 0, total: int | None = 10, **fields: Any) -> JobStage:
    at = datetime.fromtimestamp(NOW - 180, UTC)
    given: dict[str, Any] = {"mirror_id": None, "manifests": [], "organisation": "default", "bytes_per_second": None}
    given |= {"eta_seconds": None, "error": None, "alive": True, "reported_at": at, "since": at, **fields}
    return JobStage(
        cluster="c", node=node, id=f"stg-{node}", job="job-7", state=state, bytes_done=done, bytes_total=total, **given
    )


def test_stages__are_listed_with_failed_ones_first_and_then_the_slowest() -> None:
    lines = lines_of_stages(
        [
            stage("n1", "READY", done=10),
            stage("n2", done=9, bytes_per_second=3_000_000, eta_seconds=60),
            stage("n3", done=1, alive=False),
            stage("n4", "PENDING", total=None),
            stage("n5", "FAILED", error="CACHE_FULL"),
        ],
        NOW,
    )

    assert [(line.node, line.percent, line.rate, line.left) for line in lines] == [
        ("n5", 0, None, None), ("n4", None, None, None), ("n3", 10, None, None), ("n2", 90, "3 MB/s", "1m"),
        ("n1", 100, None, None),
    ]  # fmt: skip
    assert lines[0].problem is not None
    assert lines[0].problem.remedy == "Release stages, or wait for a job to end."
    assert lines[2].sentence == "The slowest node is c/n3: 10 % of its bytes; its last heartbeat was 3 min ago."
    behind = slowest(lines)
    assert behind is not None
    assert behind.sentence == "The slowest node is c/n4: nothing staged yet."
    assert slowest(lines[4:]) is None


def test_the_stages_of_ranks__decide_which_node_is_slowest() -> None:
    ranks = rank(0, bytes_done=1, bytes_total=10), rank(1, bytes_done=2, bytes_total=10), rank(2, "STAGED")
    view = job_view(job("DEPLOYING", *ranks), NOW, [stage("n0", done=9), stage("n1", done=5), stage("n2", done=1)])

    assert view.answer == "The slowest node is c/n1 (rank 1): 50 % of its bytes."
    assert [line.node for line in view.ranks] == ["n1", "n0", "n2"]
