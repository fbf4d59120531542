"""Two replicas and two workers on one PostgreSQL and one bucket behind a proxy that balances: killed, or upgraded, under a mixed load."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from bdn.mirror.db.recall import HEAD
from bdn.mirror.ingest.worker import CLAIM_SECONDS, POLL_SECONDS
from tests.doubles.hub import Hub
from tests.support.crash.killed_replicas import LONGEST_SECONDS, under_load
from tests.support.crash.killing_cluster import Kills
from tests.support.promises.tally import FULL

pytest_plugins = ("tests.support.agent.fixtures", "tests.support.mirror.fixtures")
pytestmark = [
    pytest.mark.production,
    pytest.mark.skipif(not FULL, reason="make fault: each takes a minute and more"),
]


@pytest.mark.parametrize("seed", range(3))
async def test_whichever_process_or_connection_is_killed_every_request_ends_and_nothing_is_lost(
    hub: Hub, postgres_url: str, tmp_path: Path, seed: int
) -> None:
    kills, straight = Kills(100), postgres_url.replace("+asyncpg", "")
    load = under_load(tmp_path, hub, straight, seed, kills.enough.is_set)
    async with load as (replicas, users), asyncio.TaskGroup() as group:
        group.create_task(replicas.kill(Random(seed), kills))
        group.create_task(users.ask())
    longest = max(replicas.waits, default=0)
    print(f"{kills.done} kills; {users.told}; a mirror stood still for {longest:.1f} s at most")
    assert (users.lost, users.wrong) == ([], [])
    assert CLAIM_SECONDS + POLL_SECONDS < 20  # within which somebody goes on with what a killed worker had claimed


async def test_while_replicas_are_upgraded_one_after_the_other_every_request_ends_and_nothing_is_lost(
    hub: Hub, postgres_url: str, tmp_path: Path
) -> None:
    """The newer version needs an addition to the schema, and does not start without it; the one before does not know of it."""
    over, straight = asyncio.Event(), postgres_url.replace("+asyncpg", "")
    newer = f"{HEAD}.1"
    async with under_load(tmp_path, hub, straight, 0, over.is_set) as (replicas, users), asyncio.TaskGroup() as group:
        group.create_task(users.ask())
        await asyncio.to_thread(hub.log.wait_for_more, 100, LONGEST_SECONDS)
        await replicas.fetch("ALTER TABLE mirrors ADD COLUMN added TEXT")
        await replicas.fetch("ALTER TABLE mirror_sources ADD COLUMN added INTEGER NOT NULL DEFAULT 7")
        await replicas.fetch("UPDATE alembic_version SET version_num = $1", newer)
        await replicas.restart(f"from bdn.mirror.db import database; database.HEAD = {newer!r}\n")
        await asyncio.to_thread(hub.log.wait_for_more, 100, LONGEST_SECONDS)
        over.set()
    assert users.ended["READY"]
    assert (users.lost, users.wrong) == ([], [])
