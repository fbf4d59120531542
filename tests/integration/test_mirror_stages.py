"""Stages of a job on all nodes: what heartbeats say of them, in which order they are listed, and what it costs."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.mirror.db import agents
from tests.fakes.clock import Clock
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal, statements_of

pytest_plugins = ("tests.support.mirror.fixtures",)

MIB: Final = 1024**2
LONGEST_SECONDS: Final = 60.0


def staged(job: str = "train", state: str = "STAGING", done: int = 0, total: int | None = 100, **more: Any) -> Json:
    return {
        "id": "stg_1", "job": job, "mirror_id": None, "manifests": [f"b3:{'1' * 64}"], "state": state, "bytes_done": done,
        "bytes_total": total, "bytes_per_second": None, "since": 1.8e9, "error": None, **more,
    }  # fmt: skip


@pytest.fixture
async def either(upstreams: None, database_options: Json, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", work=False, **database_options) as mirror:
        yield mirror


async def stages_of(mirror: MirrorUnderTest, job: str = "train") -> list[Json]:
    return list((await mirror.get("/stages", job=job))["items"])


async def test_stages_of_a_job__are_listed_slowest_first_with_what_their_nodes_said(either: MirrorUnderTest) -> None:
    figures: list[Json] = [
        staged(state="READY", done=100, bytes_per_second=50),
        staged(done=90, bytes_per_second=5),
        staged(total=None, state="PENDING"),
        staged(done=25, bytes_per_second=0),
        staged(done=99, state="FAILED", error="CACHE_FULL"),
    ]
    for number, one in enumerate(figures):
        await FakeAgent(either, f"n{number}").beat(stages=[staged("other"), one])

    found = await stages_of(either)
    assert [one["node"] for one in found] == ["n4", "n2", "n3", "n1", "n0"]
    assert found[0] == {
        "cluster": "c", "node": "n4", "alive": True, "reported_at": found[0]["reported_at"], "id": "stg_1", "job": "train",
        "organisation": None, "mirror_id": None, "manifests": [f"b3:{'1' * 64}"], "state": "FAILED", "bytes_done": 99,
        "bytes_total": 100, "bytes_per_second": None, "eta_seconds": None, "since": "2027-01-15T08:00:00Z", "error": "CACHE_FULL",
    }  # fmt: skip
    assert [one["eta_seconds"] for one in found] == [None, None, None, 2.0, None]
    assert len(await stages_of(either, "other")) == 5
    assert await stages_of(either, "nothing") == []


async def test_stages_of_a_job__come_in_pages(either: MirrorUnderTest) -> None:
    for number in range(5):
        await FakeAgent(either, f"n/{number} \u00e4").beat(stages=[staged(done=number % 2)])
    found: list[list[str]] = []
    cursor = None
    while True:
        page = await either.get("/stages", job="train", limit=2, **({} if cursor is None else {"cursor": cursor}))
        found.append([one["node"] for one in page["items"]])
        if (cursor := page["next_cursor"]) is None:
            break
    assert found == [["n/0 \u00e4", "n/2 \u00e4"], ["n/4 \u00e4", "n/1 \u00e4"], ["n/3 \u00e4"]]
    for wrong in ("x", "AA==", base64.urlsafe_b64encode(b"a %00").decode()):
        answer = await either.http.get("/stages", params={"job": "train", "cursor": wrong})
        assert refusal(answer) == (422, "INVALID_REQUEST")
    for query in ({}, {"job": ""}, {"job": "x" * 257}, {"job": "a\0b"}):
        assert refusal(await either.http.get("/stages", params=query)) == (422, "INVALID_REQUEST")


@pytest.mark.parametrize("job", ['"', "100 %", "a_b", "\\", "/\u00e4\U0001f600", "</script>", "null", "job"])
async def test_stages_of_a_job__any_name_is_found_and_no_other(either: MirrorUnderTest, job: str) -> None:
    names = [job, f"{job}x", job.replace("_", "x") + "!"]
    await FakeAgent(either, "n1").beat(stages=[staged(name, id=f"stg_{name}") for name in names])
    assert [one["job"] for one in await stages_of(either, job)] == [job]


async def test_stages_of_a_node_that_is_silent__are_shown_as_old_for_a_day(tmp_path: Path, upstreams: None) -> None:
    clock = Clock(1_800_000_000.0)
    async with mirror_under_test(tmp_path / "mirror", clock=clock, work=False) as mirror:
        silent, leaving = FakeAgent(mirror, "n1"), FakeAgent(mirror, "n2")
        await silent.beat(stages=[staged()])
        await leaving.beat(stages=[staged()])
        await leaving.beat(stages=[staged()], leaving=True)
        assert [(one["node"], one["alive"]) for one in await stages_of(mirror)] == [("n1", True)]
        clock.now += 100
        (one,) = await stages_of(mirror)
        assert (one["alive"], one["reported_at"]) == (False, "2027-01-15T08:00:00Z")
        clock.now += 86400
        assert await stages_of(mirror) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_done": -1}, {"bytes_total": 2**63}, {"bytes_per_second": -5}, {"since": -1.0}, {"since": 1e300}, {"state": "DONE"},
        {"mirror_id": "x"}, {"manifests": ["x"]}, {"manifests": [f"b3:{'1' * 64}"] * 17}, {"id": "x" * 257}, {"job": "x" * 4097},
        {"error": "x" * 65}, {"error": "<b>"},
    ],
)  # fmt: skip
async def test_a_heartbeat_with_a_wrong_stage__is_refused(idle: MirrorUnderTest, wrong: Json) -> None:
    agent = FakeAgent(idle, "n1")
    said = {key: value for key, value in agent.state.items() if key != "holdings"}
    answer = await idle.http.post("/agents/heartbeat", json={**said, "stages": [{**staged(), **wrong}]})
    assert refusal(answer) == (422, "INVALID_REQUEST")
    answer = await idle.http.post("/agents/heartbeat", json={**said, "stages": [staged()] * 51})
    assert refusal(answer) == (422, "INVALID_REQUEST")


async def until(mirror: MirrorUnderTest, done: list[int]) -> None:
    """Until the listing has these bytes, of a stage on each node."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while sorted(one["bytes_done"] for one in await stages_of(mirror)) != done:
            pass


async def test_progress_in_heartbeats_that_stay_open__is_written_together(either: MirrorUnderTest) -> None:
    crowd = [FakeAgent(either, f"n{number}", holdings=None, state_at=1.0) for number in range(20)]
    for agent in crowd:
        await agent.beat(stages=[staged()])
    with statements_of(either) as seen:
        await asyncio.gather(*(agent.beat(stages=[staged(done=5)], state_at=2.0, wait_seconds=1) for agent in crowd))
        await until(either, [5] * 20)
        written = [statement for statement in seen if statement.startswith(("UPDATE agents", "INSERT INTO agents"))]
        assert written == []  # by the requests themselves
    with statements_of(either) as seen:  # the same figures again
        await asyncio.gather(*(agent.beat(stages=[staged(done=5)], state_at=3.0, wait_seconds=1) for agent in crowd))
    assert not [statement for statement in seen if statement.startswith(("UPDATE", "INSERT"))]


@pytest.mark.parametrize(
    ("boot", "state_at", "is_written"),
    [("b", 2.0, False), ("b", 3.0, True), ("b", None, True), ("earlier", 4.0, False)],
)
async def test_progress__is_not_written_over_a_later_state_of_its_node(
    either: MirrorUnderTest, boot: str, state_at: float | None, is_written: bool
) -> None:
    """A heartbeat waits to be written with others; meanwhile another one, or one of another boot, is written at once."""
    await FakeAgent(either, "n1").beat(stages=[staged(state="READY", done=100)], state_at=3.0)
    async with either.service.requests.database.write() as session:
        await agents.note_heard(session, {("c", "n1"): agents.Heard(4e9, boot, state_at, [staged(done=5)])})
    (one,) = await stages_of(either)
    assert one["state"] == ("STAGING" if is_written else "READY")
    assert one["reported_at"] == "2096-10-02T07:06:40Z"  # of the heartbeat, in any case


async def test_no_other_answer_reads_stages(either: MirrorUnderTest) -> None:
    await FakeAgent(either, "n1").beat(stages=[staged()])
    for path in ("/metrics", "/agents", "/clusters", "/manifests"):
        with statements_of(either) as seen:
            assert (await either.http.get(path)).status_code == 200
        assert not [statement for statement in seen if "stages" in statement], path
