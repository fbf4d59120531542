"""Notifies the waiters of this process of changes that other processes make in PostgreSQL.

``NOTIFY`` is part of the transaction that makes the change, so a waiter wakes only once it can read the change. One
connection of each process listens.

    The connection is lost: notifications are missed; so once a new connection listens, all waiters wake and read again.
    Nothing arrives on it, because a pooler in transaction mode gives each transaction another session: the address says
    so, or our own notification does not arrive. Then, and while the connection is lost, one query a second polls for
    all waiters.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import asyncpg
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from bdn.mirror.db.clock import DatabaseClock
from bdn.mirror.db.waiting import Watch

logger = logging.getLogger(__name__)

CHANNEL: Final = "bdn"
POLL_SECONDS: Final = 1.0
ECHO_SECONDS: Final = 5.0
_PING_SECONDS: Final = 5.0  # between two checks that the connection lives
_AWAY_SECONDS: Final = (0.5, 10.0)  # pause before the first new attempt, and the longest pause
_DEAF_SECONDS: Final = 600.0  # pause after no notification arrived

_NOTIFY: Final = text("SELECT pg_notify(:channel, payload) FROM unnest(CAST(:payloads AS text[])) AS payload")
_TIME: Final = "SELECT extract(epoch FROM clock_timestamp())::float8"
# ``xmin`` differs after each change of a row. Topics begin with the id of a row, or match no row.
_VERSIONS: Final = text(
    "WITH waiting AS (SELECT unnest(CAST(:ids AS text[])) AS id)"
    " SELECT id, mirrors.xmin::text FROM mirrors JOIN waiting USING (id)"
    " UNION ALL SELECT id, mirror_sources.xmin::text FROM mirror_sources JOIN waiting ON mirror_id = id"
    " UNION ALL SELECT id, operations.xmin::text FROM operations JOIN waiting USING (id)"
    " UNION ALL SELECT id, operation_parts.xmin::text FROM operation_parts JOIN waiting ON operation = id WHERE cluster = ''"
)
_FAILURES: Final = (
    OSError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    SQLAlchemyError,
)

_NOT_HEARD: Final = "no notifications of other processes' changes: %s. Polling once a second; set BDN_DATABASE_LISTEN_URL to PostgreSQL itself, past the pooler"


class _DeafError(Exception):
    """The connection lives, but no notification arrives on it."""


async def tell_others(connection: AsyncConnection, teller: str, topics: Iterable[str]) -> None:
    """Notify other processes once the transaction is committed.

    ``teller`` names this process, which notifies its own waiters itself.
    """
    payloads = [f"{teller} {topic}" for topic in topics]  # an id, or the names of an agent: far below 8000 bytes
    await connection.execute(_NOTIFY, {"channel": CHANNEL, "payloads": payloads})


async def ask_time(connection: AsyncConnection, clock: DatabaseClock) -> None:
    asked_at = clock.elapsed()
    clock.set((await connection.execute(text(_TIME))).scalar_one(), asked_at)


class Listening:
    """The one connection of this process that listens.

    Args:
        engine: of the database; sends a notification to this process itself, and polls.
        arguments: of ``asyncpg.connect`` for the connection that listens; None if there is only a pooler in transaction
            mode: a LISTEN would stay in a session that other clients get next, and nothing would arrive.
        watch: the waiters of this process.
        teller: as in ``tell_others``.
        clock: is set by each answer to a ping.
    """

    def __init__(
        self, engine: AsyncEngine, arguments: dict[str, Any] | None, watch: Watch, teller: str, clock: DatabaseClock
    ) -> None:
        self._engine = engine
        self._arguments = arguments
        self._watch = watch
        self._teller = teller
        self._clock = clock
        self._pause = _AWAY_SECONDS[0]
        self._deaf_times = 0  # since a notification arrived

    async def keep(self) -> None:
        """Runs forever. ``Watch.others_within`` says how soon changes by other processes are known."""
        longest = _AWAY_SECONDS[1]
        if self._arguments is None:
            logger.warning(_NOT_HEARD, "BDN_DATABASE_URL names a pooler in transaction mode")
            await self._look(math.inf)
            return
        while True:
            try:
                await self._listen(self._arguments)
            except _DeafError:
                self._deaf_times += 1
                if self._deaf_times > 1:  # once may be a database under load
                    self._pause = _DEAF_SECONDS
                if self._deaf_times == 2:
                    logger.warning(
                        _NOT_HEARD,
                        "none arrives on the LISTEN connection, perhaps because of a pooler in transaction mode",
                    )
            except _FAILURES as error:
                logger.warning(
                    "LISTEN connection to PostgreSQL lost; polling once a second until it is back",
                    extra={"error": f"{type(error).__name__}: {error}"},
                )
            await self._look(self._pause)
            self._pause = min(longest, 2 * self._pause)

    async def _listen(self, arguments: dict[str, Any]) -> None:
        connection = await asyncpg.connect(**arguments, server_settings={"application_name": f"{CHANNEL} listens"})
        echo, lost = asyncio.Event(), asyncio.Event()

        def hear(_connection: object, _pid: int, _channel: str, payload: str) -> None:
            teller, _, topic = payload.partition(" ")
            if teller != self._teller:
                self._watch.notify(topic)
            elif not topic:
                echo.set()

        try:
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(CHANNEL, hear)
            async with self._engine.begin() as others:
                await tell_others(others, self._teller, [""])
            try:
                async with asyncio.timeout(ECHO_SECONDS):
                    await echo.wait()
            except TimeoutError:
                await connection.remove_listener(CHANNEL, hear)
                raise _DeafError from None
            self._pause, self._deaf_times, self._watch.others_within = _AWAY_SECONDS[0], 0, 0.0
            self._watch.notify_all()
            logger.info("listening for other processes' changes")
            while True:
                asked_at = self._clock.elapsed()
                self._clock.set(await connection.fetchval(_TIME, timeout=_PING_SECONDS), asked_at)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PING_SECONDS):
                        await lost.wait()
                        raise ConnectionResetError("the LISTEN connection was closed")
        finally:
            self._watch.others_within = math.inf
            connection.terminate()

    async def _look(self, seconds: float) -> None:
        """Poll once a second for all waiters, for so long."""
        ends = time.monotonic() + seconds
        seen: dict[str, list[str]] = {}
        while (left := ends - time.monotonic()) > 0:
            try:
                seen = await self._wake(seen)
                self._watch.others_within = POLL_SECONDS
            except _FAILURES:  # the waiters' own reads fail and report it
                self._watch.others_within = math.inf
            await asyncio.sleep(min(left, POLL_SECONDS))

    async def _wake(self, before: dict[str, list[str]]) -> dict[str, list[str]]:
        """Wake the waiters of rows that differ from ``before``; and new waiters, once. Returns the rows' versions."""
        waiting: dict[str, list[str]] = {}
        for name in self._watch.names():
            waiting.setdefault(name.partition(" ")[0], []).append(name)
        now: dict[str, list[str]] = {}
        async with self._engine.connect() as connection:
            if self._clock.is_old():
                await ask_time(connection, self._clock)
            if waiting:
                for row_id, version in await connection.execute(_VERSIONS, {"ids": list(waiting)}):
                    now.setdefault(row_id, []).append(version)
        for row_id, versions in now.items():
            if sorted(versions) != before.get(row_id):
                for name in waiting[row_id]:
                    self._watch.notify(name)
            versions.sort()
        return now
