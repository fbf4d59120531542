"""What the page calls a problem, and what it says to do."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bdn.mirror.page.problems import NodeState, problems_of, problems_of_mirrors, remedy_of
from bdn.wire.heartbeat_schema import AgentDocument
from bdn.wire.mirror_schema import Mirror

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def agent(**fields: Any) -> AgentDocument:
    use = {"budget": 100, "committed": 40, "reserved": 10, "leased": 0, **fields.pop("use", {})}
    known: dict[str, Any] = {
        "node": "n",
        "cluster": "c",
        "roles": [],
        "version": "1",
        "advertise": None,
        "manifests": 0,
        "alive": True,
    }
    return AgentDocument.model_validate({**known, "tiers": {"node": use}, "last_heartbeat": NOW, **fields})


def mirror(status: str, age: timedelta, source: str = "hf://org/m", code: str = "INTERNAL") -> Mirror:
    error = {"code": code, "message": "it failed", "retryable": False, "details": {}} if status == "FAILED" else None
    sources = [{"source": source, "mount_location": "/m", "status": status}]
    return Mirror.model_validate(
        {"id": f"mir_{age.seconds:024x}", "status": status, "created_at": NOW - age, "sources": sources, "error": error}
    )


def titles(*mirrors: Mirror) -> list[str]:
    return [problem.title for problem in problems_of_mirrors(mirrors, NOW)]


@pytest.mark.parametrize(
    ("fields", "expected", "kind", "state"),
    [
        ({}, [], "good", "alive"),
        ({"alive": False}, ["Dead agent"], "bad", "dead"),
        ({"alive": False, "left_at": NOW}, [], "good", "left"),
        ({"alive": False, "unsynced_bytes": 1}, ["Unsynced checkpoints on a dead node", "Dead agent"], "bad", "dead"),
        ({"disputed": True}, ["Disputed name"], "bad", "disputed"),
        ({"use": {"problem": "read-only"}}, ["Tier node has failed"], "bad", "alive"),
        ({"use": {"pressed": 5}}, ["Tier node is pressed"], "warn", "alive"),
        ({"unsynced_bytes": 1}, ["Unsynced checkpoints"], "warn", "alive"),
    ],
)
def test_agent__has_its_problems_and_the_worst_is_its_kind(
    fields: dict[str, Any], expected: list[str], kind: str, state: str
) -> None:
    found = list(problems_of(agent(**fields)))

    assert [problem.title for problem in found] == expected
    assert all(problem.remedy and problem.what and problem.place for problem in found)
    assert (NodeState.of(agent(**fields)).kind, NodeState.of(agent(**fields)).state) == (kind, state)


@pytest.mark.parametrize(
    ("budget", "committed", "part"), [(100, 40, 50), (0, 5, 0), (-5, 5, 0), (10, 5000, 100), (10, -50, 0)]
)
def test_node__is_used_by_a_part_from_0_to_100_whatever_an_agent_says(budget: int, committed: int, part: int) -> None:
    assert NodeState.of(agent(use={"budget": budget, "committed": committed})).percent == part


def test_mirror_that_failed__is_a_problem_for_a_day_until_it_is_requested_again() -> None:
    failed, hour = mirror("FAILED", timedelta(hours=2)), timedelta(hours=1)

    assert titles(failed) == ["Failed mirror"]
    assert titles(failed, mirror("READY", hour)) == titles(mirror("SYNCING", hour), failed) == []
    assert titles(failed, mirror("READY", hour, "hf://org/other")) == ["Failed mirror"]
    assert titles(failed, mirror("READY", timedelta(hours=3))) == ["Failed mirror"]
    assert titles(mirror("FAILED", timedelta(hours=25))) == []


def test_mirror_that_no_worker_has_begun__is_a_problem_after_a_while() -> None:
    assert titles(mirror("PENDING", timedelta(seconds=30))) == []
    assert titles(mirror("PENDING", timedelta(minutes=5))) == ["Waiting mirror"]


def test_remedy__is_of_the_error_or_a_general_one() -> None:
    [gated] = problems_of_mirrors([mirror("FAILED", timedelta(0), code="GATED_SOURCE")], NOW)

    assert "Accept the terms" in gated.remedy
    assert remedy_of("A_CODE_OF_TOMORROW")
