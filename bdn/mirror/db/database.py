"""The mirror's database: SQLite embedded, PostgreSQL in production; sessions to read and sessions to write."""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
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
    inspect,
    make_url,
    or_,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import InstrumentedAttribute

from bdn.core.errors import InvalidRequestError, StoreUnavailableError
from bdn.mirror.db.clock import DatabaseClock
from bdn.mirror.db.errors import DatabaseUnavailableError, mapped_errors
from bdn.mirror.db.recall import HEAD
from bdn.mirror.db.sqlite import open_sqlite
from bdn.mirror.db.tables import Base, FactRow
from bdn.mirror.db.waiting import Watch, in_background

MIGRATIONS: Final = Path(__file__).parents[3] / "migrations"

# How long a write waits for other writes of this process, and as long again for another process that holds SQLite's one
# lock. Together less than the clients' timeout.
WRITER_SECONDS = 12.0
CLAIM_SECONDS = 15.0  # see ``Database.alone``
RENEW_SECONDS = 3.0
_CLAIM_AGAIN_SECONDS: Final = 0.5  # between two attempts while another process has the claim
_CLOCK_SECONDS: Final = 60.0  # between two requests for the time
_TIME: Final = text("SELECT extract(epoch FROM clock_timestamp())::float8")

ReadSession = NewType("ReadSession", AsyncSession)
WriteSession = NewType("WriteSession", ReadSession)


_DRIVERS: Final = {"postgresql": "asyncpg", "sqlite": "aiosqlite"}


def database_url(address: str) -> URL:
    """The URL of ``BDN_DATABASE_URL``. Adds our driver if none is named, and maps libpq's ``sslmode`` to the driver's ``ssl``.

    Raises ``InvalidRequestError`` if it is not a URL, or names a database or driver that we do not use.
    """
    wanted = (
        "write postgresql://USER:PASSWORD@HOST:PORT/NAME, with signs such as @ and / in the password percent-encoded"
    )
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):  # neither is shown: it may contain the password
        raise InvalidRequestError(f"BDN_DATABASE_URL is not the address of a database; {wanted}") from None
    backend, _, driver = url.drivername.partition("+")
    backend = "postgresql" if backend == "postgres" else backend
    if _DRIVERS.get(backend, "") != (driver or _DRIVERS.get(backend)):
        raise InvalidRequestError(f"BDN_DATABASE_URL: {url.drivername} is not a supported database; {wanted}")
    query = {"ssl" if name == "sslmode" and backend == "postgresql" else name: url.query[name] for name in url.query}
    return url.set(drivername=f"{backend}+{_DRIVERS[backend]}", query=query)


def place_of(url: URL) -> str:
    """The database's address without user, password and options."""
    return URL.create(url.drivername, host=url.host, port=url.port, database=url.database).render_as_string()


class ClaimExpiredError(DatabaseUnavailableError):
    """The claim was not renewed in time. Another process may hold it."""


class DatabaseNotMigratedError(StoreUnavailableError):
    """The schema is not the one that this version needs."""


_TOLD: Final = "told"  # in the info of a session: the topics to notify


def tell(session: WriteSession, topic: str) -> None:
    """Once the transaction is committed, wake the topic's waiters in this process; none if it is rolled back."""
    session.info.setdefault(_TOLD, {})[topic] = None


class Database:
    """One engine. Sessions are short: opened for one unit of work, committed or rolled back at the end of the block.

    ``watch`` wakes the waiters of this process, ``now`` is the clock that dates rows.

    Args:
        address: ``BDN_DATABASE_URL``.
        clock: this machine's.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.time) -> None:
        url = database_url(address)
        self.watch = Watch()
        self.now = DatabaseClock(clock)
        self._is_sqlite = url.get_backend_name() == "sqlite"
        if self._is_sqlite:
            self._engine = self._patient = open_sqlite(url, busy_seconds=WRITER_SECONDS)
        else:
            from bdn.mirror.db.postgres import PATIENT_SECONDS, STATEMENT_SECONDS, open_postgres  # noqa: PLC0415 - its driver

            self._engine = open_postgres(url, statement_seconds=STATEMENT_SECONDS)
            self._patient = open_postgres(url, statement_seconds=PATIENT_SECONDS)
        self._writes, self._patient_writes = (
            async_sessionmaker(engine.execution_options(bdn_write=True), expire_on_commit=False)
            for engine in (self._engine, self._patient)
        )
        # SQLite has one writer. Waiting for it here is fair and cheap; waiting in SQLite is polling.
        self._sqlite_writer = asyncio.Lock()
        self._waiting_since: float | None = None  # for SQLite's lock, which another process holds
        self._alone: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def set_clock(self) -> None:
        """Set the clock to PostgreSQL's. An SQLite database uses this machine's clock."""
        with mapped_errors():
            async with self._engine.connect() as connection:
                asked_at = self.now.elapsed()
                self.now.set((await connection.execute(_TIME)).scalar_one(), asked_at)

    async def keep_clock(self) -> None:
        """Until canceled, request the time again once a minute: clocks drift."""
        while True:
            await asyncio.sleep(_CLOCK_SECONDS)
            with suppress(StoreUnavailableError):  # it advances without an answer
                await self.set_clock()

    @asynccontextmanager
    async def read(self, *, patient: bool = False) -> AsyncIterator[ReadSession]:
        """A consistent read; nothing is ever committed.

        ``patient`` allows long statements: no request should wait for it.
        """
        with mapped_errors():
            async with AsyncSession(self._patient if patient else self._engine, expire_on_commit=False) as session:
                yield ReadSession(session)

    @asynccontextmanager
    async def write(self, *, patient: bool = False) -> AsyncIterator[WriteSession]:
        """One transaction: committed when the block ends, rolled back when it raises. ``patient`` as in ``read``."""
        sessions = self._patient_writes if patient else self._writes
        told: Collection[str] = ()
        try:
            with mapped_errors():
                async with (
                    self._sqlite_turn() if self._is_sqlite else nullcontext(),
                    # Its exit is not canceled, unlike the exit of ``session.begin()``.
                    sessions.begin() as session,
                ):
                    if self._is_sqlite:
                        await self._take_sqlite_lock(session)
                    yield WriteSession(ReadSession(session))
                    told = session.info.get(_TOLD, ())
        finally:
            for topic in told:  # also if it is unknown whether it is committed: waiters read again
                self.watch.notify(topic)

    @asynccontextmanager
    async def _sqlite_turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(WRITER_SECONDS):
                await self._sqlite_writer.acquire()
        except TimeoutError:
            raise DatabaseUnavailableError(
                f"database: other writes of this process have taken more than {WRITER_SECONDS:g} s"
            ) from None
        try:
            yield
        finally:
            self._sqlite_writer.release()

    async def _take_sqlite_lock(self, session: AsyncSession) -> None:
        """Since it is this task's turn, only another process can hold the lock."""
        self._waiting_since = time.monotonic()
        try:
            await session.connection()
        finally:
            self._waiting_since = None

    def check_writable(self, seconds: float) -> None:
        """Raise if another process has held SQLite's lock for so long.

        Sends no query: workers write every second.
        """
        if self._waiting_since is not None and time.monotonic() - self._waiting_since > seconds:
            raise DatabaseUnavailableError(f"database: another process has kept it locked for more than {seconds:g} s")

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        """Exclude all other blocks of this name, in every process. ``ClaimExpiredError`` may end the block at any point.

        A row of ``facts`` names the process, until a time that the process renews. A process that loses the database
        stops before another begins, except for its last step. So the work has to be correct even when two processes do
        it at the same time.
        """
        async with self._alone[name]:
            if self._is_sqlite:
                yield
                return
            holder = secrets.token_hex(8)
            while not await self._claim(name, holder):  # noqa: ASYNC110 - another process has it
                await asyncio.sleep(_CLAIM_AGAIN_SECONDS)
            expiry = asyncio.timeout(CLAIM_SECONDS - RENEW_SECONDS)
            try:
                async with expiry, in_background(self._keep_claim(name, holder, expiry)):
                    yield
            except TimeoutError:
                if not expiry.expired():
                    raise  # the block's own
                raise ClaimExpiredError(f"database: the claim {name!r} could not be renewed in time") from None
            finally:
                with suppress(StoreUnavailableError, TimeoutError):  # it expires
                    async with asyncio.timeout(RENEW_SECONDS):
                        await self._claim(name, holder, is_release=True)

    async def _claim(self, name: str, holder: str, *, is_release: bool = False) -> bool:
        """Claim, renew or release. Returns False if another holder has the claim.

        A released claim has no date: a clock that is set back afterwards does not delay the next claim.
        """
        async with self.write() as session:
            now = self.now()
            value = {"holder": holder, "until": 0.0 if is_release else now + CLAIM_SECONDS}
            await insert_new(session, FactRow, [{"name": name, "value": value}])
            row = await session.get_one(FactRow, name, with_for_update=True)
            is_ours: bool = row.value["holder"] == holder or row.value["until"] <= now
            if is_ours:
                row.value = value
        return is_ours

    async def _keep_claim(self, name: str, holder: str, expiry: asyncio.Timeout) -> None:
        """The expiry cancels the block even while a renewal hangs."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            asked_at = asyncio.get_running_loop().time()
            if not await self._claim(name, holder):
                raise ClaimExpiredError(f"database: another process has the claim {name!r}")
            if not expiry.expired():
                expiry.reschedule(asked_at + CLAIM_SECONDS - RENEW_SECONDS)

    async def version(self) -> str | None:
        """The schema's migration; None for an empty database."""
        with mapped_errors():
            async with self._engine.connect() as connection:
                if not await connection.run_sync(lambda sync: inspect(sync).has_table("alembic_version")):
                    return None
                return (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar()

    async def check_version(self) -> None:
        """Raise ``DatabaseNotMigratedError`` for a schema that this version does not know."""
        version = await self.version()
        if version is None:
            raise DatabaseNotMigratedError("the database is empty; run 'bdn migrate'")
        _check_known(version)

    async def migrate(self) -> None:
        """Create this version's schema in an empty database by the real migrations. Cheap if it exists already."""
        if (version := await self.version()) is not None:
            _check_known(version)
            return
        with mapped_errors():
            async with self._patient.begin() as connection:
                await connection.run_sync(_upgrade)

    async def close(self) -> None:
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


_BATCH: Final = 250  # rows per statement: older SQLite allows 999 bound parameters
_INSERTED: Final = 1000  # rows per driver call, so that other tasks get the event loop in between
_Item = TypeVar("_Item")
_Entity = TypeVar("_Entity", bound=Base)
_Columns = TypeVarTuple("_Columns")
Values = dict[str, Any]  # of a row, by column


Dialect = NewType("Dialect", str)


def dialect_of(session: ReadSession) -> Dialect:
    return Dialect(session.get_bind().dialect.name)


def insert(dialect: Dialect, table: type[Base]) -> postgresql.Insert | sqlite.Insert:
    """An insert with ``on_conflict_do_nothing`` and ``on_conflict_do_update``, which differ by dialect."""
    rows = cast("Table", table.__table__)
    return postgresql.insert(rows) if dialect == "postgresql" else sqlite.insert(rows)


@cache
def _insert_missing(dialect: Dialect, table: type[Base]) -> Executable:
    return insert(dialect, table).on_conflict_do_nothing()


async def insert_new(
    session: WriteSession, table: type[Base], rows: Sequence[Values], statement: Executable | None = None
) -> None:
    """Insert the rows that are not there yet. Bypasses the ORM, which would double the cost of each row.

    ``statement``, one of ``insert``, says what happens to existing rows; without it they do not change.
    """
    if not rows:
        return
    if statement is None:
        statement = _insert_missing(dialect_of(session), table)
    connection = await session.connection()
    # Every writer uses the order of the keys, so that two writers do not deadlock.
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
    """A page of rows older than ``before``, newest first by time and id (``key``), and the cursor of the next page.

    The cursor is None on the last page.
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
    """The number of rows that the statement changed or deleted."""
    return cast("CursorResult[Any]", await session.execute(statement)).rowcount


async def changed_past_orm(session: WriteSession, statement: Executable, **values: object) -> int:
    """``changed`` for a prebuilt statement with these parameters, without the ORM.

    The session must not have loaded the rows.
    """
    return (await (await session.connection()).execute(statement, values)).rowcount


async def select_in(
    session: ReadSession,
    query: Select[*_Columns],
    column: InstrumentedAttribute[Any],
    names: Sequence[str] | Sequence[bytes],
    **values: object,
) -> AsyncIterator[Row[*_Columns]]:
    """The rows of the query whose column is one of these names, of which there may be a million.

    ``values`` are the query's parameters. Build a frequent query once: building takes longer than running it.
    """
    narrowed = _narrowed(query, column)
    for batch in batches(names):
        for row in await session.execute(narrowed, {"names": batch, **values}):
            yield row


@lru_cache(maxsize=16)
def _narrowed(query: Select[*_Columns], column: InstrumentedAttribute[Any]) -> Select[*_Columns]:
    return query.where(column.in_(bindparam("names", expanding=True)))


async def delete_in(session: WriteSession, column: InstrumentedAttribute[str], names: Sequence[str]) -> None:
    for batch in batches(names):
        await session.execute(delete(column.class_).where(column.in_(batch)))


def batches(items: Sequence[_Item], size: int = _BATCH) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
