"""The migrations make the tables that the code knows, on SQLite and on PostgreSQL."""

import asyncio
import gc
import itertools
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.config import main as alembic
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event, select, text
from sqlalchemy.engine import Connection

from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, digest_of
from bdn.core.errors import InvalidRequestError, NotFoundError, StoreUnavailableError
from bdn.core.store import content_fault
from bdn.mirror.db import contents, mirrors, objects
from bdn.mirror.db.contents import Record
from bdn.mirror.db.database import MIGRATIONS, Database, DatabaseNotMigratedError
from bdn.mirror.db.objects import StoredObject
from bdn.mirror.db.recall import HEAD
from bdn.mirror.db.tables import Base, ManifestRow, ManifestUseRow
from tests.doubles.hub import Hub
from tests.support.mirror.service import LONGEST_SECONDS, mirror_under_test, source

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
    rows = [{"key": f"{number:064x}", "content": "0" * 64} for number in range(2)]

    async def write() -> None:
        async with migrated.write() as session:
            for row in rows:
                await session.execute(text("INSERT INTO identities (key, content) VALUES (:key, :content)"), row)
                changed = text("UPDATE clusters SET epoch = epoch + 1 RETURNING cluster")
                assert (await session.execute(changed)).scalars().all() == ["c", "d"]
                assert len((await session.execute(text("SELECT * FROM clusters"))).all()) == 2

    async with migrated.write() as session:
        await session.execute(text("INSERT INTO contents (digest, size, chunks) VALUES (:content, 0, '')"), rows[0])
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


@pytest.mark.promise("upgrades")
async def test_a_database_of_a_newer_version_is_refused_and_left_alone(migrated: Database) -> None:
    async with migrated.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        await session.execute(text("CREATE TABLE of_a_later_version (something TEXT)"))
    with pytest.raises(StoreUnavailableError, match="9999"):
        await migrated.migrate()
    assert await migrated.version() == "9999"
    async with migrated.read() as session:
        assert (await session.execute(text("SELECT * FROM of_a_later_version"))).all() == []


@pytest.mark.promise("upgrades")
async def test_a_version_starts_and_works_on_a_newer_schema_that_has_additions_alone(
    migrated: Database, database_url: str, hub: Hub, upstreams: None, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    known, _, additions = HEAD.partition(".")
    newer = f"{known}.{int(additions or 0) + 10}"  # 0015.10 is newer than 0015.9
    async with migrated.write() as session:
        await session.execute(text(f"UPDATE alembic_version SET version_num = '{newer}'"))
        await session.execute(text("ALTER TABLE mirrors ADD COLUMN added TEXT"))
        await session.execute(text("ALTER TABLE mirror_sources ADD COLUMN added INTEGER NOT NULL DEFAULT 7"))
    await migrated.check_version()
    await migrated.migrate()  # of the version before: does nothing
    async with mirror_under_test(tmp_path / "mirror", database_url=database_url) as mirror:
        assert (await mirror.ready(source("hf://org/model")))["bytes_transferred"] == 2
    assert await migrated.version() == newer


@pytest.mark.parametrize("version", ["0014", "0014.9", "9999.1"])
async def test_a_version_does_not_start_on_a_schema_that_may_lack_or_have_lost_something(
    migrated: Database, version: str
) -> None:
    async with migrated.write() as session:
        await session.execute(text(f"UPDATE alembic_version SET version_num = '{version}'"))
    with pytest.raises(DatabaseNotMigratedError, match=version):
        await migrated.check_version()


async def test_a_mirror_on_postgresql_waits_for_the_migration(tmp_path: Path, empty_postgres_url: str) -> None:
    with pytest.raises(DatabaseNotMigratedError, match="'bdn migrate'"):
        async with mirror_under_test(tmp_path, database_url=empty_postgres_url):
            pytest.fail("it started")


async def test_records_and_objects_of_a_source_with_thousands_of_revisions_can_be_gone_through(
    migrated: Database,
) -> None:
    manifests = [f"{number:064x}" for number in range(5000)]
    async with migrated.read() as session:
        found, cursor = await objects.wrong_records(session, None, manifests)
        none, cursor = await objects.wrong_records(session, cursor, manifests)
        assert (found, none) == ([], [])
        assert await objects.after(session, cursor, objects.Reach(manifests, "acme"), 32) == []


async def test_of_a_file_of_many_chunks_only_wanted_ones_are_made(
    migrated: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, chunks = digest_of(b"chunk"), 20_000
    layout = FileLayout.of((chunks - 1) * CHUNK_SIZE + 1, (chunk,) * chunks)
    async with migrated.write() as session:
        await contents.record_contents(session, {"key": layout}, 1.0)
    made, threads = 0, set[int]()

    def counted(*fields: Any) -> StoredObject:
        nonlocal made
        made += 1
        return StoredObject(*fields)

    def fault(digest: Digest, size: int, raw: bytes) -> str | None:
        threads.add(threading.get_ident())
        return content_fault(digest, size, raw)

    monkeypatch.setattr(objects, "StoredObject", counted)
    for module in (objects, contents):
        monkeypatch.setattr(module, "content_fault", fault)
    async with migrated.read() as reading:
        found, behind = await objects.wrong_records(reading, "record:", None)
        looked = await objects.record_fault(reading, Record("content", layout.digest))
        _, start = await objects.wrong_records(reading, behind, None)
        assert (found, behind, looked) == ([], f"record:{layout.digest.hex}", None)
        first = await objects.after(reading, start, None, 32)
        last = await objects.after(reading, f"content:{layout.digest.hex}:{chunks - 3}", None, 32)
        places = [int(one.cursor.rpartition(":")[2]) for one in (*first, *last)]
        assert places == [*range(32), chunks - 2, chunks - 1]
        assert await objects.after(reading, last[-1].cursor, None, 32) == []
    assert made == len(places)
    assert threads
    assert threading.get_ident() not in threads


async def test_a_name_with_a_nul_is_nobody_s_and_no_failure_of_the_database(migrated: Database) -> None:
    found: list[object] = []
    with suppress(InvalidRequestError, NotFoundError):
        async with migrated.read() as session:
            found += await mirrors.manifests_of_source(session, "acme", "hf://org/\0")
    assert found == []


async def test_the_use_of_a_long_manifest_is_noted_beside_it_and_at_most_once_a_minute(
    migrated: Database, tmp_path: Path
) -> None:
    names = [digest_of(bytes([number])).hex for number in range(2)]
    async with migrated.write() as session:
        for name in names:
            row = ManifestRow(digest=name, canonical=bytes(4_000_000), files_total=1, bytes_total=1)
            row.created_at = row.last_used = 1.0
            session.add(row)

    async def used(name: str, now: float) -> int:
        """The rows that it changes."""
        with changes_of(migrated) as changed:
            async with migrated.write() as session:
                await contents.touch(session, [name, digest_of(b"collected").hex], now)
        return sum(changed)

    if (log := tmp_path / "mirror/mirror.sqlite-wal").exists():
        with closing(sqlite3.connect(tmp_path / "mirror/mirror.sqlite")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert await used(names[0], 1000) == 1
    assert not log.exists() or log.stat().st_size < 100_000
    assert [await used(names[0], 1000 + seconds) for seconds in (0, 59, 60, 61)] == [0, 0, 1, 0]
    assert await used(names[1], 1050) == 1
    async with migrated.read() as reading:
        noted = await reading.execute(select(ManifestUseRow.manifest, ManifestUseRow.last_used))
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
