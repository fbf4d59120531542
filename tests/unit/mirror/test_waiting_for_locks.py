"""How a process waits for a lock of PostgreSQL that another one has."""

import asyncio
from typing import cast

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from bdn.mirror.db.postgres import lock_held


class Held:
    """An engine, and its one connection, where somebody else has the lock. Nothing is left of what it is told."""

    def connect(self) -> "Held":
        return self

    async def start(self) -> None:
        pass

    rollback = close = start

    async def execute(self, _: object) -> "Held":
        return self

    def one(self) -> tuple[str, bool]:
        return "", False


async def test_however_long_somebody_waits_he_asks_as_often_as_who_has_just_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock goes to who asks first when it is free: with pauses that grow without bound, the others' turn would never come."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 50:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        async with lock_held(cast(AsyncEngine, Held()), "a lock"):
            pass
    assert max(pauses) <= 2 * min(pauses)
