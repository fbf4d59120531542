"""Which stages a heartbeat carries, and with which figures."""

from typing import Any

import pytest

from bdn.wire.shapes import ErrorBody
from bdn.wire.stage_schema import BytesFrom
from node_agent.stage.stage import MountRecord, NodeStage, StageRecord, StageRegistry
from node_agent.stage.stage_reports import stage_reports

NOW = 1000.0
MIRROR = f"mir_{'0' * 24}"


def mount(number: int = 1, **figures: Any) -> MountRecord:
    return MountRecord(mount_location=f"/m{number}", manifest=f"b3:{number:064x}", source="hf://org/model", **figures)


def stage(name: str, state: str = "STAGING", **fields: Any) -> NodeStage:
    known = {"job_id": "train", "organisation": "o", "grant": "g", "created_at": 900.0, "mounts": [mount()]}
    return NodeStage(StageRecord.model_validate({"id": name, "state": state, **known, **fields}))


def registry(*stages: NodeStage) -> StageRegistry:
    found = StageRegistry()
    for one in stages:
        found.enter(one)
    return found


def test_stage_reports__have_stages_at_work_first_and_those_that_ended_in_the_last_minute() -> None:
    stages = [
        stage("failed", "FAILED", created_at=999.0, ended_at=999.0),
        stage("old failure", "FAILED", ended_at=NOW - 60),
        stage("ready", "READY", created_at=998.0, ready_at=NOW - 59),
        stage("ready long ago", "READY", ready_at=NOW - 61),
        stage("ready by a clock that was set back", "READY", ready_at=NOW + 1),
        stage("released", "RELEASED", ready_at=NOW - 2, ended_at=NOW - 1),
        stage("older", created_at=1.0),
        stage("newer", "PENDING", created_at=2.0),
    ]
    assert [one.id for one in stage_reports(registry(*stages), NOW)] == ["newer", "older", "failed", "ready"]


def test_stage_reports__are_the_fifty_newest_at_work() -> None:
    stages = [stage(f"{number:03}", created_at=float(number)) for number in range(60)]
    ended = [stage(f"ended {number}", "READY", ready_at=NOW) for number in range(60)]
    assert [one.id for one in stage_reports(registry(*ended, *stages), NOW)] == [f"{59 - one:03}" for one in range(50)]


def test_stage_reports__have_the_figures_of_the_record() -> None:
    sizes = [mount(1, bytes_total=70, bytes_from=BytesFrom(node=10, cluster=20, mirror=30)), mount(2, bytes_total=30)]
    error = ErrorBody(code="CACHE_FULL", message="full", retryable=True)
    failed = stage("x", "FAILED", ended_at=990.0, mounts=sizes, error=error, mirror_id=MIRROR, job_id="j" * 5000)

    (one,) = stage_reports(registry(failed), NOW)
    assert (one.bytes_done, one.bytes_total, one.bytes_per_second, one.since) == (60, 100, None, 990.0)
    assert (one.state, one.error, one.mirror_id, len(one.job)) == ("FAILED", "CACHE_FULL", MIRROR, 4096)
    assert one.manifests == [sizes[0].manifest, sizes[1].manifest]

    ready = stage("x", "READY", ready_at=995.0, bytes_per_second=2.5e6, error=error)  # of a mend that failed
    (one,) = stage_reports(registry(ready), NOW)
    assert (one.state, one.error, one.since, one.bytes_per_second) == ("READY", None, 995.0, 2_500_000)


@pytest.mark.parametrize(("began_at", "since"), [(None, 900.0), (950.0, 950.0)])
def test_stage_reports__of_a_stage_at_work_say_since_when_it_works(began_at: float | None, since: float) -> None:
    working = stage("x", mounts=[mount(1, bytes_total=5), mount(2)])
    working.began_at = began_at
    (one,) = stage_reports(registry(working), NOW)
    assert (one.since, one.bytes_total, one.error) == (since, None, None)

    mending = stage("x", "READY", ready_at=5.0)
    mending.is_mending, mending.began_at = True, began_at
    (one,) = stage_reports(registry(mending), NOW)
    assert (one.state, one.since) == ("STAGING", since)


def test_stage_reports__name_sixteen_manifests_of_a_stage() -> None:
    many = stage("x", mounts=[mount(number) for number in range(20)])
    (one,) = stage_reports(registry(many), NOW)
    assert one.manifests == [f"b3:{number:064x}" for number in range(16)]
