"""Connections to PostgreSQL on which nobody waits for ever, and a lock that its holder believes in while the server confirms it.

A server that hangs, or a network that swallows what is sent, resets nothing: only time tells. The limits are the driver's own, and
hold for connecting and for each statement; whatever exceeds one ends its connection, and all that lie in the pool with it.

The lock belongs to a transaction, and so to a session, so that it ends with its holder however that ends; also behind a pooler, which
leaves a session to a transaction. But a session may end before its holder does: in a failover, by an operator's hand, or because
the network between the two is gone.

    A holds the lock; the network swallows everything; A confirms in vain, and after ``BELIEF_SECONDS`` its work is canceled; after
    ``FORGOTTEN_SECONDS`` without a word from A the server ends the session; B has the lock.

A server that dies takes the lock with it at once, and so B may begin while A's last step still runs. Nothing can rule that out
from here: what is done under a lock has to be right beside another who does it, and costs more.
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
# A statement. As with SQLite's turns, together with what else a request needs: less than clients wait for an answer.
STATEMENT_SECONDS: Final = 20.0
PATIENT_SECONDS: Final = 600.0  # one that may go through millions of rows

# Behind a pooler in transaction mode each transaction has another session, and what is left there is found by others: no
# statement is prepared under a name, and nothing is set. Users know both options; each alone means a pooler.
_POOLED: Final = ("statement_cache_size", "prepared_statement_cache_size")

# The server forgets a client that has vanished, with its locks, after 30 s; its own default is two hours. Not as parameters of
# the connection's start, which a pooler between the two may refuse.
_PREPARE: Final = (
    "SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;"
    " SET tcp_user_timeout = 30000"
)


def connect_arguments(url: URL, *, statement_seconds: float) -> dict[str, Any]:
    """What ``asyncpg.connect`` takes for this address; ``InvalidRequestError`` names options that it has not."""
    options = {name: value for name, value in url.query.items() if name not in _POOLED}
    if any(url.query.get(name, "0") != "0" for name in _POOLED):
        raise InvalidRequestError(
            f"BDN_DATABASE_URL: {_POOLED[0]} is 0, for a pooler in transaction mode, or left away"
        )
    if unknown := options.keys() - inspect.signature(asyncpg.connect).parameters.keys():
        raise InvalidRequestError(f"BDN_DATABASE_URL has unknown options: {', '.join(sorted(unknown))}")
    _, arguments = PGDialect_asyncpg().create_connect_args(url.set(query=options))  # type: ignore[no-untyped-call]
    limits = {"timeout": CONNECT_SECONDS, "command_timeout": statement_seconds}
    return {**arguments, **limits, **({"statement_cache_size": 0} if is_pooled(url) else {})}


def is_pooled(url: URL) -> bool:
    """Whether this address is said to be that of a pooler in transaction mode."""
    return any(name in url.query for name in _POOLED)


def open_postgres(url: URL, *, statement_seconds: float) -> AsyncEngine:
    """An engine for ``postgresql+asyncpg``; nothing is connected yet. Raises what ``connect_arguments`` does."""
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


CONFIRM_SECONDS: Final = 1.0
BELIEF_SECONDS: Final = 10.0
FORGOTTEN_SECONDS: Final = 30.0
# Between the first two attempts while somebody else has it, and the longest time between two: whoever asks seldom would starve
# beside those who have just come.
_ASK_SECONDS: Final = (0.5, 1.0)


class LockLostError(DatabaseUnavailableError):
    """The server has not confirmed the lock, or has ended its session. Somebody else may have it."""

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
                # Who waits is in no transaction: behind a pooler each has a session of the server, of which there are few.
                await connection.rollback()
                await asyncio.sleep(pause)
                pause = min(longest, 1.5 * pause)
        async with _believing(connection, name):
            yield
    finally:
        # One that is gone has given up the lock, too. Its failure must not take the place of a cancellation.
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
    """A confirmation holds from the moment when it was asked for, not from that when it came."""
    now = asyncio.get_running_loop().time
    with suppress(SQLAlchemyError, OSError):
        while not belief.expired():
            await asyncio.sleep(CONFIRM_SECONDS)
            asked = now()
            await connection.execute(select(true()))  # comes back while the session lives, and with it its locks
            if not belief.expired():
                belief.reschedule(asked + BELIEF_SECONDS)
        return
    if not belief.expired():
        belief.reschedule(now())


async def _is_taken(connection: AsyncConnection, name: str) -> bool:
    """Ask for the lock, and do not wait in the server: a wait that a limit ends is an error in its log, one without never ends.

    The limit is this transaction's, as the lock is: nothing is left to whoever has the session next.
    """
    forgotten = func.set_config("idle_in_transaction_session_timeout", f"{1000 * FORGOTTEN_SECONDS:.0f}ms", true())
    lock = func.pg_try_advisory_xact_lock(func.hashtext(f"bdn {name}"))
    return bool((await connection.execute(select(forgotten, lock))).one()[1])
