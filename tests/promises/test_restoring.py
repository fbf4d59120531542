"""What was evicted from the mirror can be had back for seven days; one organisation's eviction takes nothing from another."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.core.chunk import Digest
from bdn.mirror.access import access
from bdn.mirror.upkeep.collection import Collector
from tests.doubles.hub import Hub
from tests.support.content.calendar import DAY, Calendar
from tests.support.mirror.service import LONGEST_SECONDS, MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [pytest.mark.promise("collection"), pytest.mark.usefixtures("backend")]

TOKEN = "operator-token"
ONE, TWO = source("hf://org/one", "/one"), source("hf://org/two", "/two")
RIVAL = {"BDN-Organisation": "rival"}


@pytest.fixture
async def mirror(upstreams: None, hub: Hub, tmp_path: Path, calendar: Calendar) -> AsyncIterator[MirrorUnderTest]:
    hub.repo("org/one").commit({"shared.bin": b"in both" * 200_000, "one.txt": b"1"})
    hub.repo("org/two").commit({"shared.bin": b"in both" * 200_000, "two.txt": b"2"})
    async with mirror_under_test(
        tmp_path, bearer=TOKEN, auth="token", token=TOKEN, clock=calendar, collect_seconds=0
    ) as service:
        yield service


async def restored(mirror: MirrorUnderTest, **request: Any) -> list[str]:
    answer = await mirror.http.post("/restorations", json=request)
    if answer.status_code == 404:
        assert answer.json()["error"]["code"] == "NOT_FOUND"
        return []
    assert answer.status_code == 200, answer.text
    return [item["manifest"] for item in answer.json()["items"]]


async def ended(mirror: MirrorUnderTest, collection: str) -> None:
    document = await mirror.get(f"/collections/{collection}", wait=LONGEST_SECONDS)
    assert document["status"] == "DONE", document


async def listed(mirror: MirrorUnderTest) -> set[str]:
    return {item["manifest"] for item in (await mirror.http.get("/manifests")).json()["items"] if item["mirror"]}


@pytest.mark.production
async def test_what_was_evicted_is_not_there_until_it_is_restored(
    mirror: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_STANDING_SECONDS", 0.0)
    document = await mirror.ready(ONE)
    manifest, grant = document["sources"][0]["manifest"], {"Authorization": f"Bearer {document['grant']}"}
    (page,) = await mirror.pages(manifest)
    chunk = (await mirror.files(manifest))["shared.bin"].layout.chunks[0]
    paths = [f"/manifests/{manifest}", f"/chunks/{page.digest}", f"/chunks/{chunk}"]
    assert [(await mirror.http.get(path, headers=grant)).status_code for path in paths] == [200] * 3

    before = time.time()
    evicted = await mirror.evict(source="hf://org/one", tier="mirror")
    after = time.time()

    assert [(await mirror.http.get(path, headers=grant)).status_code for path in paths] == [404] * 3
    async with asyncio.timeout(LONGEST_SECONDS):  # what is shown of a mirror that has ended may be half a second old
        while (await mirror.http.get(f"/mirror/{document['id']}")).json()["grant"] is not None:  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.05)
    assert await listed(mirror) == set()
    answer = await mirror.http.post("/prefetches", json={"manifest": manifest, "nodes": ["n"]})
    assert answer.status_code == 404
    (item,) = evicted["items"]
    assert item["bytes"] == evicted["bytes_freed"] == sum(mirror.chunks().values())
    assert before <= datetime.fromisoformat(item["restorable_until"]).timestamp() - 7 * DAY <= after
    assert str(chunk.fanout) in "".join(mirror.chunks())  # nothing has gone yet

    assert await restored(mirror, manifest=manifest) == [manifest]
    assert [(await mirror.http.get(path, headers=grant)).status_code for path in paths] == [200] * 3
    assert await restored(mirror, manifest=manifest) == []  # once


@pytest.mark.production
async def test_it_can_be_restored_for_seven_days(mirror: MirrorUnderTest, calendar: Calendar) -> None:
    manifest = await mirror.manifest(ONE)
    calendar.days = 30  # how long it was there does not matter
    await mirror.evict(source="hf://org/one", tier="mirror")
    for calendar.days in (30, 31, 36.99):
        assert (await mirror.collect(grace_seconds=0))["bytes_freed"] == 0
    assert await restored(mirror, source="hf://org/one") == [manifest]
    await mirror.evict(source="hf://org/one", tier="mirror")
    calendar.days += 7.01
    stored = sum(mirror.chunks().values())
    planned = await mirror.collect(dry_run=True)
    assert sum(mirror.chunks().values()) == stored
    collection = await mirror.collect()
    assert collection["kinds"] == planned["kinds"]
    assert collection["bytes_freed"] == planned["bytes_freed"] == stored
    assert mirror.chunks() == {}
    assert await restored(mirror, manifest=manifest) == []


@pytest.mark.production
async def test_an_eviction_takes_nothing_from_others(mirror: MirrorUnderTest, calendar: Calendar) -> None:
    manifest = await mirror.manifest(ONE)
    assert (await mirror.ready_for("rival", ONE)).sources[0].manifest == manifest
    two = await mirror.manifest(TWO)
    evicted = await mirror.evict(all=True, tier="mirror")
    freed = {item["manifest"]: item["bytes"] for item in evicted["items"]}
    stored = sum(mirror.chunks().values())
    calendar.days = 8
    await mirror.collect(grace_seconds=0)
    # What they share stays with the rival.
    assert freed == {manifest: 0, two: stored - sum(mirror.chunks().values())}
    assert 0 < freed[two] < 200_000
    assert (await mirror.http.get(f"/manifests/{manifest}", headers=RIVAL)).status_code == 200
    assert (await mirror.http.get(f"/manifests/{manifest}")).status_code == 404
    assert await mirror.tree(manifest, (await mirror.ready_for("rival", ONE)).grant)
    assert await restored(mirror, manifest=two) == []
    assert await restored(mirror, manifest=manifest) == [manifest]  # which is not collected


async def test_what_somebody_else_mirrors_after_it_was_collected_is_still_given_up(
    mirror: MirrorUnderTest, calendar: Calendar
) -> None:
    manifest = await mirror.manifest(ONE)
    await mirror.evict(all=True, tier="mirror")
    calendar.days = 8
    await mirror.collect(grace_seconds=0)
    await mirror.ready_for("rival", ONE)
    assert (await mirror.http.get(f"/manifests/{manifest}")).status_code == 404
    assert await restored(mirror, manifest=manifest) == []
    await mirror.ready(ONE)
    assert (await mirror.http.get(f"/manifests/{manifest}")).status_code == 200


async def test_what_was_never_mirrored_is_not_found(mirror: MirrorUnderTest) -> None:
    await mirror.ready_for("rival", TWO)
    (theirs,) = [f"b3:{row[0]}" for row in mirror.rows("manifests")["manifests"]]
    for manifest in (str(Digest("0" * 64)), theirs):
        for path in ("/evictions", "/restorations"):
            answer = await mirror.http.post(path, json={"manifest": manifest})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND")
    for request in ({}, {"manifest": theirs, "source": "hf://org/two"}, {"manifest": "latest"}):
        answer = await mirror.http.post("/restorations", json=request)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "INVALID_REQUEST")
    assert (await mirror.http.get(f"/collections/col_{'0' * 24}")).status_code == 404


@pytest.mark.production
async def test_a_collection_comes_round_by_itself_and_what_a_killed_worker_had_begun_is_carried_out(
    upstreams: None, hub: Hub, tmp_path: Path, calendar: Calendar
) -> None:
    hub.repo("org/one").commit({"one.txt": b"1"})
    async with mirror_under_test(tmp_path, clock=calendar) as mirror:
        await mirror.ready(ONE)
        await mirror.evict(all=True, tier="mirror")
        assert mirror.operations("collection") == []
        stored = sum(mirror.chunks().values())
    async with mirror_under_test(tmp_path, clock=calendar, work=False) as mirror:
        asked = (await mirror.http.post("/collections", json={})).json()
        assert (asked["status"], asked["kinds"]) == ("RUNNING", [])
    calendar.days = 8
    async with mirror_under_test(tmp_path, clock=calendar) as mirror:
        await ended(mirror, asked["id"])  # before it carries out a request, the worker begins what is due
        for collection in mirror.operations("collection"):
            await ended(mirror, collection)
        assert (len(mirror.operations("collection")), mirror.chunks()) == (2, {})
        assert await mirror.metric("bdn_mirror_collected_bytes_total") == stored


_DAYS: Final = (  # the day, what is requested on it, and how many collections were due so far
    (1, "dry_run", 1),
    (-30, "dry_run", 2),
    (-31, "dry_run", 3),
    (-31, "dry_run", 3),
    (-30.8, "orphans", 3),
    (-30.7, "dry_run", 4),
)


async def test_neither_asking_what_would_go_nor_a_clock_that_was_set_back_puts_off_a_collection(
    upstreams: None, hub: Hub, tmp_path: Path, calendar: Calendar
) -> None:
    hub.repo("org/one").commit({"one.txt": b"1"})
    async with mirror_under_test(tmp_path, clock=calendar) as mirror:
        await mirror.ready(ONE)
        for step, (day, requested, were_due) in enumerate(_DAYS, 1):
            calendar.days = day
            # The worker begins what is due, then reads requests. The first request may arrive between the two, and is
            # then carried out although the worker last read the clock on the day before. It reads the clock again
            # before it reads the second request.
            for _ in range(2):
                await mirror.collect(**{requested: True})
            assert len(mirror.operations("collection")) - 2 * step == were_due, (day, requested)


async def test_a_collection_with_a_bug_has_failed(mirror: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ValueError("scripted")

    monkeypatch.setattr(Collector, "collect", fail)
    answer = await mirror.ask("collections", LONGEST_SECONDS)
    assert (answer["status"], answer["error"]["code"]) == ("FAILED", "INTERNAL")
    await mirror.ready(ONE)
