"""The mirror's database: SQLite embedded, PostgreSQL in production; sessions that say whether they write."""

import asyncio
import os
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import cache, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NewType, TypeVar, TypeVarTuple, cast

from sqlalchemy import (
    URL,
    CursorResult,
    Executable,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    delete,
    event,
    inspect,
    make_url,
    or_,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, ExceptionContext
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import InstrumentedAttribute

from bdn.core.errors import InvalidRequestError, StoreUnavailableError
from bdn.mirror.db.clock import DatabaseClock
from bdn.mirror.db.errors import DatabaseUnavailableError, mapped_errors
from bdn.mirror.db.recall import HEAD
from bdn.mirror.db.tables import Base
from bdn.mirror.db.waiting import Watch

MIGRATIONS: Final = Path(__file__).parents[3] / "migrations"

# How long a write waits for others of this process, and as long again for another process that holds SQLite's one lock:
# together less than clients wait for an answer.
WRITER_SECONDS = 12.0
_PRIVATE: Final = 0o600

ReadSession = NewType("ReadSession", AsyncSession)
WriteSession = NewType("WriteSession", ReadSession)


_DRIVERS: Final = {"postgresql": "asyncpg", "sqlite": "aiosqlite"}


def database_url(address: str, setting: str = "BDN_DATABASE_URL") -> URL:
    """The URL of a setting: a driver that is not named is ours, and libpq's ``sslmode`` is the driver's ``ssl``.

    Raises ``InvalidRequestError``: it is none, or one of a database or a driver that we do not use.
    """
    wanted = (
        "write postgresql://USER:PASSWORD@HOST:PORT/NAME, with signs such as @ and / in the password percent-encoded"
    )
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):  # neither is shown: it may hold the password
        raise InvalidRequestError(f"{setting} is no address of a database; {wanted}") from None
    backend, _, driver = url.drivername.partition("+")
    backend = "postgresql" if backend == "postgres" else backend
    if _DRIVERS.get(backend, "") != (driver or _DRIVERS.get(backend)):
        raise InvalidRequestError(f"{setting}: {url.drivername} is not a database of ours; {wanted}")
    query = {"ssl" if name == "sslmode" and backend == "postgresql" else name: url.query[name] for name in url.query}
    return url.set(drivername=f"{backend}+{_DRIVERS[backend]}", query=query)


def place_of(url: URL) -> str:
    """Which database it is, without user, password and options."""
    return URL.create(url.drivername, host=url.host, port=url.port, database=url.database).render_as_string()


class DatabaseNotMigratedError(StoreUnavailableError):
    """The schema is not the one that this version needs."""


_TOLD: Final = "told"  # in the info of a session: the topics that it tells


def tell(session: WriteSession, topic: str) -> None:
    """Wake whoever waits for the topic, in whatever process, once the transaction is committed; nobody if it is not."""
    session.info.setdefault(_TOLD, {})[topic] = None


class Database:
    """One engine. Sessions are short: opened for one unit of work, committed or rolled back at the end of the block.

    ``watch`` are those of this process who wait for changes, ``now`` is the time by which rows are dated.

    Args:
        address: ``BDN_DATABASE_URL``.
        listen_address: where PostgreSQL can be listened to; empty is ``address``.
        clock: this machine's.
    """

    def __init__(self, address: str, listen_address: str = "", clock: Callable[[], float] = time.time) -> None:
        url = database_url(address)
        self._listen_url = database_url(listen_address, "BDN_DATABASE_LISTEN_URL") if listen_address else url
        self.watch = Watch()
        self.now = DatabaseClock(clock)
        self._name = secrets.token_hex(8)  # of this process, among those who tell
        self._is_sqlite = url.get_backend_name() == "sqlite"
        if self._listen_url.get_backend_name() != url.get_backend_name():
            raise InvalidRequestError("BDN_DATABASE_LISTEN_URL is another way to the PostgreSQL of BDN_DATABASE_URL")
        if self._is_sqlite:
            _make_private(Path(url.database or ""))
            self._engine = self._patient = create_async_engine(url, pool_size=10, max_overflow=20)
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)
            event.listen(self._engine.sync_engine, "handle_error", _keep_sqlite)
        else:
            from bdn.mirror.db.postgres import PATIENT_SECONDS, STATEMENT_SECONDS, open_postgres  # noqa: PLC0415 - its driver

            self._engine = open_postgres(url, statement_seconds=STATEMENT_SECONDS)
            self._patient = open_postgres(url, statement_seconds=PATIENT_SECONDS)
        # SQLite has one writer. Waiting for it here is fair and cheap; waiting in SQLite is polling.
        self._sqlite_writer = asyncio.Lock()
        self._waiting_since: float | None = None  # for SQLite's lock, which another process has
        self._alone: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def set_clock(self) -> None:
        """Ask PostgreSQL for its time. SQLite's is this machine's."""
        if not self._is_sqlite:
            from bdn.mirror.db.listening import ask_time  # noqa: PLC0415 - its driver

            with mapped_errors():
                async with self._engine.connect() as connection:
                    await ask_time(connection, self.now)

    async def keep_listening(self) -> None:
        """Until canceled: wake who waits here for what other processes change. SQLite has one process."""
        if not self._is_sqlite:
            from bdn.mirror.db.listening import Listening  # noqa: PLC0415 - its driver
            from bdn.mirror.db.postgres import STATEMENT_SECONDS, connect_arguments, is_pooled  # noqa: PLC0415

            url = self._listen_url
            arguments = None if is_pooled(url) else connect_arguments(url, statement_seconds=STATEMENT_SECONDS)
            await Listening(self._engine, arguments, self.watch, self._name, self.now).keep()

    @asynccontextmanager
    async def read(self, *, patient: bool = False) -> AsyncIterator[ReadSession]:
        """A consistent look; nothing is ever committed. ``patient``: a statement may take long, so nobody should wait for it."""
        with mapped_errors():
            async with AsyncSession(self._patient if patient else self._engine, expire_on_commit=False) as session:
                yield ReadSession(session)

    @asynccontextmanager
    async def write(self, *, patient: bool = False) -> AsyncIterator[WriteSession]:
        """One transaction: committed when the block ends, rolled back when it raises. ``patient`` as in ``read``."""
        engine = (self._patient if patient else self._engine).execution_options(bdn_write=True)
        told: Sequence[str] = ()
        try:
            with mapped_errors():
                async with (
                    self._sqlite_turn() if self._is_sqlite else nullcontext(),
                    # Its exit is not canceled, unlike that of ``session.begin()``.
                    async_sessionmaker(engine, expire_on_commit=False).begin() as session,
                ):
                    if self._is_sqlite:
                        await self._take_sqlite_lock(session)
                    yield WriteSession(ReadSession(session))
                    if (told := tuple(session.info.get(_TOLD, ()))) and not self._is_sqlite:
                        from bdn.mirror.db.listening import tell_others  # noqa: PLC0415 - its driver

                        await tell_others(await session.connection(), self._name, told)
        finally:
            for topic in told:  # also when nobody knows whether it is committed: they look
                self.watch.notify(topic)

    @asynccontextmanager
    async def _sqlite_turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(WRITER_SECONDS):
                await self._sqlite_writer.acquire()
        except TimeoutError:
            raise DatabaseUnavailableError(f"database: others have been writing for {WRITER_SECONDS:g} s") from None
        try:
            yield
        finally:
            self._sqlite_writer.release()

    async def _take_sqlite_lock(self, session: AsyncSession) -> None:
        """As it is this task's turn, only another process can have it."""
        self._waiting_since = time.monotonic()
        try:
            await session.connection()
        finally:
            self._waiting_since = None

    def check_writable(self, seconds: float) -> None:
        """Raise when another process has kept SQLite's lock for so long. Asks nobody: workers write every second."""
        if self._waiting_since is not None and time.monotonic() - self._waiting_since > seconds:
            raise DatabaseUnavailableError(f"database: another process has kept it locked for more than {seconds:g} s")

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        """Nobody else, in any process, is in a block of this name. ``LockLostError`` may end it in its middle."""
        async with self._alone[name]:
            if self._is_sqlite:
                yield
            else:
                from bdn.mirror.db.postgres import lock_held  # noqa: PLC0415 - its driver

                async with lock_held(self._engine, name):
                    yield

    async def version(self) -> str | None:
        """The migration that the schema is at; None for an empty database."""
        with mapped_errors():
            async with self._engine.connect() as connection:
                if not await connection.run_sync(lambda sync: inspect(sync).has_table("alembic_version")):
                    return None
                return (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar()

    async def check_version(self) -> None:
        """Refuse to work on a schema that this version does not know."""
        version = await self.version()
        if version is None:
            raise DatabaseNotMigratedError("the database is empty; run 'bdn migrate'")
        _check_known(version)

    async def migrate(self) -> None:
        """Bring an empty database to this version's schema with the real migrations. Cheap when it is there already."""
        if (version := await self.version()) is not None:
            _check_known(version)
            return
        with mapped_errors():
            async with self._patient.begin() as connection:
                await connection.run_sync(_upgrade)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()
        await self._patient.dispose()


def _check_known(version: str) -> None:
    if version != HEAD:
        raise DatabaseNotMigratedError(
            f"the database is at migration {version}, and this version needs {HEAD}: it belongs to another version of BDN; run that "
            "version, or, where it was a development version, delete the database and its store, and mirror again"
        )


def _upgrade(connection: Connection) -> None:
    from alembic import command  # noqa: PLC0415 - 0.9 s to import, needed once in a database's life
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _make_private(file: Path) -> None:
    """Close the database file to other users. SQLite gives its WAL and index the mode of that file. The engine reports failures."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
        try:
            os.fchmod(descriptor, _PRIVATE)
        finally:
            os.close(descriptor)


def _prepare_sqlite(connection: Any, _: object) -> None:  # noqa: ANN401 - the driver's own connection
    connection.isolation_level = None  # the driver must not begin transactions; we do, below
    cursor = connection.cursor()
    busy = f"busy_timeout={1000 * WRITER_SECONDS:.0f}"
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", busy):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that begins as a reader and writes later fails when another wrote meanwhile; IMMEDIATE waits instead.
    immediate = connection.get_execution_options().get("bdn_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _keep_sqlite(context: ExceptionContext) -> None:
    """Who is canceled rolls back, in the driver's thread, once what is under way there has ended.

    SQLAlchemy would close the connection. SQLite ends a transaction with its connection only when nobody has a cursor any
    more, and the exception has one: the lock would stay for as long as anybody keeps that.
    """
    if isinstance(context.original_exception, asyncio.CancelledError):
        context.is_disconnect = False


_BATCH: Final = 250  # rows per statement: SQLite allowed 999 bound parameters for a long time
_INSERTED: Final = 1000  # rows given to the driver at once, so that others get the event loop in between
_Item = TypeVar("_Item")
_Entity = TypeVar("_Entity", bound=Base)
_Columns = TypeVarTuple("_Columns")
Values = dict[str, Any]  # of a row, by column


Dialect = NewType("Dialect", str)


def dialect_of(session: ReadSession) -> Dialect:
    """Whose SQL it is."""
    return Dialect(session.get_bind().dialect.name)


def insert(dialect: Dialect, table: type[Base]) -> postgresql.Insert | sqlite.Insert:
    """An insert that has ``on_conflict_do_nothing`` and ``on_conflict_do_update``, which each dialect spells in its own way."""
    rows = cast("Table", table.__table__)
    return postgresql.insert(rows) if dialect == "postgresql" else sqlite.insert(rows)


@cache
def _insert_missing(dialect: Dialect, table: type[Base]) -> Executable:
    return insert(dialect, table).on_conflict_do_nothing()


async def insert_new(
    session: WriteSession, table: type[Base], rows: Sequence[Values], statement: Executable | None = None
) -> None:
    """Insert the rows that are not there yet. Past the ORM, which costs as much again for each row.

    ``statement``, one of ``insert``, says what becomes of those that are there; without it they stay as they are.
    """
    if not rows:
        return
    if statement is None:
        statement = _insert_missing(dialect_of(session), table)
    connection = await session.connection()
    # Everybody writes in the order of the keys, so that two writers do not lock crosswise.
    key = itemgetter(*(column.name for column in table.__mapper__.primary_key))
    for batch in batches(sorted(rows, key=key), _INSERTED):
        await connection.execute(statement, list(batch))


Cursor = tuple[float, str]  # the time and the id of the last row of a page


async def newest(
    session: ReadSession,
    query: Select[_Entity],
    key: tuple[InstrumentedAttribute[float], InstrumentedAttribute[str]],
    before: Cursor | None,
    limit: int,
) -> tuple[list[_Entity], Cursor | None]:
    """A page of rows, by time and id (``key``), newest first and older than ``before``; and where the next one begins.

    That is None on the last page.
    """
    at, row_id = key
    if before is not None:
        query = query.where(or_(at < before[0], and_(at == before[0], row_id < before[1])))
    found = list((await session.execute(query.order_by(at.desc(), row_id.desc()).limit(limit + 1))).scalars())
    if len(found) <= limit:
        return found, None
    last = found[limit - 1]
    return found[:limit], (getattr(last, at.key), getattr(last, row_id.key))


async def changed(session: WriteSession, statement: Executable) -> int:
    """How many rows the statement changed or deleted."""
    return cast("CursorResult[Any]", await session.execute(statement)).rowcount


async def changed_past_orm(session: WriteSession, statement: Executable, **values: object) -> int:
    """As ``changed``, of a statement that is made once, with these parameters, and of rows that the session has not loaded."""
    return (await (await session.connection()).execute(statement, values)).rowcount


async def select_in(
    session: ReadSession,
    query: Select[*_Columns],
    column: InstrumentedAttribute[Any],
    names: Sequence[str] | Sequence[bytes],
    **values: object,
) -> AsyncIterator[Row[*_Columns]]:
    """The rows of the query in which the column is one of these names; there may be a million of them.

    ``values`` are those of the query's parameters. One that is asked often is made once: to make it takes longer than to ask it.
    """
    narrowed = _narrowed(query, column)
    for batch in batches(names):
        for row in await session.execute(narrowed, {"names": batch, **values}):
            yield row


@lru_cache(maxsize=16)
def _narrowed(query: Select[*_Columns], column: InstrumentedAttribute[Any]) -> Select[*_Columns]:
    return query.where(column.in_(bindparam("names", expanding=True)))


async def delete_in(session: WriteSession, column: InstrumentedAttribute[str], names: Sequence[str]) -> None:
    """Delete the rows in which the column is one of these names."""
    for batch in batches(names):
        await session.execute(delete(column.class_).where(column.in_(batch)))


def batches(items: Sequence[_Item], size: int = _BATCH) -> Iterator[Sequence[_Item]]:
    """The items in pieces of ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
