"""Whose mirror a worker claims next, where several organisations wait."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.mirror.service import mirror_under_test, source, until

pytest_plugins = ("tests.support.mirror.fixtures",)
NOW, UNTIL = 1000.0, 1060.0


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    try:
        yield database
    finally:
        await database.close()


async def asked_for(database: Database, organisation: str, *, count: int, at: float) -> None:
    async with database.write() as session:
        for number in range(count):
            key = f"{organisation}-{number}"
            request = [{"source": f"hf://org/{key}", "mount_location": "/m"}]
            await mirrors.insert(session, key, organisation, key, request, now=at + number)


async def claims(database: Database, count: int, **options: Any) -> list[str]:
    """The mirrors of successive claims of one worker, by their ids."""
    found: list[str] = []
    after = ""
    for number in range(count):
        async with database.write() as session:
            claimed = await mirrors.claim(session, f"w:{number}", now=NOW, until=UNTIL, after=after, **options)
        if claimed is not None:
            found.append(claimed[0])
            after = claimed[1]
    return found


async def test_claim__one_organisation_has_a_long_queue__others_are_next(database: Database) -> None:
    await asked_for(database, "a", count=5, at=1)
    await asked_for(database, "b", count=2, at=50)
    await asked_for(database, "c", count=1, at=90)
    assert await claims(database, 9) == ["a-0", "b-0", "c-0", "a-1", "b-1", "a-2", "a-3", "a-4"]


async def test_claim__two_slots_and_three_refilled_queues__each_organisation_has_its_turn(database: Database) -> None:
    for position, name in enumerate("abc"):
        await asked_for(database, name, count=4, at=1 + position)
    after, served = "", []
    for number in range(6):
        async with database.write() as session:
            claimed = await mirrors.claim(session, f"w:{number}", now=NOW, until=UNTIL, after=after)
            assert claimed is not None
            served.append(claimed[0])
            after = claimed[1]
            if number:
                await mirrors.finish(session, served[-2], "READY", now=NOW)  # one slot is free again
    assert served == ["a-0", "b-0", "c-0", "a-1", "b-1", "c-1"]


async def test_claim__limited_to_idle_organisations__claims_one_mirror_of_each(database: Database) -> None:
    await asked_for(database, "a", count=3, at=1)
    await asked_for(database, "b", count=3, at=50)
    assert await claims(database, 5, only_idle=True) == ["a-0", "b-0"]


async def test_claim__organisation_has_open_pushes__they_do_not_count_as_mirrors_at_work(database: Database) -> None:
    await asked_for(database, "a", count=3, at=1)
    await asked_for(database, "b", count=1, at=50)
    async with database.write() as session:
        for number in (1, 2):
            await mirrors.begin_push(session, f"a-{number}", NOW, UNTIL)
    assert await claims(database, 3) == ["a-0", "b-0"]


async def test_worker__all_jobs_have_slow_mirrors_of_one_organisation__another_becomes_ready(
    upstreams: None, hub: Hub, tmp_path: Path, database_options: dict[str, Any]
) -> None:
    for number in range(4):
        hub.repo(f"slow/{number}").commit({"a.bin": b"x" * 100})
    hub.repo("org/small").commit({"a.txt": b"a"})
    hub.fail(stall(), path="/slow/", times=None)
    async with mirror_under_test(tmp_path / "mirror", jobs=2, **database_options) as mirror:
        slow = [await mirror.begin(source(f"hf://slow/{number}")) for number in range(4)]
        await until(lambda: hub.log.count(origin="hub") >= 2)
        await mirror.ready_for("other", source("hf://org/small"))
        states = [(await mirror.get(f"/mirror/{one['id']}"))["status"] for one in slow]
        assert sorted(states) == ["PENDING", "PENDING", "SYNCING", "SYNCING"]
        hub.release_stalled()
        for one in slow:
            assert (await mirror.ended(one["id"]))["status"] == "READY"
