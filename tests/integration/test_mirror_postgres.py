"""The mirror on a real PostgreSQL: the main flow, two workers that share one database, and a database that goes away."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.mirror.db import collection, mirrors
from bdn.mirror.ingest import worker
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.postgres import fetch
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, until
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.mirror.fixtures",)

LARGE = GeneratedContent(3 * CHUNK_SIZE + 1)
MODEL = source("hf://org/model")
LONGEST_SECONDS = 60.0
PUBLISHED_AT_WORK = (
    "SELECT 1 FROM mirror_sources JOIN mirrors ON id = mirror_id"
    " WHERE mirrors.status = 'SYNCING' AND mirror_sources.manifest IS NOT NULL"
)


@pytest.fixture(autouse=True)
def model(hub: Hub) -> None:
    hub.repo("org/model").commit({"model.safetensors": LARGE, "config.json": b"{}", "ü.txt": b"", "b.txt": b"b"})


@pytest.fixture
def database_url(upstreams: None, postgres_url: str) -> str:
    return postgres_url


@pytest.fixture
async def pg_mirror(database_url: str, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with beside(database_url, tmp_path) as mirror:
        yield mirror


def beside(url: str, tmp_path: Path, name: str = "a", **options: Any) -> AbstractAsyncContextManager[MirrorUnderTest]:
    """One of several processes of a mirror: its own data directory, the same database and store."""
    return mirror_under_test(tmp_path / name, database_url=url, store=f"file://{tmp_path}/store", **options)


async def somebody_waits(url: str, work: asyncio.Task[Any]) -> None:
    """Come back when a connection waits for a lock, or when ``work`` has not waited for one."""
    while not await fetch(url, "SELECT 1 FROM pg_locks WHERE NOT granted"):
        if work.done():
            return


async def test_a_claim_that_ran_out_is_taken_over_and_its_first_holder_writes_nothing_more(
    database_url: str, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail(stall(), origin="cdn", skip=2, times=1)
    async with beside(database_url, tmp_path, jobs=1) as silent:
        begun = await silent.begin(MODEL)
        await until(lambda: hub.log.count(origin="cdn") >= 3)
        (row,) = await fetch(database_url, "SELECT claimed_by, claim_expires_at FROM mirrors")
        assert row["claim_expires_at"] > time.time()
        async with beside(database_url, tmp_path, "b", jobs=1) as other:
            assert (await other.http.get(f"/mirror/{begun['id']}?wait=0.05")).json()["status"] == "SYNCING"
            assert (await fetch(database_url, "SELECT claimed_by FROM mirrors"))[0]["claimed_by"] == row["claimed_by"]
            # As if the first worker's machine had stood still for longer than its claim.
            await fetch(database_url, "UPDATE mirrors SET claim_expires_at = 1")
            done = await other.ended(begun["id"])
            assert done["status"] == "READY"
            assert await other.tree(done["sources"][0]["manifest"]) == await silent.tree(done["sources"][0]["manifest"])
        rows = await fetch(database_url, "SELECT bytes_transferred, bytes_reused FROM mirror_sources")
        hub.release_stalled()
    assert await fetch(database_url, "SELECT bytes_transferred, bytes_reused FROM mirror_sources") == rows
    assert worker.CLAIM_SECONDS > 2 * worker.RENEW_SECONDS


async def test_nothing_is_published_or_restored_between_a_collection_s_look_and_its_commit(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beside(database_url, tmp_path, jobs=1, tombstone_seconds=0) as mirror:
        await mirror.ready(MODEL)
        drop = collection.drop
        seen: list[str] = []
        requests: list[asyncio.Task[Json]] = []

        async def drop_slowly(*given: Any, **named: Any) -> bool:
            found = await drop(*given, **named)
            if not requests:
                requests.append(asyncio.create_task(mirror.ready(MODEL)))
                await somebody_waits(database_url, requests[0])
                seen.append("went on" if requests[0].done() else "waits")
            return found

        monkeypatch.setattr(collection, "drop", drop_slowly)
        evicted = await mirror.evict(all=True)
        assert (evicted["status"], seen) == ("DONE", ["waits"])
        document = await requests[0]
        await mirror.tree(document["sources"][0]["manifest"])


@pytest.mark.promise("collection")
@pytest.mark.parametrize(("look", "status"), [
    pytest.param(1, "REFUSED", id="as it plans"),
    pytest.param(2, "DONE", id="as it carries out its plan"),  # then B waits, and publishes it again
])  # fmt: skip
async def test_an_eviction_never_robs_a_mirror_that_publishes_after_its_look_at_who_is_at_work(
    database_url: str, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tally: Tally, look: int, status: str
) -> None:
    """A looks: nobody is at work. B publishes its first source, and is at its second. A gives up what B has published."""
    hub.repo("org/other").commit({"other.bin": LARGE})
    hub.fail(stall(), "other.bin", times=None)
    other = source("hf://org/other", "/other")
    async with beside(database_url, tmp_path, tombstone_seconds=0) as mirror, asyncio.timeout(LONGEST_SECONDS):
        manifest = await mirror.manifest(MODEL)
        running_with = mirrors.running_with
        requests: list[asyncio.Task[Json]] = []
        looks = itertools.count(1)

        async def look_slowly(*given: Any) -> dict[str, list[str]]:
            found = await running_with(*given)
            if next(looks) != look:
                return found
            requests.append(asyncio.create_task(mirror.begin(MODEL, other)))
            await somebody_waits(database_url, requests[0])
            while requests[0].done() and not await fetch(database_url, PUBLISHED_AT_WORK):
                if await fetch(database_url, "SELECT 1 FROM pg_locks WHERE NOT granted"):
                    break
            return found

        monkeypatch.setattr(mirrors, "running_with", look_slowly)
        evicted = await mirror.evict(manifest=manifest, tier="mirror")
        begun = await requests[0]
        hub.release_stalled()
        document = await mirror.ended(begun["id"])
        readable = {item["manifest"] for item in (await mirror.get("/manifests"))["items"]}
        promised = {part["manifest"] for part in document["sources"]}
        tally.add(scenarios=1, faults=1, lost=len(promised - readable) + (document["grant"] is None))
        assert (evicted["status"], document["status"]) == (status, "READY")
        for one in promised:
            await mirror.tree(one)


async def test_agents_that_report_at_the_same_moment_all_become_members(pg_mirror: MirrorUnderTest) -> None:
    agents = [FakeAgent(pg_mirror, f"n{node}") for node in range(8)]
    replies = await asyncio.gather(*(agent.beat() for agent in agents * 2))
    last = await agents[0].beat()
    assert (len(last["members"]), last["epoch"]) == (8, max(reply["epoch"] for reply in replies))
    eviction = await pg_mirror.ask("evictions", all=True, tier="node")
    evicted = {"items": [{"tier": "node", "manifest": f"b3:{'0' * 64}", "bytes": 1}]}
    report = {"id": eviction["id"], "evict": evicted}
    await asyncio.gather(*(agent.beat(reports=[report]) for agent in agents))
    done = await pg_mirror.get(f"/evictions/{eviction['id']}")
    assert (done["status"], len(done["items"]), done["unreachable"]) == ("DONE", 8, [])


async def test_a_heartbeat_and_a_command_at_one_replica_are_seen_at_the_other(
    pg_mirror: MirrorUnderTest, database_url: str, tmp_path: Path
) -> None:
    async with beside(database_url, tmp_path, "b", work=False) as other:
        await FakeAgent(pg_mirror, "n1").beat()
        # The load balancer sends the agent to one and to the other.
        for here, there in ((pg_mirror, other), (other, pg_mirror)):
            agent, before = FakeAgent(here, "n1"), await _last_heartbeat(there)
            waiting = asyncio.create_task(agent.beat(wait_seconds=30))
            while await _last_heartbeat(there) == before:  # noqa: ASYNC110 - a row of another process
                await asyncio.sleep(0.05)
            eviction = await there.ask("evictions", all=True, tier="node")
            reply = await asyncio.wait_for(waiting, LONGEST_SECONDS)
            assert [command["id"] for command in reply["pending"]] == [eviction["id"]]
            await agent.carry_out(reply)


async def test_a_command_that_was_answered_at_one_replica_is_not_given_again_by_the_other(
    pg_mirror: MirrorUnderTest, database_url: str, tmp_path: Path
) -> None:
    async with beside(database_url, tmp_path, "b", work=False) as other:
        agents = [FakeAgent(pg_mirror, "n1"), FakeAgent(other, "n2")]
        for agent in agents:
            await agent.beat()
        await other.ask("evictions", all=True, tier="node")
        first, _ = [await agent.beat(wait_seconds=30) for agent in agents]  # both have looked at what is open
        await agents[0].carry_out(first)
        assert (await FakeAgent(other, "n1").beat())["pending"] == []


async def _last_heartbeat(mirror: MirrorUnderTest) -> str:
    return str((await mirror.get("/agents"))["items"][0]["last_heartbeat"])
