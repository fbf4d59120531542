"""Plans, waiting, events, canceling and paging: what callers see of mirrors over time."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.net.api_server import bind_tcp, serving
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import rate_limited, stall
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
    await until(lambda: len(mirror.chunks()) >= chunks + 1 and hub.log.count(origin="cdn") == 4)
    return begun


def written(mirror: MirrorUnderTest) -> Json:
    """What the database holds, but for what the mirror notes by itself now and then."""
    return {name: rows for name, rows in mirror.rows().items() if name not in ("scrubs", "collections")}


@pytest.mark.parametrize("held", ["nothing", "a part", "everything", "half a file"])
async def test_a_plan_writes_nothing_and_its_numbers_are_what_the_real_run_then_does(
    mirror: MirrorUnderTest, hub: Hub, model: None, held: str
) -> None:
    hub.repo("org/other").commit({"a.bin": LARGE, "b.bin": LARGE})
    wanted = [MODEL, source("hf://org/other", "/o"), source("hf://org/other", "/p", allow_patterns=["a.*", "z"])]
    if held == "half a file":
        await mirror.http.post(f"/mirror/{(await half_copied(mirror, hub))['id']}/cancel")
        hub.release_stalled()
        await until(lambda: not any(row[7] for row in mirror.rows("mirrors")["mirrors"]))
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


async def test_waiting_ends_with_the_mirror_or_in_time(mirror: MirrorUnderTest, hub: Hub, model: None) -> None:
    begun = await half_copied(mirror, hub)
    answer = await mirror.http.get(f"/mirror/{begun['id']}", params={"wait": 0.01})
    assert answer.json()["status"] == "SYNCING"
    hub.release_stalled()
    document = (await mirror.http.get(f"/mirror/{begun['id']}", params={"wait": 60})).json()
    assert document["status"] == "READY"
    assert document["bytes_per_second"] > 0
    assert document["eta_seconds"] is None
    assert (await mirror.http.get(f"/mirror/{begun['id']}", params={"wait": 61})).status_code == 422


async def test_a_running_mirror_tells_how_far_it_is(mirror: MirrorUnderTest, hub: Hub, model: None) -> None:
    begun = await half_copied(mirror, hub)
    seen: Json = {}
    while not seen.get("bytes_transferred"):
        seen = (await mirror.http.get(f"/mirror/{begun['id']}", params={"wait": 0.6})).json()
    assert seen["bytes_total"] == LARGE.size + 2
    assert 0 < seen["bytes_transferred"] < seen["bytes_total"]
    assert seen["eta_seconds"] > 0
    hub.release_stalled()
    assert (await mirror.ended(begun["id"]))["bytes_transferred"] == LARGE.size + 2


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
    canceled = (await mirror.http.post(f"/mirror/{begun['id']}/cancel")).json()
    assert (canceled["status"], canceled["sources"][0]["status"]) == ("CANCELED", "CANCELED")
    hub.release_stalled()
    await until(lambda: not any(row[7] for row in mirror.rows("mirrors")["mirrors"]))  # its worker has let go
    again = (await mirror.http.post(f"/mirror/{begun['id']}/cancel")).json()
    assert again["completed_at"] == canceled["completed_at"]
    assert again["status"] == "CANCELED"
    assert again["grant"] is None
    assert again["bytes_transferred"] > 0
    stored = len(mirror.rows("copied_chunks")["copied_chunks"])
    hub.log.clear()
    document = await mirror.ready(MODEL)
    assert hub.log.count(origin="cdn") == 4 - stored <= 2
    assert document["bytes_transferred"] + document["bytes_reused"] == LARGE.size + 2
    assert document["bytes_transferred"] == hub.log.bytes_served(origin="cdn")
    assert (await mirror.tree(document["sources"][0]["manifest"]))["sub/model.safetensors"] == LARGE.read(0, LARGE.size)


async def test_a_mirror_that_waits_for_a_rate_limit_can_be_canceled_at_once(
    upstreams: None, hub: Hub, model: None, tmp_path: Path
) -> None:
    waiting: list[float] = []

    async def pause_for_ever(seconds: float) -> None:
        waiting.append(seconds)
        await until(lambda: False)

    hub.fail(rate_limited(200), origin="cdn", times=None)
    async with mirror_under_test(tmp_path, pause=pause_for_ever) as mirror:
        begun = await mirror.begin(MODEL)
        await until(lambda: waiting)
        assert (await mirror.http.post(f"/mirror/{begun['id']}/cancel")).json()["status"] == "CANCELED"
        await until(lambda: not any(row[7] for row in mirror.rows("mirrors")["mirrors"]))


async def test_a_terminal_state_stays(mirror: MirrorUnderTest, hub: Hub, model: None) -> None:
    for document in (await mirror.ready(MODEL), await mirror.mirror(source("hf://org/none"))):
        after = (await mirror.http.post(f"/mirror/{document['id']}/cancel")).json()
        assert (after["status"], after["completed_at"]) == (document["status"], document["completed_at"])
        assert after["error"] == document["error"]


async def test_a_mirror_that_nobody_works_on_yet_can_be_canceled(idle: MirrorUnderTest) -> None:
    begun = await idle.begin(MODEL)
    assert begun["status"] == "PENDING"
    assert (await idle.http.post(f"/mirror/{begun['id']}/cancel")).json()["status"] == "CANCELED"
    assert (await idle.begin(MODEL))["id"] != begun["id"]


async def test_pages_are_newest_first_and_meet_without_gap_or_overlap(idle: MirrorUnderTest) -> None:
    begun = [(await idle.begin(source(f"hf://org/m{number}")))["id"] for number in range(7)]
    seen: list[str] = []
    params: dict[str, str] = {"limit": "3"}
    sizes = []
    while True:
        page = (await idle.http.get("/mirror", params=params)).json()
        sizes.append(len(page["items"]))
        seen += [item["id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
        if len(sizes) == 1:  # what comes meanwhile is newer, and on no later page
            await idle.begin(source("hf://org/late"))
    assert seen == begun[::-1]
    assert sizes == [3, 3, 1]


async def test_mirrors_made_at_the_same_moment_are_paged_too(
    idle: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.ingest.requests.time.time", lambda: 1_800_000_000.123456)
    begun = {(await idle.begin(source(f"hf://org/m{number}")))["id"] for number in range(4)}
    first = (await idle.http.get("/mirror", params={"limit": 2})).json()
    rest = (await idle.http.get("/mirror", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert {item["id"] for page in (first, rest) for item in page["items"]} == begun
    assert rest["next_cursor"] is None


async def test_pages_can_be_narrowed_to_a_status_and_a_source(idle: MirrorUnderTest) -> None:
    one, two = (
        await idle.begin(source("hf://org/one")),
        await idle.begin(source("hf://org/two@v1"), source("s3://bucket/x", "/x")),
    )
    await idle.http.post(f"/mirror/{one['id']}/cancel")

    async def found(**params: str) -> list[str]:
        return [item["id"] for item in (await idle.http.get("/mirror", params=params)).json()["items"]]

    assert await found(status="CANCELED") == [one["id"]]
    assert await found(status="PENDING") == [two["id"]]
    assert await found(source="s3://bucket/x") == [two["id"]]
    assert await found(source="hf://org/one", status="PENDING") == []
    assert (await idle.http.get("/mirror", params={"status": "DONE"})).status_code == 422
