"""Liveness, readiness and numbers."""

import re
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

import bdn
from bdn.core.chunk import digest_of
from tests.doubles.hub import Hub
from tests.fakes.clock import Clock
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)


async def refusal(mirror: MirrorUnderTest) -> tuple[int, str, bool]:
    answer = await mirror.http.get("/readyz")
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["retryable"]


async def numbers(mirror: MirrorUnderTest) -> dict[str, float]:
    """Of BDN, without those of its process."""
    answer = await mirror.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name.startswith("bdn_"):
                found[sample.name + "".join(f" {value}" for value in sample.labels.values())] = sample.value
    return found


async def test_a_mirror_with_a_database_and_a_store_is_ready(idle: MirrorUnderTest) -> None:
    assert [(await idle.http.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]


async def test_a_store_that_was_removed_or_cannot_be_read_is_not_ready_but_alive(idle: MirrorUnderTest) -> None:
    chunks = idle.data_dir / "store/chunks"
    kept = chunks.rename(idle.data_dir / "kept")
    assert await refusal(idle) == (503, "STORE_UNAVAILABLE", True)
    chunks.touch()  # something else is in its place
    assert await refusal(idle) == (503, "STORE_UNAVAILABLE", True)
    assert (await idle.http.get("/healthz")).status_code == 200
    chunks.unlink()
    kept.rename(chunks)
    assert (await idle.http.get("/readyz")).status_code == 200
    shutil.rmtree(idle.data_dir / "store")
    assert await refusal(idle) == (503, "STORE_UNAVAILABLE", True)
    answer = await idle.http.get(f"/chunks/b3:{'0' * 64}")
    assert answer.status_code == 503  # not "not found": agents would believe it


async def test_metrics__without_a_usable_database__say_so_and_keep_the_last_figures(idle: MirrorUnderTest) -> None:
    await FakeAgent(idle, "n").beat()
    before = await numbers(idle)
    assert (before["bdn_mirror_database_up"], before["bdn_mirror_agents_alive"]) == (1, 1)
    with closing(sqlite3.connect(idle.data_dir / "mirror.sqlite")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0000'")
    after = await numbers(idle)
    assert (after["bdn_mirror_database_up"], after["bdn_mirror_agents_alive"]) == (0, 1)


async def test_metrics__of_agents__count_one_as_silent_until_it_leaves_in_order(tmp_path: Path) -> None:
    clock = Clock(time.time())
    async with mirror_under_test(tmp_path / "mirror", work=False, clock=clock) as mirror:
        one = FakeAgent(mirror, "n")
        await one.beat()
        assert (await numbers(mirror))["bdn_mirror_agents_silent"] == 0
        clock.advance(61)
        found = await numbers(mirror)
        assert (found["bdn_mirror_agents_silent"], found["bdn_mirror_agents_alive"]) == (1, 0)
        await one.beat(leaving=True)
        assert (await numbers(mirror))["bdn_mirror_agents_silent"] == 0


async def test_metrics__of_collections__have_the_end_of_the_last_full_one(mirror: MirrorUnderTest) -> None:
    assert (await numbers(mirror))["bdn_mirror_collection_timestamp_seconds"] == 0
    for request in ({"dry_run": True}, {"orphans": True}):
        ended = await mirror.http.post("/collections?wait=60", json=request)
        assert ended.json()["status"] == "DONE"
        assert (await numbers(mirror))["bdn_mirror_collection_timestamp_seconds"] == 0
    before = time.time()
    await mirror.http.post("/collections?wait=60", json={})
    assert (await numbers(mirror))["bdn_mirror_collection_timestamp_seconds"] >= before - 1


async def test_a_database_of_another_version_is_not_ready(idle: MirrorUnderTest) -> None:
    with closing(sqlite3.connect(idle.data_dir / "mirror.sqlite")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0000'")
    assert await refusal(idle) == (503, "STORE_UNAVAILABLE", True)


async def test_the_numbers_tell_what_happened(mirror_with_data_plane: MirrorUnderTest, hub: Hub) -> None:
    mirror = mirror_with_data_plane
    before = await numbers(mirror)
    assert before[f"bdn_mirror_build_info {bdn.__version__}"] == 1
    assert before["bdn_mirror_database_up"] == 1
    others = {name: value for name, value in before.items() if not re.search("info|database_up", name)}
    assert set(others.values()) == {0}
    hub.repo("org/model").commit({"a.txt": b"12345", "b.txt": b"12345", "empty.txt": b""})
    document = await mirror.ready(source("hf://org/model"))
    await mirror.mirror(source("hf://org/none"))
    await FakeAgent(mirror, "n").beat()
    manifest = document["sources"][0]["manifest"]
    data_port = (await mirror.http.get(f"/manifests/{manifest}")).headers["bdn-data-port"]
    stored = mirror.chunks()
    slab = digest_of(b"1234512345")
    async with httpx2.AsyncClient(trust_env=False) as plane:
        await plane.get(f"http://127.0.0.1:{data_port}/chunks/{slab}", headers={"Range": "bytes=1-3"})
    served = "bdn_mirror_served_bytes_total"
    found: dict[str, float] = {}
    while not found.get(served):  # counted once it is sent, by a thread of the data plane
        found = await numbers(mirror)
    assert {
        name: value
        for name, value in found.items()
        if value and "info" not in name and not name.partition(" ")[0].endswith("_timestamp_seconds")
    } == {
        "bdn_mirror_mirrors READY": 1,
        "bdn_mirror_mirrors FAILED": 1,
        "bdn_mirror_chunks": 5,  # a slab; pages and roots of manifest and listing
        "bdn_mirror_stored_bytes": sum(stored.values()),
        "bdn_mirror_agents_alive": 1,
        "bdn_mirror_database_up": 1,
        "bdn_mirror_transferred_bytes_total": 10,
        served: 3,
        "bdn_mirror_served_manifests_total": 1,
        "bdn_upstream_requests_total arrived": 4,  # what the commit is, its tree, and the files that have bytes
        "bdn_upstream_requests_total answered": 1,  # there is no such repository
        "bdn_upstream_limit": 4,
    }
    await mirror.evict(all=True, tier="mirror")
    assert (await numbers(mirror))["bdn_mirror_stored_bytes"] == sum(stored.values())  # it can be restored for a while
