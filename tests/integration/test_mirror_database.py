"""The migrations make the tables that the code knows, on SQLite and on PostgreSQL."""

import asyncio
import gc
import itertools
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.config import main as alembic
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Table, event, make_url, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from bdn.core.chunk import digest_of
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.mirror.db import chunks, manifests, mirrors
from bdn.mirror.db.database import MIGRATIONS, Database, DatabaseNotMigratedError
from bdn.mirror.db.recall import HEAD
from bdn.mirror.db.tables import Base, ManifestRow
from tests.support.mirror.service import LONGEST_SECONDS, mirror_under_test
from tests.support.waiting import until

pytest_plugins = ("tests.support.mirror.fixtures",)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/new.sqlite"
    return str(request.getfixturevalue("empty_postgres_url"))


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    """Empty, as it is made."""
    database = Database(url)
    yield database
    await database.close()


@pytest.fixture
async def migrated(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.close()


def test_the_newest_migration_is_the_one_that_the_code_names() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]


def statements_of(table: Table) -> list[ExecutableDDLElement]:
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    return [CreateTable(table), *(CreateIndex(index) for index in indexes)]


def test_the_newest_migration_has_the_fingerprint_of_the_tables() -> None:
    """A database of another state of development is refused, as long as the first migration follows the code."""
    statements = [
        str(made.compile(dialect=dialect))
        for dialect in (make_url(url).get_dialect()() for url in ("sqlite://", "postgresql+asyncpg://"))
        for table in Base.metadata.sorted_tables
        for made in statements_of(table)
    ]
    assert f"0001.{digest_of(' '.join(statements).encode()).hex[:8]}" == HEAD


async def differences(database: Database) -> object:
    def compare(connection: Connection) -> object:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return compare_metadata(context, Base.metadata)

    async with database._engine.connect() as connection:
        return await connection.run_sync(compare)


async def test_an_empty_database_migrated_to_the_head_equals_the_models(database: Database) -> None:
    assert await database.version() is None
    with pytest.raises(DatabaseNotMigratedError, match="run 'bdn migrate'"):
        await database.check_version()
    await database.migrate()
    assert await database.version() == HEAD
    await database.check_version()
    assert await differences(database) == []
    await database.migrate()  # nothing to do


async def test_alembic_s_own_command_migrates(url: str, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BDN_DATABASE_URL", url)
    project = ["--config", str(MIGRATIONS.parent / "pyproject.toml")]
    await asyncio.to_thread(alembic, [*project, "upgrade", "head"])
    assert await database.version() == HEAD
    assert await differences(database) == []


async def test_a_write_that_is_canceled_at_its_end_gives_its_connection_back_in_silence(
    migrated: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def write() -> None:
        async with migrated.write() as session:
            await session.execute(text("CREATE TABLE written (something TEXT)"))

    writing = asyncio.create_task(write())
    loop = asyncio.get_running_loop()

    @event.listens_for(migrated._engine.sync_engine, "reset")
    def cancel(*_: object) -> None:
        loop.call_soon(writing.cancel)

    with pytest.raises(asyncio.CancelledError):
        await writing
    assert caplog.messages == []
    async with migrated.read() as session:
        assert (await session.execute(text("SELECT * FROM written"))).all() == []


class _Canceled:
    """A coroutine that is canceled where it waits for the ``at``-th time, and with ``again`` each time from then on."""

    def __init__(self, work: Coroutine[Any, Any, None], at: int, *, again: bool) -> None:
        self._work = work
        self._at = at
        self._again = again
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._work.__await__()
        send: Callable[[], Any] = partial(next, steps)
        while True:
            try:
                awaited = send()
            except StopIteration:
                return
            self.waits += 1
            if self.waits == self._at or (self._again and self.waits > self._at):
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                yield awaited
            except BaseException as error:
                send = partial(steps.throw, error)
            else:
                send = partial(next, steps)


@pytest.mark.parametrize("again", [False, True], ids=["once", "at each await"])
async def test_a_write_that_is_canceled_wherever_it_waits_is_whole_or_nothing_and_frees_the_database(
    migrated: Database, database_url: str, again: bool
) -> None:
    rows = [{"key": f"{number:064x}"} for number in range(2)]

    async def write() -> None:
        async with migrated.write() as session:
            for row in rows:
                await session.execute(
                    text("INSERT INTO identities (key, size, chunks, first) VALUES (:key, 0, '', '')"), row
                )
                changed = text("UPDATE clusters SET epoch = epoch + 1 RETURNING cluster")
                assert (await session.execute(changed)).scalars().all() == ["c", "d"]
                assert len((await session.execute(text("SELECT * FROM clusters"))).all()) == 2

    async with migrated.write() as session:
        await session.execute(text("INSERT INTO clusters (cluster, epoch) VALUES ('c', 0), ('d', 0)"))
    gc.disable()  # it would mend what was left open, and so would the end of a task, whose exception has all frames
    tasks = []
    try:
        outcomes = []
        for at in itertools.count(1):
            canceled = _Canceled(write(), at, again=again)

            async def run(canceled: _Canceled = canceled) -> None:
                await canceled

            tasks.append(asyncio.create_task(run()))
            with suppress(asyncio.CancelledError):
                await tasks[-1]
            others = Database(database_url)  # as another process would
            try:
                async with asyncio.timeout(LONGEST_SECONDS), others.write() as session:
                    epoch = (await session.execute(text("SELECT max(epoch) FROM clusters"))).scalar()
                    found = (await session.execute(text("SELECT count(*) FROM identities"))).scalar()
                    await session.execute(text("DELETE FROM identities"))
            finally:
                await others.close()
            outcomes.append((found, epoch))
            async with asyncio.timeout(LONGEST_SECONDS), migrated.write() as session:  # nor is our own turn lost
                await session.execute(text("UPDATE clusters SET epoch = 0"))
            if canceled.waits < at:
                break
    finally:
        gc.enable()
    assert set(outcomes) == {(0, 0), (2, 2)}
    assert len(outcomes) > 5


async def end_of(tasks: set[asyncio.Task[Any]], threads: set[threading.Thread]) -> None:
    """Of all tasks and threads but these."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while begun := asyncio.all_tasks() - tasks:
            await asyncio.wait(begun)
    await until(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.parametrize("again", [False, True], ids=["once", "at each await"])
async def test_a_first_read_that_is_canceled_wherever_it_waits_leaves_neither_task_nor_thread(
    tmp_path: Path, again: bool
) -> None:
    """A task that never ends would hold up the end of the program."""

    async def read(database: Database) -> None:
        async with database.read() as session:
            await session.execute(text("SELECT 1"))

    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    for at in itertools.count(1):
        database = Database(f"sqlite+aiosqlite:///{tmp_path}/new.sqlite")
        canceled = _Canceled(read(database), at, again=again)

        async def run(canceled: _Canceled = canceled) -> None:
            await canceled

        with suppress(asyncio.CancelledError):
            await asyncio.create_task(run())
        await database.close()
        await end_of(tasks, threads)
        if canceled.waits < at:
            break
    assert at > 10


async def test_a_read_that_is_canceled_while_sqlite_opens_the_file_ends_after_the_driver_s_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread reports to the event loop, which may be closed by then."""
    connecting, go_on = asyncio.Event(), threading.Event()
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect
    loop, tasks, threads = asyncio.get_running_loop(), asyncio.all_tasks(), set(threading.enumerate())

    def slow(*arguments: Any, **options: Any) -> sqlite3.Connection:
        loop.call_soon_threadsafe(connecting.set)
        go_on.wait()
        return connect(*arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", slow)
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/new.sqlite")
    reading = asyncio.create_task(database.version())
    try:
        await connecting.wait()
        reading.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reading.done()
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await database.close()
    await end_of(tasks, threads)


@pytest.mark.promise("upgrades")
@pytest.mark.parametrize("version", ["0015.7", "9999"], ids=["of development", "newer"])
async def test_a_database_of_another_version_is_refused_and_left_alone(migrated: Database, version: str) -> None:
    async with migrated.write() as session:
        await session.execute(text(f"UPDATE alembic_version SET version_num = '{version}'"))
        await session.execute(text("CREATE TABLE of_another_version (something TEXT)"))
    for start in (migrated.migrate, migrated.check_version):
        with pytest.raises(DatabaseNotMigratedError, match=f"{version}.* delete the database and its store"):
            await start()
    assert await migrated.version() == version
    async with migrated.read() as session:
        assert (await session.execute(text("SELECT * FROM of_another_version"))).all() == []


async def test_a_mirror_on_postgresql_waits_for_the_migration(tmp_path: Path, empty_postgres_url: str) -> None:
    with pytest.raises(DatabaseNotMigratedError, match="'bdn migrate'"):
        async with mirror_under_test(tmp_path, database_url=empty_postgres_url):
            pytest.fail("it started")


async def test_a_name_with_a_nul_is_nobody_s_and_no_failure_of_the_database(migrated: Database) -> None:
    found: list[object] = []
    with suppress(InvalidRequestError, NotFoundError):
        async with migrated.read() as session:
            found += await mirrors.manifests_of_source(session, "acme", "hf://org/\0")
    assert found == []


async def test_the_use_of_a_manifest_is_noted_at_most_once_a_minute(migrated: Database) -> None:
    names = [digest_of(bytes([number])).hex for number in range(2)]
    async with migrated.write() as session:
        for name in names:
            set_id = await chunks.of(session, chunks.begin, name)
            row = ManifestRow(digest=name, set_id=set_id, files_total=1, bytes_total=1, created_at=1.0, last_used=1.0)
            session.add(row)

    async def used(name: str, now: float) -> int:
        """The rows that it changes."""
        with changes_of(migrated) as changed:
            async with migrated.write() as session:
                await manifests.touch(session, [name, digest_of(b"collected").hex], now)
        return sum(changed)

    assert await used(names[0], 1000) == 1
    assert [await used(names[0], 1000 + seconds) for seconds in (0, 59, 60, 61)] == [0, 0, 1, 0]
    assert await used(names[1], 1050) == 1
    async with migrated.read() as reading:
        noted = await reading.execute(select(ManifestRow.digest, ManifestRow.last_used))
        assert {tuple(row) for row in noted} == {(names[0], 1060), (names[1], 1050)}


@contextmanager
def changes_of(database: Database) -> Iterator[list[int]]:
    """How many rows each statement changes meanwhile."""
    counted: list[int] = []

    def count(_connection: Any, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith(("INSERT", "UPDATE", "DELETE")):
            counted.append(cursor.rowcount)

    engine = database._engine.sync_engine
    event.listen(engine, "after_cursor_execute", count)
    try:
        yield counted
    finally:
        event.remove(engine, "after_cursor_execute", count)
