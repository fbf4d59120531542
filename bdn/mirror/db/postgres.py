"""Connections to PostgreSQL with a limit on every wait.

A server that hangs, or a network that drops packets, resets nothing: only a timeout detects it. The limits are the
driver's own, for connecting and for each statement. A statement that exceeds its limit ends its connection and all idle
connections of the pool.
"""

import inspect
from typing import Any, Final

import asyncpg
from sqlalchemy import URL, event
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from bdn.core.errors import InvalidRequestError

CONNECT_SECONDS: Final = 10.0
PING_SECONDS: Final = 3.0
# One statement. As with SQLite's turns: together with the other steps of its request, less than the clients' timeout.
STATEMENT_SECONDS: Final = 20.0
PATIENT_SECONDS: Final = 600.0  # a statement that may scan millions of rows

# Behind a pooler in transaction mode each transaction has another session, and other clients inherit its state:
# so no statement is prepared under a name, and nothing is set. Users know both options; each alone means a pooler.
_POOLED: Final = ("statement_cache_size", "prepared_statement_cache_size")

# The server drops a vanished client and its locks after 30 s; its own default is two hours. Not as startup parameters,
# which a pooler may reject.
_PREPARE: Final = (
    "SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;"
    " SET tcp_user_timeout = 30000"
)


def connect_arguments(url: URL, *, statement_seconds: float) -> dict[str, Any]:
    """The arguments of ``asyncpg.connect`` for this address. ``InvalidRequestError`` names options that it lacks."""
    options = {name: value for name, value in url.query.items() if name not in _POOLED}
    if any(url.query.get(name, "0") != "0" for name in _POOLED):
        raise InvalidRequestError(
            f"BDN_DATABASE_URL: {_POOLED[0]} has to be 0, for a pooler in transaction mode, or left out"
        )
    if unknown := options.keys() - inspect.signature(asyncpg.connect).parameters.keys():
        raise InvalidRequestError(f"BDN_DATABASE_URL has unknown options: {', '.join(sorted(unknown))}")
    _, arguments = PGDialect_asyncpg().create_connect_args(url.set(query=options))  # type: ignore[no-untyped-call]
    limits = {"timeout": CONNECT_SECONDS, "command_timeout": statement_seconds}
    return {**arguments, **limits, **({"statement_cache_size": 0} if is_pooled(url) else {})}


def is_pooled(url: URL) -> bool:
    """Whether the options of this address say that it is a pooler in transaction mode."""
    return any(name in url.query for name in _POOLED)


def open_postgres(url: URL, *, statement_seconds: float) -> AsyncEngine:
    """An engine for ``postgresql+asyncpg``, not connected yet. Raises as ``connect_arguments``."""
    arguments = connect_arguments(url, statement_seconds=statement_seconds)
    if has_pooler := is_pooled(url):
        arguments |= {"prepared_statement_cache_size": 0, "prepared_statement_name_func": str}  # always ""
    engine = create_async_engine(url.set(query={}), pool_size=10, max_overflow=20, connect_args=arguments)
    if not has_pooler:
        event.listen(engine.sync_engine, "connect", _prepare)
    event.listen(engine.sync_engine, "checkout", _ping)
    event.listen(engine.sync_engine, "handle_error", _suspect_others)
    return engine


def _prepare(connection: Any, _: object) -> None:  # noqa: ANN401 - the dialect's own connection
    connection.run_async(lambda driver: driver.execute(_PREPARE))


def _ping(connection: Any, *_: object) -> None:  # noqa: ANN401
    """Before each use: replace a connection that died in the pool, and the idle ones beside it.

    ``pool_pre_ping`` has no time limit.
    """
    connection.run_async(_answer)


async def _answer(driver: Any) -> None:  # noqa: ANN401
    try:
        await driver.execute("SELECT 1", timeout=PING_SECONDS)
    # InternalClientError: the server's last message was read in part only.
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        driver.terminate()  # a graceful close would wait for an answer, too
        raise InvalidatePoolError from error


def _suspect_others(failure: ExceptionContext) -> None:
    """After a timeout invalidate the whole pool: SQLAlchemy would replace that one connection only."""
    failure.invalidate_pool_on_disconnect |= isinstance(failure.original_exception, TimeoutError)
