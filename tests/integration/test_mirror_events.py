"""What was decided, as the mirror keeps and shows it: once, to whom it concerns, and for as long as it is kept."""

import re
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from bdn.core.chunk import digest_of
from bdn.core.errors import Fact
from bdn.core.events import Event
from bdn.core.manifest import PageEntry, read_page
from bdn.wire.event_schema import NodeEvent
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket
from tests.fakes.clock import Clock
from tests.support.content.noise import MIB, noise
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import (
    Json,
    MirrorUnderTest,
    mirror_under_test,
    source,
    with_secret,
)

pytest_plugins = ("tests.support.mirror.fixtures",)

FILES = {"a.txt": b"12345", "b.txt": b"67890", "weights": noise(9 * MIB + 1, 2)}


def told(*events: Event, run: str = "run") -> list[Json]:
    dated = (replace(one, id=f"{run}/{n:012}", at=1_800_000_000.0 + n) for n, one in enumerate(events))
    return [NodeEvent.of(one).model_dump() for one in dated]


def made_room(manifest: str, organisation: str = "default") -> Event:
    facts: dict[str, Fact] = {"tier": "node", "bytes": 5, "stage": "stg_1", "job": "secret-job", "newcomer": "new"}
    return Event.of("made_room", facts, manifest=manifest, organisation=organisation)


async def shown(mirror: MirrorUnderTest, **params: Any) -> list[Json]:
    return list((await mirror.get("/events", **params))["items"])


@pytest.fixture
async def manifest(mirror: MirrorUnderTest, hub: Hub) -> str:
    hub.repo("org/model").commit(FILES)
    return await mirror.manifest(source("hf://org/model"))


async def test_what_an_agent_repeats_is_kept_once(mirror: MirrorUnderTest, manifest: str) -> None:
    agent = FakeAgent(mirror, "n1")
    events = told(made_room(manifest))
    for _ in range(3):
        await agent.beat(events=events)
    await agent.beat(events=events + told(made_room(manifest), run="next"))

    found = [one for one in await shown(mirror, manifest=manifest) if one["node"]]
    assert [(one["cluster"], one["node"], one["kind"]) for one in found] == [("c", "n1", "made_room")] * 2
    assert "to make room for job secret-job (stage stg_1), which brought new" in found[0]["sentence"]


async def test_a_mirror_tells_what_it_brought_and_what_it_had(mirror: MirrorUnderTest, hub: Hub, manifest: str) -> None:
    again = await mirror.ready(source("hf://org/model"))

    reused, mirrored = await shown(mirror, manifest=manifest)
    assert (reused["kind"], reused["facts"]["mirror"]) == ("reused", again["id"])
    assert (mirrored["kind"], mirrored["node"]) == ("mirrored", None)
    facts, size = mirrored["facts"], sum(map(len, FILES.values()))
    assert (facts["source"], facts["transferred"], facts["reused"]) == ("hf://org/model", size, 0)
    assert facts["revision"] == again["sources"][0]["resolved_revision"]


async def test_an_organisation_sees_its_events_without_others_names(mirror: MirrorUnderTest, manifest: str) -> None:
    strange = f"b3:{'7' * 64}"
    request: dict[str, Fact] = {"eviction": "evi_1", "asked_by": "an operator of theirs", "holders": ["job secret-job"]}
    forced = Event.of(
        "evicted", {"tier": "node", "bytes": 5, "forced": True, **request}, manifest=manifest, organisation="theirs"
    )
    came: dict[str, Fact] = {"stage": "s", "job": "secret-job", "node": 0, "cluster": 0, "mirror": 5}
    arrived = Event.of("arrived", came, manifest=manifest, organisation="theirs")
    await FakeAgent(mirror, "n1").beat(
        events=told(made_room(strange, "theirs"), made_room(manifest, "theirs"), forced, arrived)
    )

    answer = await mirror.http.get("/events", params={"node": "n1"})
    assert [one["kind"] for one in answer.json()["items"]] == ["evicted", "made_room"]
    assert "secret" not in answer.text
    assert "theirs" not in answer.text
    assert await shown(mirror, manifest=strange) == []


async def test_events_come_in_pages_newest_first(mirror: MirrorUnderTest, manifest: str) -> None:
    await FakeAgent(mirror, "n1").beat(events=told(*[made_room(manifest)] * 25))
    pages = [await mirror.get("/events", node="n1", limit=10)]
    while cursor := pages[-1]["next_cursor"]:
        pages.append(await mirror.get("/events", node="n1", limit=10, cursor=cursor))

    ids = [one["id"] for page in pages for one in page["items"]]
    assert ids == [f"run/{number:012}" for number in reversed(range(25))]
    for bad in ({"cursor": "x"}, {"manifest": "b3:1"}, {"node": "\0"}, {"limit": "0"}):
        assert (await mirror.http.get("/events", params=bad)).status_code == 422


async def test_what_is_too_old_goes(tmp_path: Path, upstreams: None) -> None:
    clock, ours = Clock(1_800_000_000.0), f"b3:{'1' * 64}"
    async with mirror_under_test(tmp_path / "m", clock=clock, work=False) as idle:
        await FakeAgent(idle, "n1").beat(events=told(*[made_room(ours)] * 3))
        assert len(await shown(idle)) == 3
    clock.now += 30 * 86400 + 1.5  # two of them are older than that
    async with mirror_under_test(tmp_path / "m", clock=clock) as worker:
        while len(await shown(worker)) != 1:
            pass
    async with mirror_under_test(tmp_path / "m", clock=clock, work=False, events_seconds=1e9) as idle:
        assert [one["id"] for one in await shown(idle)] == ["run/000000000002"]


async def test_a_digest_is_named_by_what_it_is_part_of(mirror: MirrorUnderTest, manifest: str) -> None:
    (page,) = await mirror.pages(manifest)
    files = await mirror.files(manifest)
    weights, packed = files["weights"].layout, files["a.txt"].layout
    assert packed.slice is not None

    async def named(of: str) -> Json:
        document = await mirror.get("/names", of=of)
        assert document["manifests"] == {manifest: ["hf://org/model"]}
        return document

    def places(document: Json) -> list[tuple[str, str, int | None]]:
        return [(document["kind"], place["path"], place["chunk_index"]) for place in document["places"]]

    assert (await named("hf://org/model"))["kind"] == "source"
    assert (await named(manifest))["kind"] == "manifest"
    assert places(await named(str(weights.digest))) == [("content", "weights", None)]
    assert places(await named(str(weights.chunks[1]))) == [("chunk", "weights", 1)]
    assert places(await named(str(packed.slice.slab))) == [("slab", "a.txt", None), ("slab", "b.txt", None)]
    assert (await named(str(page.digest)))["kind"] == "page"
    for unknown in (str(digest_of(b"nothing")), str(packed.digest), "hf://org/other"):  # pages alone list a small file
        assert (await mirror.http.get("/names", params={"of": unknown})).status_code == 404
    assert (await mirror.http.get("/names", params={"of": "nonsense"})).status_code == 422


async def test_the_pages_of_a_manifest_are_searched_in_a_thread__up_to_a_bound(
    mirror: MirrorUnderTest, manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, threads = str((await mirror.files(manifest))["weights"].layout.chunks[0]), set[threading.Thread]()

    def watched(content: bytes) -> list[PageEntry]:
        threads.add(threading.current_thread())
        return read_page(content)

    monkeypatch.setattr("bdn.mirror.operations.names.read_page", watched)
    named = await mirror.get("/names", of=chunk)
    assert [place["path"] for place in named["places"]] == ["weights"]
    assert threads
    assert threading.current_thread() not in threads
    monkeypatch.setattr("bdn.mirror.operations.names._PAGES", 0)
    assert await mirror.get("/names", of=chunk) == {**named, "places": []}


async def test_why_looks_events_up_and_reads_no_table_from_end_to_end(mirror: MirrorUnderTest, manifest: str) -> None:
    """The statements as they are sent; a chunk that is named nowhere any more is looked up among the events."""
    asked: list[tuple[str, Any]] = []

    def listen(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if statement.startswith("SELECT") and "FROM events" in statement:
            asked.append((statement, parameters))

    listened = (Engine, "before_cursor_execute", listen)
    event.listen(*listened)
    try:
        for about in ({"manifest": [manifest, f"b3:{'7' * 64}"]}, {"digest": manifest}):
            await shown(mirror, **about, limit=1000)
    finally:
        event.remove(*listened)
    with closing(sqlite3.connect(mirror.data_dir / "mirror.sqlite")) as connection:
        plans = [
            " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))
            for statement, parameters in asked
        ]
    assert [re.findall(r"SEARCH events USING INDEX (\w+)", plan) for plan in plans] == [
        ["ix_events_manifest"],
        ["ix_events_digest"],
    ]
    assert not [plan for plan in plans if "SCAN" in plan]


async def test_what_was_evicted_and_restored_is_on_record(mirror: MirrorUnderTest, manifest: str) -> None:
    evicted = await mirror.evict(manifest=manifest, tier="mirror")
    (gone, *_) = await shown(mirror, manifest=manifest)
    assert (gone["kind"], gone["facts"]["eviction"]) == ("tombstoned", evicted["id"])
    assert "and can be restored until " in gone["sentence"]
    await mirror.http.post("/restorations", json={"manifest": manifest})
    assert [one["kind"] for one in await shown(mirror, manifest=manifest)] == ["restored", "tombstoned", "mirrored"]


async def test_a_source_is_found_by_the_name_under_which_it_was_mirrored_with_its_last_slash(
    mirror: MirrorUnderTest, bucket: S3Bucket
) -> None:
    bucket.put({"prefix/a.txt": b"1"})
    of = f"s3://{bucket.name}/prefix/"
    manifest = await mirror.manifest(source(of, **with_secret("s3-keys")))

    assert (await mirror.get("/names", of=of))["manifests"] == {manifest: [of]}
