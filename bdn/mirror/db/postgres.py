"""Connections to PostgreSQL on which nobody waits for ever: where a server says nothing, an error says so.

A server that hangs, or a network that swallows what is sent, resets nothing: only time tells. The limits are the driver's own, and
hold for connecting and for each statement; whatever exceeds one ends its connection, and all that lie in the pool with it.
"""

from typing import Any, Final

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

CONNECT_SECONDS: Final = 10.0
PING_SECONDS: Final = 3.0
# A statement. As with SQLite's turns, together with what else a request needs: less than clients wait for an answer.
STATEMENT_SECONDS: Final = 20.0
PATIENT_SECONDS: Final = 600.0  # one that may go through millions of rows

# The server forgets a client that has vanished, with its locks, after 30 s; its own default is two hours. Not as parameters of
# the connection's start, which a pooler between the two may refuse.
_PREPARE: Final = (
    "SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;"
    " SET tcp_user_timeout = 30000"
)


def open_postgres(url: str, *, statement_seconds: float) -> AsyncEngine:
    """An engine for ``postgresql+asyncpg``; nothing is connected yet."""
    limits = {"timeout": CONNECT_SECONDS, "command_timeout": statement_seconds}
    engine = create_async_engine(url, pool_size=10, max_overflow=20, connect_args=limits)
    event.listen(engine.sync_engine, "connect", _prepare)
    event.listen(engine.sync_engine, "checkout", _ping)
    event.listen(engine.sync_engine, "handle_error", _suspect_others)
    return engine


def _prepare(connection: Any, _: object) -> None:  # noqa: ANN401 - the dialect's own connection
    connection.run_async(lambda driver: driver.execute(_PREPARE))


def _ping(connection: Any, *_: object) -> None:  # noqa: ANN401
    """Before each use: a connection that died in the pool is replaced, and those beside it. ``pool_pre_ping`` knows no limit."""
    connection.run_async(_answer)


async def _answer(driver: Any) -> None:  # noqa: ANN401
    try:
        await driver.execute("SELECT 1", timeout=PING_SECONDS)
    # The last is one of which the server's farewell was half read.
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        driver.terminate()  # a farewell would wait for an answer, too
        raise InvalidatePoolError from error


def _suspect_others(failure: ExceptionContext) -> None:
    """SQLAlchemy ends a connection that gave no answer in time, and takes it for the only one."""
    failure.invalidate_pool_on_disconnect |= isinstance(failure.original_exception, TimeoutError)
