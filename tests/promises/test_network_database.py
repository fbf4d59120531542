"""Between the mirror and PostgreSQL everything falls silent, and nothing is reset: whoever waits is told, and it passes by itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text

from bdn.mirror.api import control
from bdn.mirror.db import postgres
from bdn.mirror.db.database import Database
from bdn.mirror.db.errors import DatabaseUnavailableError
from bdn.mirror.ingest import worker
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.agent.rig import MIB, noise
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, until
from tests.support.network.fault_proxy_bytes import ByteProxy
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("network")
pytest_plugins = ("tests.support.mirror.fixtures",)

LONGEST_SECONDS: Final = 30.0
FILES: Final = {"w.bin": noise(3 * MIB, 1)}
MODEL: Final = source("hf://org/model")
POOLED: Final = 5


@pytest.fixture
async def proxy(postgres_url: str) -> AsyncIterator[ByteProxy]:
    """In front of the server; the database is migrated."""
    server = urlsplit(postgres_url)
    proxy = ByteProxy((server.hostname or "", server.port or 0))
    with proxy.running():
        yield proxy


@pytest.fixture
def url(proxy: ByteProxy, postgres_url: str) -> str:
    """Through the proxy."""
    return postgres_url.replace(f":{proxy.target[1]}/", f":{proxy.port}/")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Shorter than in life; those that are not named are of no help within the test's time."""

    def set_limits(**seconds: float) -> None:
        for name in ("CONNECT_SECONDS", "PING_SECONDS", "STATEMENT_SECONDS"):
            monkeypatch.setattr(postgres, name, seconds.get(name, 10 * LONGEST_SECONDS))

    return set_limits


async def look(database: Database, statement: str = "SELECT 1") -> None:
    async with database.read() as session:
        await session.execute(text(statement))


async def write_while(database: Database, forget: Callable[[], None]) -> None:
    async with database.write() as session:
        await session.execute(text("SELECT 1"))
        forget()
        await session.execute(text("SELECT 1"))


async def fill_pool(database: Database) -> None:
    """Leave connections in it, all of which have worked."""
    await asyncio.gather(*(look(database, "SELECT pg_sleep(0.1)") for _ in range(POOLED)))


async def test_connections_that_died_silently_in_the_pool_cost_no_request(
    proxy: ByteProxy, url: str, limits: Callable[..., None], tally: Tally, scale: Scale
) -> None:
    limits(PING_SECONDS=0.3)
    database = Database(url)
    for _ in range(times := scale.of(1, 10)):
        await fill_pool(database)
        proxy.forget()
        async with asyncio.timeout(LONGEST_SECONDS):
            await asyncio.gather(*(look(database) for _ in range(2 * POOLED)))
    await database.close()
    tally.add(scenarios=times, faults=times * POOLED)


async def test_a_statement_that_is_not_answered_ends_and_nobody_asks_its_neighbours(
    proxy: ByteProxy, url: str, limits: Callable[..., None], tally: Tally
) -> None:
    """Not even to find out whether they are alive: here that would take longer than the test."""
    limits(STATEMENT_SECONDS=0.5)
    database = Database(url)
    await fill_pool(database)
    async with asyncio.timeout(LONGEST_SECONDS):
        with pytest.raises(DatabaseUnavailableError, match="no answer in time") as caught:
            await write_while(database, proxy.forget)
        await asyncio.gather(*(look(database) for _ in range(POOLED)))
    await database.close()
    tally.add(scenarios=1, faults=POOLED, refused=1, wrong=not caught.value.transient)


async def test_a_server_that_lets_in_and_says_nothing_is_not_waited_for(
    proxy: ByteProxy, url: str, limits: Callable[..., None], tally: Tally
) -> None:
    limits(CONNECT_SECONDS=0.5)
    database = Database(url)
    proxy.is_parted = True
    async with asyncio.timeout(LONGEST_SECONDS):
        for ask in (database.version, lambda: look(database)):
            with pytest.raises(DatabaseUnavailableError, match="no answer in time"):
                await ask()
        proxy.heal()
        await look(database)
    await database.close()
    tally.add(scenarios=2, faults=2, refused=2)


async def test_a_mirror_whose_database_falls_silent_says_so_and_goes_on_without_a_restart(
    proxy: ByteProxy,
    url: str,
    limits: Callable[..., None],
    upstreams: None,
    hub: Hub,
    tmp_path: Path,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of a mirror; afterwards the network forgets the connections that were there, as networks do."""
    limits(CONNECT_SECONDS=0.5, PING_SECONDS=0.3, STATEMENT_SECONDS=1.0)
    monkeypatch.setattr(control, "PROBE_SECONDS", 0.4)
    for name, seconds in (("POLL_SECONDS", 0.02), ("RENEW_SECONDS", 0.05), ("CLAIM_SECONDS", 1.0)):
        monkeypatch.setattr(worker, name, seconds)
    hub.repo("org/model").commit(FILES)
    hub.fail(stall(), origin="cdn", times=None)
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror", database_url=url) as mirror:
        begun = await mirror.begin(MODEL)
        await until(lambda: hub.log.count(origin="cdn"), "the copy has begun")
        proxy.is_parted = True
        refused = await _all_refused(mirror)
        readiness = (await mirror.http.get("/readyz")).json()["error"]
        proxy.forget()
        proxy.heal()
        hub.release_stalled()
        listed = await mirror.http.get("/mirror")
        is_ready = (await mirror.http.get("/readyz")).status_code == 200
        document = await mirror.ended(begun["id"])

        tally.add(scenarios=1, faults=1, refused=refused, lost=(document["status"] != "READY") + (not is_ready))
        tally.add(wrong=await mirror.tree(document["sources"][0]["manifest"]) != FILES)
    assert "database" in readiness["message"]
    assert listed.status_code == 200


async def _all_refused(mirror: MirrorUnderTest) -> int:
    """More at once than the pool has connections: each is told that it may ask again."""
    asked = [mirror.http.get("/mirror") for _ in range(30)] + [mirror.post(MODEL) for _ in range(10)]
    answers = await asyncio.gather(*asked)
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["retryable"]) == (503, "STORE_UNAVAILABLE", True), error
    return len(answers)
