"""A manifest becomes visible in one small transaction, whatever its size, and not before."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

from bdn.mirror.ingest import worker
from tests.support.mirror.generated import SOURCE, generated
from tests.support.mirror.service import LONGEST_SECONDS, MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)

MANY = 4100
FILES = 600


@pytest.fixture
async def mirror(upstreams: None, database_options: dict[str, Any], tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    with generated(FILES):
        async with mirror_under_test(tmp_path / "mirror", **database_options) as mirror:
            yield mirror


@contextmanager
def rows_written() -> Iterator[list[dict[str, int]]]:
    """For each transaction of this process, how many rows of each table were written, changed or deleted."""
    found: list[dict[str, int]] = []
    current: dict[Connection, dict[str, int]] = {}

    def begun(connection: Connection) -> None:
        current[connection] = {}
        found.append(current[connection])

    def executed(connection: Connection, cursor: Any, statement: str, given: Any, ___: Any, many: bool) -> None:
        words = statement.split()
        if connection in current and words[0] in ("INSERT", "UPDATE", "DELETE"):
            rows = len(given) if many else max(1, cursor.rowcount)
            table = words[1 if words[0] == "UPDATE" else 2]
            current[connection][table] = current[connection].get(table, 0) + rows

    event.listen(Engine, "begin", begun)
    event.listen(Engine, "after_cursor_execute", executed)
    try:
        yield found
    finally:
        event.remove(Engine, "begin", begun)
        event.remove(Engine, "after_cursor_execute", executed)


async def test_publishing_is_one_small_transaction_whatever_the_size_of_the_tree(mirror: MirrorUnderTest) -> None:
    with generated(MANY), rows_written() as transactions:
        document = await mirror.ready(source(SOURCE))
    assert document["files_total"] == MANY
    (publishing,) = [one for one in transactions if "manifests" in one]
    assert "mirror_sources" in publishing, "READY is in another transaction"
    assert sum(publishing.values()) <= 8
    assert max(max(one.values(), default=0) for one in transactions) <= 100  # a chunk is some thousand files


@dataclass
class Gate:
    """A mirror stops before it publishes."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    manifest: str = ""
    calls: int = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, publish = Gate(), worker.Ingest._publish

    async def stopping(ingest: worker.Ingest, *given: Any, **named: Any) -> None:
        gate.calls += 1
        if gate.calls == 1:
            gate.manifest = str(named["root"].digest)
            gate.reached.set()
            await gate.open.wait()
        await publish(ingest, *given, **named)

    monkeypatch.setattr(worker.Ingest, "_publish", stopping)
    return gate


async def test_a_killed_mirror_publishes_later_and_reads_nothing_again(
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
            assert (await mirror.get(f"/manifests/{gate.manifest}"))["files"] == FILES


async def test_two_that_publish_one_manifest_at_once_publish_it_whole(mirror: MirrorUnderTest, gate: Gate) -> None:
    slow = await mirror.begin(source(SOURCE))
    await asyncio.wait_for(gate.reached.wait(), LONGEST_SECONDS)
    other = await mirror.ready(source(SOURCE, "/other"))
    gate.open.set()
    assert [other["sources"][0]["manifest"], (await mirror.ended(slow["id"]))["sources"][0]["manifest"]] == [
        gate.manifest
    ] * 2
    assert (await mirror.get(f"/manifests/{gate.manifest}"))["files"] == FILES
    assert (await mirror.collect(grace_seconds=0))["bytes_freed"] == 0  # both name the same chunks


async def test_what_a_canceled_mirror_brought_is_collected(
    upstreams: None, database_options: dict[str, Any], tmp_path: Path, gate: Gate
) -> None:
    with generated(FILES):
        async with mirror_under_test(tmp_path / "mirror", **database_options) as mirror:
            begun = await mirror.begin(source(SOURCE))
            await asyncio.wait_for(gate.reached.wait(), LONGEST_SECONDS)
            assert (await mirror.http.post(f"/mirror/{begun['id']}/cancel")).json()["status"] == "CANCELED"
            gate.open.set()
            counts = {one["kind"]: one["count"] for one in (await mirror.collect(grace_seconds=0))["kinds"]}
            assert counts["chunks"] >= 3  # a slab, a page and a root
            assert mirror.behind.chunks() == {}
