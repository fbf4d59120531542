"""A manifest of very many files is published in many short transactions, of which the last one makes it visible, and collected in as many."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

from bdn.core.chunk import Digest
from bdn.mirror.db import contents, removal
from bdn.mirror.db.database import WriteSession
from tests.support.content.calendar import Calendar
from tests.support.mirror.generated import SOURCE, generated
from tests.support.mirror.service import LONGEST_SECONDS, MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)

MANY = 4100
MOST_ROWS = 2500  # that one transaction writes
FILES = 600


@pytest.fixture
async def mirror(upstreams: None, database_options: dict[str, Any], tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    with generated(FILES):
        async with mirror_under_test(tmp_path / "mirror", **database_options) as mirror:
            yield mirror


@contextmanager
def rows_written() -> Iterator[list[dict[str, int]]]:
    """For each transaction of this process, how many rows of each table were written or deleted."""
    found: list[dict[str, int]] = []

    def begun(_: Connection) -> None:
        found.append({})

    def executed(_: Connection, cursor: Any, statement: str, given: Any, ___: Any, many: bool) -> None:
        words = statement.split()
        if words[0] in ("INSERT", "DELETE"):
            rows = len(given) if many else max(1, cursor.rowcount)
            found[-1][words[2]] = found[-1].get(words[2], 0) + rows

    event.listen(Engine, "begin", begun)
    event.listen(Engine, "after_cursor_execute", executed)
    try:
        yield found
    finally:
        event.remove(Engine, "begin", begun)
        event.remove(Engine, "after_cursor_execute", executed)


async def test_no_transaction_writes_more_than_a_batch(mirror: MirrorUnderTest) -> None:
    with generated(MANY), rows_written() as transactions:
        document = await mirror.ready(source(SOURCE))
    assert document["files_total"] == MANY
    assert sum(one.get("manifest_contents", 0) for one in transactions) == MANY
    assert max(max(one.values(), default=0) for one in transactions) <= MOST_ROWS
    with rows_written() as transactions:
        await mirror.evict(all=True, purge=True, tier="mirror")
    assert sum(one.get("contents", 0) for one in transactions) >= MANY
    assert max(max(one.values(), default=0) for one in transactions) <= MOST_ROWS


async def test_others_write_while_an_eviction_is_planned_and_a_collection_is_rehearsed(
    mirror: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mirror.ready(source(SOURCE))
    look, answers = removal.slabs_of, list[int]()

    async def looking(*given: Any) -> list[str]:
        answer = await mirror.http.post("/evictions", json={"all": True, "tier": "node", "dry_run": True})
        answers.append(answer.status_code)
        return await look(*given)

    monkeypatch.setattr(removal, "slabs_of", looking)
    planned = await mirror.evict(all=True, tier="mirror", dry_run=True)
    assert (await mirror.collect(grace_seconds=0, dry_run=True))["bytes_freed"] == 0
    assert planned["bytes_freed"] > 0
    assert set(answers) == {202}


@dataclass
class Gate:
    """Publishing stops before its second batch of names."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    manifest: str = ""
    calls: int = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, add_names = Gate(), contents.add_names

    async def stopping(session: WriteSession, draft: contents.Draft, *given: Any) -> list[Digest]:
        gate.calls += 1
        if gate.calls == 2:
            gate.manifest = f"b3:{draft.manifest}"
            gate.reached.set()
            await gate.open.wait()
        return await add_names(session, draft, *given)

    monkeypatch.setattr(contents, "NAMES_AT_ONCE", 250)
    monkeypatch.setattr(contents, "add_names", stopping)
    return gate


async def test_what_a_crash_left_half_written_is_nobody_s_until_it_is_gone_on_with(
    upstreams: None, database_options: dict[str, Any], tmp_path: Path, gate: Gate
) -> None:
    with generated(FILES):
        async with mirror_under_test(tmp_path / "mirror", **database_options) as mirror:
            begun = await mirror.begin(source(SOURCE))
            await asyncio.wait_for(gate.reached.wait(), LONGEST_SECONDS)
        async with mirror_under_test(tmp_path / "mirror", work=False, **database_options) as mirror:
            assert (await mirror.http.get(f"/manifests/{gate.manifest}")).status_code == 404
            assert (await mirror.get("/manifests"))["items"] == []
            assert (await mirror.get(f"/mirror/{begun['id']}"))["sources"][0]["manifest"] is None
        async with mirror_under_test(tmp_path / "mirror", **database_options) as mirror:
            document = await mirror.ended(begun["id"])
            assert document["sources"][0]["manifest"] == gate.manifest
            assert document["bytes_transferred"] == document["bytes_total"]  # nothing of it twice
            assert len((await mirror.get(f"/manifests/{gate.manifest}/layout"))["files"]) == FILES


async def test_two_that_publish_one_manifest_at_once_publish_it_whole(mirror: MirrorUnderTest, gate: Gate) -> None:
    slow = await mirror.begin(source(SOURCE))
    await asyncio.wait_for(gate.reached.wait(), LONGEST_SECONDS)
    gate.open.set()
    other = await mirror.ready(source(SOURCE, "/other"))
    assert [other["sources"][0]["manifest"], (await mirror.ended(slow["id"]))["sources"][0]["manifest"]] == [
        gate.manifest
    ] * 2
    assert len((await mirror.get(f"/manifests/{gate.manifest}/layout"))["files"]) == FILES


async def test_what_nobody_goes_on_with_is_collected(
    upstreams: None, database_options: dict[str, Any], tmp_path: Path, gate: Gate
) -> None:
    with generated(FILES):
        async with mirror_under_test(tmp_path / "mirror", **database_options) as mirror:
            begun = await mirror.begin(source(SOURCE))
            await asyncio.wait_for(gate.reached.wait(), LONGEST_SECONDS)
        async with mirror_under_test(tmp_path / "mirror", work=False, **database_options) as mirror:
            assert (await mirror.http.post(f"/mirror/{begun['id']}/cancel")).json()["status"] == "CANCELED"
        calendar = Calendar(days=1)  # by then no worker is at it any more
        async with mirror_under_test(tmp_path / "mirror", clock=calendar, **database_options) as mirror:
            counts = {one["kind"]: one["count"] for one in (await mirror.collect(grace_seconds=0))["kinds"]}
            assert (counts["manifests"], counts["contents"]) == (1, FILES - 250)  # what it named already goes with it
