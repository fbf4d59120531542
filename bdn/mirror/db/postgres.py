"""Connections to PostgreSQL with a limit on every wait, and a lock that its holder trusts while the server confirms it.

A server that hangs, or a network that drops packets, resets nothing: only a timeout detects it. The limits are the
driver's own, for connecting and for each statement. A statement that exceeds its limit ends its connection and all idle
connections of the pool.

The lock belongs to a transaction, and so to a session: it ends with its holder, however the holder ends; also behind a
pooler, which assigns a session to each transaction. But a session may end before its holder does: by a failover, an
operator, or a broken network.

    A holds the lock; the network drops everything; A confirms in vain, and after ``BELIEF_SECONDS`` its work is
    canceled; after ``FORGOTTEN_SECONDS`` without a message from A the server ends the session; B acquires the lock.

When a server dies, its locks are gone at once, so B may begin while A's last step still runs. This process cannot rule
that out: work under a lock must be correct even when two processes do it at the same time, only more expensive.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import asyncpg
from sqlalchemy import URL, event, func, select, true
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import InvalidatePoolError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from bdn.core.errors import InvalidRequestError, single_error
from bdn.mirror.db.errors import DatabaseUnavailableError, mapped_errors

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


CONFIRM_SECONDS: Final = 1.0
BELIEF_SECONDS: Final = 10.0
FORGOTTEN_SECONDS: Final = 30.0
# Pause after the first attempt while another process holds the lock, and the longest pause: a process that tries less
# often would starve beside newcomers.
_ASK_SECONDS: Final = (0.5, 1.0)


class LockLostError(DatabaseUnavailableError):
    """The server has not confirmed the lock, or ended its session. Another process may hold it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"database: the lock {name!r} was lost")
        self.name = name


@asynccontextmanager
async def lock_held(engine: AsyncEngine, name: str) -> AsyncIterator[None]:
    """Hold the lock until the block ends, or is canceled because the lock was lost (``LockLostError``)."""
    connection = engine.connect()
    try:
        with mapped_errors():
            await connection.start()
            pause, longest = _ASK_SECONDS
            while not await _is_taken(connection, name):
                # Wait outside a transaction: behind a pooler each transaction holds one of the server's few sessions.
                await connection.rollback()
                await asyncio.sleep(pause)
                pause = min(longest, 1.5 * pause)
        async with _believing(connection, name):
            yield
    finally:
        # A broken connection has lost the lock anyway. Its failure must not replace a cancellation.
        with suppress(SQLAlchemyError, OSError):
            await connection.close()


@asynccontextmanager
async def _believing(connection: AsyncConnection, name: str) -> AsyncIterator[None]:
    belief = asyncio.timeout(BELIEF_SECONDS)
    try:
        async with belief:
            with single_error():
                async with asyncio.TaskGroup() as group:
                    confirming = group.create_task(_confirm(connection, belief))
                    yield
                    confirming.cancel()
    except TimeoutError:
        if not belief.expired():
            raise  # the block's own
        raise LockLostError(name) from None


async def _confirm(connection: AsyncConnection, belief: asyncio.Timeout) -> None:
    """Confirm the lock repeatedly. A confirmation counts from the moment of its request, not of its answer."""
    now = asyncio.get_running_loop().time
    with suppress(SQLAlchemyError, OSError):
        while not belief.expired():
            await asyncio.sleep(CONFIRM_SECONDS)
            asked = now()
            await connection.execute(select(true()))  # succeeds only while the session and its locks exist
            if not belief.expired():
                belief.reschedule(asked + BELIEF_SECONDS)
        return
    if not belief.expired():
        belief.reschedule(now())


async def _is_taken(connection: AsyncConnection, name: str) -> bool:
    """Try to acquire the lock, without a wait in the server.

    A wait that a limit ends is an error in the server's log; a wait without a limit never ends. The session timeout is
    set for this transaction alone, as the lock is: the next user of the session inherits neither.
    """
    forgotten = func.set_config("idle_in_transaction_session_timeout", f"{1000 * FORGOTTEN_SECONDS:.0f}ms", true())
    lock = func.pg_try_advisory_xact_lock(func.hashtext(f"bdn {name}"))
    return bool((await connection.execute(select(forgotten, lock))).one()[1])
