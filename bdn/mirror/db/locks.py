"""Advisory locks of PostgreSQL, which belong to a session."""

from __future__ import annotations

from sqlalchemy import func, select, true
from sqlalchemy.ext.asyncio import AsyncConnection


async def take(connection: AsyncConnection, name: str, forgotten_seconds: float) -> bool:
    """Ask for it, and do not wait in the server: a wait that a limit ends is an error in its log, and one without ends never.

    The limit is this transaction's, as the lock is: nothing is left to whoever has the session next.
    """
    forgotten = func.set_config("idle_in_transaction_session_timeout", f"{1000 * forgotten_seconds:.0f}ms", true())
    lock = func.pg_try_advisory_xact_lock(func.hashtext(f"bdn {name}"))
    return bool((await connection.execute(select(forgotten, lock))).one()[1])


async def confirm(connection: AsyncConnection) -> None:
    """Come back while the session lives, and with it its locks."""
    await connection.execute(select(true()))
