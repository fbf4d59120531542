"""A lock of PostgreSQL's that its holder believes in only while the server confirms it.

It belongs to a session, so that it ends with its holder however that ends. But a session may end before its holder does: in a
failover, by an operator's hand, or because the network between the two is gone.

    A holds the lock; the network swallows everything; A confirms in vain, and after ``BELIEF_SECONDS`` its work is canceled; after
    ``FORGOTTEN_SECONDS`` without a word from A the server ends the session; B has the lock.

A server that dies takes the lock with it at once, and so B may begin while A's last step still runs. Nothing can rule that out
from here: what is done under a lock has to be right beside another who does it, and costs more.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from sqlalchemy import func, select, true
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from bdn.core.errors import single_error
from bdn.mirror.db.errors import DatabaseUnavailableError, mapped_errors

CONFIRM_SECONDS: Final = 1.0
BELIEF_SECONDS: Final = 10.0
FORGOTTEN_SECONDS: Final = 30.0
_ASK_SECONDS: Final = 0.5  # while somebody else has it


class LockLostError(DatabaseUnavailableError):
    """The server has not confirmed the lock, or has ended its session. Somebody else may have it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"database: the lock {name!r} was lost")
        self.name = name


@asynccontextmanager
async def lock_held(engine: AsyncEngine, name: str) -> AsyncIterator[None]:
    """Wait for the lock, and hold it until the block ends.

    Raises:
        LockLostError: the block was canceled, because the lock is not this session's any more.
        DatabaseUnavailableError: there is no server to take it from.
    """
    connection = engine.connect()
    try:
        with mapped_errors():
            await connection.start()
            while not await _is_taken(connection, name):  # noqa: ASYNC110 - who has it is elsewhere
                await asyncio.sleep(_ASK_SECONDS)
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
