"""Connections to SQLite, the embedded mirror's database."""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiosqlite
from sqlalchemy import URL, event
from sqlalchemy.engine import Connection, ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from bdn.disk.threads import ended

_PRIVATE: Final = 0o600
_ROWS: Final = 64  # that the driver fetches at once


def open_sqlite(url: URL, *, busy_seconds: float) -> AsyncEngine:
    """An engine for ``sqlite+aiosqlite``. SQLite waits ``busy_seconds`` for a lock of another process."""
    _make_private(Path(url.database or ""))
    options = {"async_creator_fn": _connected}
    engine = create_async_engine(url, pool_size=10, max_overflow=20, connect_args=options)
    event.listen(engine.sync_engine, "connect", partial(_prepare, busy_seconds))
    event.listen(engine.sync_engine, "begin", _begin)
    event.listen(engine.sync_engine, "handle_error", _keep)
    return engine


def _make_private(file: Path) -> None:
    """Close the database file to other users. SQLite gives its WAL and index the same mode.

    The engine reports failures.
    """
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
        try:
            os.fchmod(descriptor, _PRIVATE)
        finally:
            os.close(descriptor)


class _Driver(aiosqlite.Connection):
    """A connection that can be stopped more than once.

    SQLAlchemy closes a connection, and stops it if the task is canceled meanwhile. The close then stops it again, and
    would wait forever for a thread that has ended.
    """

    def __init__(self, connector: Callable[[], sqlite3.Connection], rows: int) -> None:
        super().__init__(connector, rows)
        self._thread.daemon = True  # as SQLAlchemy's own connections: an open one does not keep the process alive
        self._stopped: asyncio.Future[None] | None = None

    def stop(self) -> asyncio.Future[None] | None:
        if self._stopped is None:
            self._stopped = super().stop()
        return self._stopped


async def _connected(file: str, **options: Any) -> aiosqlite.Connection:  # noqa: ANN401 - of ``sqlite3.connect``
    """Connect. A cancellation or failure is raised once the driver's thread has ended.

    The thread reports to the event loop. If the loop ends sooner, the thread fails, and the connection stays open.
    """
    driver = _Driver(partial(sqlite3.connect, file, **options), _ROWS)
    connecting = asyncio.ensure_future(driver)
    try:
        return await asyncio.shield(connecting)
    except BaseException:
        await ended(connecting)
        if (stopped := driver.stop()) is not None:
            await ended(stopped)
        raise


def _prepare(busy_seconds: float, connection: Any, _: object) -> None:  # noqa: ANN401 - the driver's own connection
    connection.isolation_level = None  # the driver must not begin transactions; we do, below
    cursor = connection.cursor()
    busy = f"busy_timeout={1000 * busy_seconds:.0f}"
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", busy):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    # A transaction that reads first fails at its write if another one wrote meanwhile; IMMEDIATE waits instead.
    immediate = connection.get_execution_options().get("bdn_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _keep(context: ExceptionContext) -> None:
    """A canceled task rolls back in the driver's thread, once the current operation there has ended.

    SQLAlchemy would close the connection. SQLite ends a transaction with its connection only when no cursor is left,
    and the exception refers to one: the lock would be held for as long as the exception lives.
    """
    if isinstance(context.original_exception, asyncio.CancelledError):
        context.is_disconnect = False
