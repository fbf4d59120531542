"""Plans, waiting, events, canceling and paging: what callers see of mirrors over time."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.mirror.db.identities import RAW
from bdn.net.api_server import bind_tcp, serving
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, until

pytest_plugins = ("tests.support.mirror.fixtures",)

MODEL = source("hf://org/model")
LARGE = GeneratedContent(3 * CHUNK_SIZE + 5)


@pytest.fixture
def model(hub: Hub) -> None:
    hub.repo("org/model").commit({"config.json": b"{}", "sub/model.safetensors": LARGE})


async def half_copied(mirror: MirrorUnderTest, hub: Hub, *, chunks: int = 2) -> Json:
    """A mirror that has stored so many chunks of its large file, and waits for the upstream with the others."""
    hub.fail(stall(), origin="cdn", skip=chunks, times=None)
    begun = await mirror.begin(MODEL)
    await until(lambda: copied(mirror) >= chunks and hub.log.count(origin="cdn") == 4)
    return begun


def copied(mirror: MirrorUnderTest) -> int:
    """How many chunks of the large file the next mirror finds."""
    stored = {bytes(raw) for (raw,) in mirror.behind.query("SELECT digest FROM chunks WHERE state = 'stored'")}
    found = [raw for _, size, _, raw, _ in mirror.rows("identities")["identities"] if size == LARGE.size]
    return sum(raw[at : at + RAW] in stored for raw in found for at in range(0, len(raw), RAW))


def written(mirror: MirrorUnderTest) -> Json:
    """What the database holds, but for what the mirror notes by itself now and then."""
    return {name: rows for name, rows in mirror.rows().items() if name not in ("facts", "collections")}


@pytest.mark.parametrize("held", ["nothing", "a part", "everything", "half a file"])
async def test_a_plan_is_what_the_real_run_does(mirror: MirrorUnderTest, hub: Hub, model: None, held: str) -> None:
    hub.repo("org/other").commit({"a.bin": LARGE, "b.bin": LARGE})
    wanted = [MODEL, source("hf://org/other", "/o"), source("hf://org/other", "/p", allow_patterns=["a.*", "z"])]
    if held == "half a file":
        await mirror.canceled((await half_copied(mirror, hub))["id"])
        hub.release_stalled()
        await mirror.released()
    elif held != "nothing":
        await mirror.ready({**MODEL, "allow_patterns": ["*.json"] if held == "a part" else None})
    before = written(mirror), mirror.chunks()
    plan = await mirror.plan(*wanted)
    assert (written(mirror), mirror.chunks()) == before
    document = await mirror.ready(*wanted)
    assert plan["bytes_to_transfer"] == document["bytes_transferred"]
    assert plan["bytes_reused"] == document["bytes_reused"]
    assert (plan["files"], plan["bytes"]) == (document["files_total"], document["bytes_total"])
    for planned, done in zip(plan["sources"], document["sources"], strict=True):
        assert (planned["files"], planned["bytes"]) == (done["files_total"], done["bytes_total"])
        for same in ("source", "mount_location", "resolved_revision", "warnings"):
            assert planned[same] == done[same]


async def test_who_waits_is_told_how_far_it_is_and_when_it_ends(mirror: MirrorUnderTest, hub: Hub, model: None) -> None:
    place = f"/mirror/{(await half_copied(mirror, hub))['id']}"
    assert (await mirror.get(place, wait=0.01))["status"] == "SYNCING"
    seen: Json = {}
    while not seen.get("bytes_transferred"):
        seen = await mirror.get(place, wait=0.6)
    assert seen["bytes_total"] == LARGE.size + 2
    assert 0 < seen["bytes_transferred"] < seen["bytes_total"]
    assert seen["eta_seconds"] > 0
    hub.release_stalled()
    document = await mirror.get(place, wait=60)
    assert (document["status"], document["bytes_transferred"]) == ("READY", LARGE.size + 2)
    assert document["bytes_per_second"] > 0
    assert document["eta_seconds"] is None
    assert (await mirror.http.get(place, params={"wait": 61})).status_code == 422


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, Json]]:
    event = ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, json.loads(value)


async def test_events_are_progress_until_done(mirror: MirrorUnderTest, hub: Hub, model: None) -> None:
    begun = await half_copied(mirror, hub)
    listener = bind_tcp("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    seen: list[tuple[str, Json]] = []
    async with serving(mirror.service.api, listener), httpx2.AsyncClient(base_url=url, trust_env=False) as http:
        async with http.stream("GET", f"/mirror/{begun['id']}/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for event, document in events_of(answer.aiter_lines()):
                seen.append((event, document))
                if len(seen) == 2:
                    hub.release_stalled()
        async with http.stream("GET", f"/mirror/{begun['id']}/events") as answer:
            again = [event async for event in events_of(answer.aiter_lines())]
    assert [event for event, _ in seen] == ["progress"] * (len(seen) - 1) + ["done"]
    assert len(seen) >= 3
    assert seen[0][1]["status"] == "SYNCING"
    assert seen[-1][1]["status"] == "READY"
    assert [event for event, _ in again] == ["done"]


async def test_canceling_keeps_what_was_stored(mirror: MirrorUnderTest, hub: Hub, model: None) -> None:
    begun = await half_copied(mirror, hub)
    canceled = await mirror.canceled(begun["id"])
    assert (canceled["status"], canceled["sources"][0]["status"]) == ("CANCELED", "CANCELED")
    hub.release_stalled()
    await mirror.released()
    again = await mirror.canceled(begun["id"])
    assert again["completed_at"] == canceled["completed_at"]
    assert again["status"] == "CANCELED"
    assert again["grant"] is None
    assert again["bytes_transferred"] > 0
    stored = copied(mirror)
    hub.log.clear()
    document = await mirror.ready(MODEL)
    asked = hub.log.count(origin="cdn")
    assert asked <= 2
    assert asked in (0, 4 - stored)  # none, if the threads that were released brought all that lacked
    assert document["bytes_transferred"] + document["bytes_reused"] == LARGE.size + 2
    assert document["bytes_transferred"] == hub.log.bytes_served(origin="cdn")
    assert (await mirror.tree(document["sources"][0]["manifest"]))["sub/model.safetensors"] == LARGE.read(0, LARGE.size)


async def test_a_terminal_state_stays(mirror: MirrorUnderTest, hub: Hub, model: None) -> None:
    for document in (await mirror.ready(MODEL), await mirror.mirror(source("hf://org/none"))):
        after = await mirror.canceled(document["id"])
        for same in ("status", "completed_at", "error"):
            assert after[same] == document[same]


async def test_a_mirror_that_nobody_works_on_yet_can_be_canceled(idle: MirrorUnderTest) -> None:
    begun = await idle.begin(MODEL)
    assert begun["status"] == "PENDING"
    assert (await idle.canceled(begun["id"]))["status"] == "CANCELED"
    assert (await idle.begin(MODEL))["id"] != begun["id"]


async def test_pages_are_newest_first_and_meet_without_gap_or_overlap(idle: MirrorUnderTest) -> None:
    begun = [(await idle.begin(source(f"hf://org/m{number}")))["id"] for number in range(7)]
    pages = [await idle.get("/mirror", limit=3)]
    await idle.begin(source("hf://org/late"))  # what comes meanwhile is newer, and on no later page
    while cursor := pages[-1]["next_cursor"]:
        pages.append(await idle.get("/mirror", limit=3, cursor=cursor))
    assert [item["id"] for page in pages for item in page["items"]] == begun[::-1]
    assert [len(page["items"]) for page in pages] == [3, 3, 1]


async def test_mirrors_made_at_the_same_moment_are_paged_too(upstreams: None, tmp_path: Path) -> None:
    async with mirror_under_test(tmp_path, work=False, clock=lambda: 1_800_000_000.123456) as idle:
        begun = {(await idle.begin(source(f"hf://org/m{number}")))["id"] for number in range(4)}
        first = await idle.get("/mirror", limit=2)
        rest = await idle.get("/mirror", limit=2, cursor=first["next_cursor"])
    assert {item["id"] for page in (first, rest) for item in page["items"]} == begun
    assert rest["next_cursor"] is None


async def test_pages_can_be_narrowed_to_a_status_and_a_source(idle: MirrorUnderTest) -> None:
    one = await idle.begin(source("hf://org/one"))
    two = await idle.begin(source("hf://org/two@v1"), source("s3://bucket/x", "/x"))
    await idle.canceled(one["id"])

    async def found(**params: str) -> list[str]:
        return [item["id"] for item in (await idle.get("/mirror", **params))["items"]]

    assert await found(status="CANCELED") == [one["id"]]
    assert await found(status="PENDING") == [two["id"]]
    assert await found(source="s3://bucket/x") == [two["id"]]
    assert await found(source="hf://org/one", status="PENDING") == []
    assert (await idle.http.get("/mirror", params={"status": "DONE"})).status_code == 422
