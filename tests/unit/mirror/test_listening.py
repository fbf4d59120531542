"""When a process tries to hear what others change in PostgreSQL, and when it looks by itself."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from bdn.mirror.db import listening
from bdn.mirror.db.clock import DatabaseClock
from bdn.mirror.db.listening import Listening
from bdn.mirror.db.waiting import Watch, in_background

LOOKS = 20


class Pooled:
    """A database behind a pooler: whoever listens hears nothing. Counts who listens, and looks."""

    def __init__(self) -> None:
        self.listened = self.looked = 0

    async def listen(self, **_: object) -> "Pooled":
        self.listened += 1
        return self

    @asynccontextmanager
    async def connect(self) -> AsyncIterator["Pooled"]:
        self.looked += 1
        yield self

    begin = connect

    async def execute(self, *_: object) -> "Pooled":
        return self

    def scalar_one(self) -> float:
        return 1.0

    async def add_listener(self, *_: object) -> None:
        pass

    remove_listener = add_listener

    def terminate(self) -> None:
        pass

    def add_termination_listener(self, _: object) -> None:
        pass

    async def look_often(self) -> None:
        enough = self.looked + LOOKS
        while self.looked < enough:  # noqa: ASYNC110 - what is under test polls
            await asyncio.sleep(0.001)


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> Pooled:
    monkeypatch.setattr(listening, "ECHO_SECONDS", 0.0)
    monkeypatch.setattr(listening, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(listening, "_AWAY_SECONDS", (0.0, 0.0))
    pooled = Pooled()
    monkeypatch.setattr(asyncpg, "connect", pooled.listen)
    return pooled


def hearing(pooled: Pooled, arguments: dict[str, Any] | None, watch: Watch) -> Listening:
    return Listening(cast(AsyncEngine, pooled), arguments, watch, "me", DatabaseClock(lambda: 0.0))


async def test_a_process_that_does_not_hear_itself_tries_once_more_and_then_seldom(pooled: Pooled) -> None:
    async with asyncio.timeout(60), in_background(hearing(pooled, {}, Watch()).keep()):
        while pooled.listened < 2:  # noqa: ASYNC110 - what is under test polls
            await asyncio.sleep(0.001)
        await pooled.look_often()
    assert pooled.listened == 2


async def test_through_a_pooler_nobody_listens_and_everybody_is_looked_for(
    pooled: Pooled, caplog: pytest.LogCaptureFixture
) -> None:
    """A pooler would keep what a LISTEN leaves in a session, and give it to others."""
    watch = Watch()
    assert math.isinf(watch.others_within)
    async with asyncio.timeout(60), in_background(hearing(pooled, None, watch).keep()):
        await pooled.look_often()
    assert pooled.listened == 0
    assert watch.others_within == 0.001
    (record,) = caplog.records
    assert "BDN_DATABASE_LISTEN_URL" in record.getMessage()
