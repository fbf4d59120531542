"""Prefetches as the mirror records them: told to agents until they report the end, on both databases."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.hub import Hub
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)

MODEL = source("hf://org/model")


@pytest.fixture
async def either(
    hub: Hub, upstreams: None, database_options: dict[str, Any], tmp_path: Path
) -> AsyncIterator[MirrorUnderTest]:
    """A mirror that holds a model, on either database."""
    hub.repo("org/model").commit({"a.txt": b"12345"})
    async with mirror_under_test(tmp_path / "mirror", **database_options) as mirror:
        await mirror.ready(MODEL)
        yield mirror


async def begun(mirror: MirrorUnderTest, **request: Any) -> Json:
    answer = await mirror.http.post("/prefetches", json={"source": "hf://org/model"} | request)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def now(mirror: MirrorUnderTest, prefetch: Json, wait_seconds: float = 0) -> Json:
    return dict((await mirror.http.get(f"/prefetches/{prefetch['id']}", params={"wait": wait_seconds})).json())


def report(prefetch: Json, *, running: bool = False, error: Json | None = None, **facts: Any) -> Json:
    return {"reports": [{"id": prefetch["id"], "running": running, "error": error, "prefetch": facts}]}


async def test_an_agent_is_told_until_it_is_at_work_and_its_last_word_ends_its_part(either: MirrorUnderTest) -> None:
    one, two = FakeAgent(either, "n1"), FakeAgent(either, "n2")
    await one.beat()
    await two.beat()
    waiting = asyncio.create_task(one.beat(wait_seconds=30))
    await asyncio.sleep(0)
    prefetch = await begun(either, cluster="c")
    told = (await asyncio.wait_for(waiting, 10))["pending"]

    assert [command["id"] for command in told] == [prefetch["id"]]
    assert [command["id"] for command in (await one.beat())["pending"]] == [prefetch["id"]]  # it may have restarted
    assert (await one.beat(**report(prefetch, running=True, bytes_total=5)))["pending"] == []
    came = {"node": 0, "cluster": 2, "mirror": 3}
    assert (await one.beat(**report(prefetch, bytes_total=5, bytes_from=came)))["pending"] == []
    await one.beat(**report(prefetch, running=True))  # late; what has ended stays as it is
    half = await now(either, prefetch)
    assert half["status"] == "RUNNING"
    assert [(node["node"], node["state"], node["bytes_from"]) for node in half["nodes"]] == [
        ("n1", "READY", came),
        ("n2", "PENDING", {"node": 0, "cluster": 0, "mirror": 0}),
    ]

    ending = asyncio.create_task(now(either, prefetch, 30))
    await asyncio.sleep(0)
    error = {"code": "CACHE_FULL", "message": "the cache is full", "retryable": True}
    await two.beat(**report(prefetch, error=error))
    done = await asyncio.wait_for(ending, 10)
    assert (done["status"], done["nodes"][1]["error"]["code"]) == ("FAILED", "CACHE_FULL")
    assert done["completed_at"]


async def test_a_prefetch_is_ready_when_all_its_nodes_are(either: MirrorUnderTest) -> None:
    one = FakeAgent(either, "n1")
    await one.beat()
    prefetch = await begun(either, nodes=["n1"])
    await one.beat(**report(prefetch))
    assert (await now(either, prefetch))["status"] == "READY"


async def test_a_named_node_that_does_not_live_is_unreachable_at_once(
    either: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    await FakeAgent(either, "n1").beat()
    monkeypatch.setattr("bdn.mirror.db.agents.ALIVE_SECONDS", -1.0)
    prefetch = await begun(either, nodes=["n1"])
    assert (prefetch["status"], [node["state"] for node in prefetch["nodes"]]) == ("FAILED", ["UNREACHABLE"])


async def test_what_cannot_be_prefetched_is_refused(hub: Hub, mirror: MirrorUnderTest) -> None:
    hub.repo("org/model").commit({"a.txt": b"12345"})
    await mirror.ready(MODEL)
    await FakeAgent(mirror, "n1").beat()
    table: list[tuple[Json, int]] = [
        ({"cluster": "nowhere"}, 404),
        ({"nodes": ["nobody"]}, 404),
        ({"source": "hf://org/other", "nodes": ["n1"]}, 404),
        ({"manifest": f"b3:{'0' * 64}", "source": None, "nodes": ["n1"]}, 404),
        ({"mirror_id": "mir_1", "nodes": ["n1"]}, 422),
        ({}, 422),
    ]
    for changes, status in table:
        answer = await mirror.http.post("/prefetches", json={"source": "hf://org/model"} | changes)
        assert answer.status_code == status, (changes, answer.text)


async def test_a_source_without_a_revision_means_its_default_or_else_the_newest_of_its_revisions(
    either: MirrorUnderTest, hub: Hub
) -> None:
    await FakeAgent(either, "n1").beat()
    for repo in ("org/model", "org/pinned"):
        hub.repo(repo).commit({"a.txt": b"of a branch"}, branch="v1")
        await either.ready(source(f"hf://{repo}@v1"))

    default, pinned = [await begun(either, source=f"hf://{repo}", nodes=["n1"]) for repo in ("org/model", "org/pinned")]

    assert (default["sources"], pinned["sources"]) == (["hf://org/model"], ["hf://org/pinned@v1"])


async def test_a_prefetch_outlives_a_restart_of_the_mirror(hub: Hub, upstreams: None, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"a.txt": b"12345"})
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        await mirror.ready(MODEL)
        await FakeAgent(mirror, "n1").beat()
        prefetch = await begun(mirror, nodes=["n1"])
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        agent = FakeAgent(mirror, "n1")
        assert [command["id"] for command in (await agent.beat())["pending"]] == [prefetch["id"]]
        await agent.beat(**report(prefetch))
        assert (await now(mirror, prefetch))["status"] == "READY"
