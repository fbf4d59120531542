"""The statements about training jobs and their logs, on both databases."""

from collections.abc import AsyncIterator
from typing import Final

import pytest

from bdn.mirror.db import projects, training
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import TrainingLogRow
from bdn.mirror.db.training import DROPPED, OWN, Newest
from tests.support.mirror.training_jobs import job_row

pytest_plugins = ("tests.support.mirror.fixtures",)

JOB: Final = "j" * 10
NOW: Final = 1000.0


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    async with database.write() as session:
        project = await projects.project(session, "default", "Default", "llama", NOW)
        for number, status in enumerate(("CREATED", "STOPPED"), start=1):
            name = JOB if number == 1 else f"ended{'0' * 5}"
            await training.insert_job(session, job_row(name, project.id, number, status, NOW))
    yield database
    await database.close()


async def kept(database: Database, *, is_ascending: bool = True) -> list[tuple[int, int, list[str]]]:
    """The batches of the job: rank, number and texts."""
    found: list[tuple[int, int, list[str]]] = []
    async with database.read() as session:
        batches: list[TrainingLogRow] = [
            one async for one in training.window(session, JOB, 0, 2**63 - 1, is_ascending=is_ascending)
        ]
    for one in batches:
        found.append((one.rank, one.seq, [text for _, text in training.unpack(one.packed)]))
    return found


async def test_batches__are_added_once_extended_dropped_and_expired(database: Database) -> None:
    async with database.write() as session:
        for rank in (0, 1):
            for seq in range(3):
                await training.add_batch(session, JOB, rank, seq, [(10 * seq + rank, f"{rank}/{seq}")])
        await training.add_batch(session, JOB, 0, 2, [(99, "repeated")])
        await training.add_batch(session, JOB, OWN, 0, [(5, "created")])
        newest = await training.newest_batch(session, JOB, 0)
        assert newest == Newest(2, 20, 1)
        await training.extend_batch(session, JOB, 0, newest, [(23, "more")])
        await training.extend_batch(session, JOB, 0, newest, [(24, "a slower caller's")])
        assert await training.newest_batch(session, JOB, 0) == Newest(2, 23, 2)
        assert await training.last_ns(session, JOB) == 23
        assert await training.newest_batch(session, JOB, 7) is None
    order = [(0, 0), (1, 0), (OWN, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [one[:2] for one in await kept(database)] == order
    last = [(0, 2), (1, 2), (1, 1), (0, 1), (OWN, 0), (1, 0), (0, 0)]
    assert [one[:2] for one in await kept(database, is_ascending=False)] == last
    assert (0, 2, ["0/2", "more"]) in await kept(database)

    async with database.write() as session:
        size = await training.log_size(session, JOB)
        assert await training.drop_oldest(session, JOB, 1) == 1
        assert await training.log_size(session, JOB) < size
        await training.note_dropped(session, JOB, 1, 1, "{count} are gone")
        assert await training.drop_oldest(session, JOB, 10**9) == 3
        await training.note_dropped(session, JOB, 1, 3, "{count} are gone")
    expected = [(DROPPED, 4, ["4 are gone"]), (OWN, 0, ["created"]), (0, 2, ["0/2", "more"]), (1, 2, ["1/2"])]
    assert await kept(database) == expected

    async with database.read() as session:
        assert await training.silent_since(session, 23) == []
        assert await training.silent_since(session, 24) == [JOB]
    async with database.write() as session:
        ended = f"ended{'0' * 5}"
        await training.add_batch(session, ended, OWN, 0, [(5, "created")])
        await training.expire_logs(session, NOW)
        assert await training.last_ns(session, ended) == 5
        await training.expire_logs(session, NOW + 1)
        assert await training.last_ns(session, ended) == 0
    assert await kept(database) == expected


async def test_jobs__are_claimed_once_and_deleted_with_their_logs_and_projects(database: Database) -> None:
    async with database.write() as session:
        assert await training.claim(session, JOB, "one", NOW, NOW + 15)
        assert not await training.claim(session, JOB, "other", NOW + 15, NOW + 30)
        assert await training.claim(session, JOB, "other", NOW + 16, NOW + 31)
        await training.release_claims(session)
        assert await training.claim(session, JOB, "one", NOW, NOW + 15)
        assert not await training.claim(session, f"ended{'0' * 5}", "one", NOW, NOW + 15)
        for _ in range(2):
            await training.lock_placement(session)
        await training.add_batch(session, JOB, OWN, 0, [(5, "created")])
    async with database.read() as session:
        assert [one.id for one in await training.active(session)] == [JOB]
        (newest,) = (await training.latest(session, "default")).values()
        assert newest.number == 2
        assert await training.count_by_status(session) == {"CREATED": 1, "STOPPED": 1}
        assert await training.mirrors_that_ended(session, ["mir_0"]) == {}
    async with database.write() as session:
        await training.remove(session, JOB)
        assert await training.last_ns(session, JOB) == 0
        assert await training.next_number(session, newest.project) == 3
        await projects.forget(session, newest.project)
        assert await training.count_by_status(session) == {}
