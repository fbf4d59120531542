"""The mirror's database: SQLite embedded, PostgreSQL in production; sessions that say whether they write."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NewType

from sqlalchemy import event, func, inspect, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from bdn.core.errors import StoreUnavailableError

HEAD: Final = "0005"  # the newest migration; a test compares it with the folder
MIGRATIONS: Final = Path(__file__).parents[2] / "migrations"

# Classes of SQLSTATE (PostgreSQL, appendix A): connection, lost a race, out of resources, not in the state for it,
# operator intervention. After all of them the same statement may succeed.
_AWAY: Final = ("08", "40", "53", "55", "57")

ReadSession = NewType("ReadSession", AsyncSession)
WriteSession = NewType("WriteSession", ReadSession)


class DatabaseUnavailableError(StoreUnavailableError):
    """The database does not answer, or not now."""


class DatabaseNotMigratedError(StoreUnavailableError):
    """The schema is not the one that this version needs."""


class Database:
    """One engine. Sessions are short: opened for one unit of work, committed or rolled back at the end of the block."""

    def __init__(self, url: str) -> None:
        self._is_sqlite = url.startswith("sqlite")
        self._engine = create_async_engine(url, **({} if self._is_sqlite else {"pool_size": 10, "max_overflow": 20}))
        self._writing = self._engine.execution_options(bdn_write=True)
        # SQLite has one writer. Waiting for it here is fair and cheap; waiting in SQLite is polling.
        self._sqlite_writer = asyncio.Lock()
        self._alone: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        if self._is_sqlite:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[ReadSession]:
        """A consistent look; nothing is ever committed."""
        with _mapped_errors():
            async with AsyncSession(self._engine, expire_on_commit=False) as session:
                yield ReadSession(session)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteSession]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        with _mapped_errors():
            if self._is_sqlite:
                async with (
                    self._sqlite_writer,
                    AsyncSession(self._writing, expire_on_commit=False) as session,
                    session.begin(),
                ):
                    yield WriteSession(ReadSession(session))
            else:
                async with AsyncSession(self._writing, expire_on_commit=False) as session, session.begin():
                    yield WriteSession(ReadSession(session))

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        """Nobody else is in a block of this name, in whatever process, until this one ends. Holds no transaction's locks."""
        async with self._alone[name]:
            if self._is_sqlite:
                yield
                return
            # The lock is the connection's, so that it ends with this process however that ends.
            async with AsyncExitStack() as stack:
                with _mapped_errors():
                    connection = await stack.enter_async_context(self._engine.connect())
                    await connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(f"bdn {name}"))))
                yield

    async def version(self) -> str | None:
        """The migration that the schema is at; None for an empty database."""
        with _mapped_errors():
            async with self._engine.connect() as connection:
                if not await connection.run_sync(lambda sync: inspect(sync).has_table("alembic_version")):
                    return None
                return (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar()

    async def check_version(self) -> None:
        """Refuse to work on a schema of another version."""
        version = await self.version()
        if version != HEAD:
            raise DatabaseNotMigratedError(
                f"the database is at migration {version}, this version needs {HEAD}; run 'bdn migrate'"
            )

    async def migrate(self) -> None:
        """Bring the schema to this version with the real migrations. Cheap when it is there already."""
        version = await self.version()
        if version == HEAD:
            return
        with _mapped_errors():
            async with self._engine.begin() as connection:
                if not await connection.run_sync(_upgrade):
                    raise DatabaseNotMigratedError(
                        f"the database is at migration {version}, which this version does not know; run a newer version"
                    )

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()


class _mapped_errors:  # noqa: N801 - reads like a function where it is used
    """Database failures become ours, around the whole block."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # IntegrityError is the callers' own: two requests made the same row.
        if isinstance(error, IntegrityError) or not isinstance(error, (SQLAlchemyError, OSError)):
            return
        reason = f"database: {type(error).__name__}: {error.args[0] if error.args else ''}"
        raise (DatabaseUnavailableError if _is_away(error) else StoreUnavailableError)(reason) from error


def _is_away(error: SQLAlchemyError | OSError) -> bool:
    """Whether the same statement may succeed later. An OSError is how a driver fails that finds no server."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, (OSError, PoolTimeoutError))
    state = str(getattr(error.orig, "sqlstate", None) or "")
    return error.connection_invalidated or state[:2] in _AWAY or isinstance(error, (OperationalError, InterfaceError))


def _upgrade(connection: Connection) -> bool:
    """False when the schema is at a migration that is not one of ours."""
    from alembic import command  # noqa: PLC0415 - 0.9 s to import, needed once in a database's life
    from alembic.config import Config  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError:
        return False
    return True


def _prepare_sqlite(connection: Any, _: object) -> None:  # noqa: ANN401 - the driver's own connection
    connection.isolation_level = None  # the driver must not begin transactions; we do, below
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=30000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that begins as a reader and writes later fails when another wrote meanwhile; IMMEDIATE waits instead.
    immediate = connection.get_execution_options().get("bdn_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
