"""Databases that are silent or locked, and work that one process does at a time."""

import asyncio
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text

from bdn.mirror.api import metrics
from bdn.mirror.db import chunks, postgres
from bdn.mirror.db import database as database_module
from bdn.mirror.db.database import ClaimExpiredError, Database
from bdn.mirror.db.errors import DatabaseUnavailableError
from bdn.mirror.ingest import worker
from bdn.mirror.upkeep import scrub
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.postgres import fetch
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, until
from tests.support.network.fault_proxy import ByteProxy
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [
    pytest.mark.promise("network"),
    pytest.mark.usefixtures("backend"),
    pytest.mark.embedded("it names its databases itself"),
]
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
    proxy: ByteProxy, url: str, limits: Callable[..., None], tally: Tally
) -> None:
    limits(PING_SECONDS=0.3)
    database = Database(url)
    for _ in range(times := at_scale(1, 10)):
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


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that looks at everything often."""
    for name, seconds in (("POLL_SECONDS", 0.02), ("RENEW_SECONDS", 0.05), ("CLAIM_SECONDS", 1.0)):
        monkeypatch.setattr(worker, name, seconds)
    monkeypatch.setattr(metrics, "PROBE_SECONDS", 0.4)


@pytest.mark.parametrize("how", ["cut", "refused", "silent"])
@pytest.mark.usefixtures("hasty", "upstreams")
async def test_a_database_that_goes_away_is_named_and_what_ran_goes_on_when_it_is_back(
    proxy: ByteProxy, url: str, limits: Callable[..., None], hub: Hub, tmp_path: Path, how: str, tally: Tally
) -> None:
    """As in a failover, when the server is stopped, or when packets are lost, and the network forgets the connections."""
    if how == "silent":
        limits(CONNECT_SECONDS=0.5, PING_SECONDS=0.3, STATEMENT_SECONDS=1.0)
    hub.repo("org/model").commit(FILES)
    hub.fail(stall(), origin="cdn", times=None)
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror", database_url=url) as mirror:
        begun = await mirror.begin(MODEL)
        await until(lambda: hub.log.count(origin="cdn"), "the copy has begun")
        if how == "cut":
            proxy.cut()
        elif how == "refused":
            proxy.close_port()
            await _all_refused(mirror, tally)
            proxy.open_port()
        else:
            proxy.is_parted = True
            await _all_refused(mirror, tally)
            proxy.forget()
            proxy.heal()
        hub.release_stalled()
        if how == "silent":
            assert (await mirror.http.get("/mirror")).is_success
        await readyz_says(mirror, '"ok"')  # the first answers after a failover may be of connections that are gone
        document = await mirror.ended(begun["id"])

        tally.add(scenarios=1, faults=1, lost=document["status"] != "READY")
        assert document["error"] is None
        tally.add(wrong=await mirror.tree(document["sources"][0]["manifest"]) != FILES)


async def _all_refused(mirror: MirrorUnderTest, tally: Tally) -> None:
    """More at once than the pool has connections: each is told which part is away, and that it may ask again."""
    beat = mirror.http.post("/agents/heartbeat", json=FakeAgent(mirror, "node").state)
    asked = [mirror.http.get("/mirror") for _ in range(30)] + [mirror.post(MODEL) for _ in range(10)]
    for answer in await asyncio.gather(*asked, beat):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["retryable"]) == (503, "STORE_UNAVAILABLE", True), error
    tally.add(refused=len(asked) + 1)
    readiness = await mirror.http.get("/readyz")
    assert (readiness.status_code, "database" in readiness.json()["error"]["message"]) == (503, True)


# --- Another process keeps the embedded database locked: what writes waits or says so, what reads goes on, and nothing is lost ---
LOCKED_SECONDS: Final = 60.0


RUNNING, ASKED = source("hf://org/running"), source("hf://org/asked")
LOCKED_FILES: Final = {
    "hf://org/running": {"w.bin": noise(17 * MIB + 3, 1)},
    "hf://org/asked": {"w.bin": noise(MIB, 2)},
}


@pytest.fixture
def stalled(upstreams: None, hub: Hub, hasty: None) -> None:
    """An upstream whose copies stand still."""
    for name, files in LOCKED_FILES.items():
        hub.repo(name.removeprefix("hf://")).commit(files)
    hub.fail(stall(), origin="cdn", times=None)


@asynccontextmanager
async def locked(mirror: MirrorUnderTest) -> AsyncIterator[None]:
    """As a backup does it, or an operator's shell that was left open."""
    path = mirror.data_dir / "mirror.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")  # the mirror may be writing, in this very loop
        yield
        other.execute("ROLLBACK")


async def readyz_says(mirror: MirrorUnderTest, words: str) -> None:
    """Sooner or later: a slow machine may first make it say something else."""
    while words not in (await mirror.http.get("/readyz")).text:  # noqa: ASYNC110 - its own clock decides, and the caller's deadline
        await asyncio.sleep(0.02)


async def whole(mirror: MirrorUnderTest, *ids: str) -> bool:
    """READY in the end, with the right files, and each asked for once."""
    documents = [await mirror.ended(mirror_id) for mirror_id in ids]
    parts = [(document["status"], document["sources"][0]) for document in documents]
    return len(ids) == mirror.count("mirrors") and all(
        [
            status == "READY" and await mirror.tree(part["manifest"]) == LOCKED_FILES[part["source"]]
            for status, part in parts
        ]
    )


@pytest.mark.usefixtures("stalled")
async def test_a_write_waits_for_a_lock_that_passes(hub: Hub, tmp_path: Path, tally: Tally) -> None:
    async with asyncio.timeout(LOCKED_SECONDS), mirror_under_test(tmp_path / "mirror") as mirror:
        running = await mirror.begin(RUNNING)
        await until(lambda: hub.log.count(origin="cdn"), "the copy has begun")
        async with locked(mirror):
            asked = asyncio.create_task(mirror.post(ASKED))
            hub.release_stalled()
            await readyz_says(mirror, "another process")
            seen = await mirror.http.get(f"/mirror/{running['id']}")
        answer = await asked

        tally.add(scenarios=1, faults=1, lost=not await whole(mirror, running["id"], answer.json()["id"]))
        assert (seen.status_code, answer.status_code) == (200, 202)
        await readyz_says(mirror, '"ok"')


@pytest.mark.usefixtures("stalled")
async def test_a_lock_that_stays_is_named_to_whoever_writes(
    hub: Hub, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to those who wait behind others; and the copy that ran goes on afterwards."""
    monkeypatch.setattr("bdn.mirror.db.database.WRITER_SECONDS", 0.5)
    async with asyncio.timeout(LOCKED_SECONDS), mirror_under_test(tmp_path / "mirror") as mirror:
        running = await mirror.begin(RUNNING)
        await until(lambda: hub.log.count(origin="cdn"), "the copy has begun")
        async with locked(mirror):
            hub.release_stalled()
            beat = mirror.http.post("/agents/heartbeat", json=FakeAgent(mirror, "node").state)
            answers = await asyncio.gather(beat, *(mirror.post(source(f"hf://org/m-{number}")) for number in range(10)))
            seen = await mirror.http.get("/mirror")
        asked = await mirror.begin(ASKED)

        tally.add(scenarios=12, faults=1, refused=11, lost=not await whole(mirror, running["id"], asked["id"]))
        assert seen.is_success
        assert any("other writes of this process" in answer.text for answer in answers)
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["retryable"]) == (503, "STORE_UNAVAILABLE", True)


# --- Work that one process does at a time; what two processes do at the same time is right all the same ---
NEVER: Final = 1000.0
END: Final = "UPDATE facts SET value = '{\"holder\": \"\", \"until\": 0}' WHERE name IN ('collections', 'eviction', 'store keeper')"
HOLDER: Final = """
import asyncio, sys
from bdn.mirror.db import database

async def main():
    database.CLAIM_SECONDS, database.RENEW_SECONDS = 1.0, 0.1
    mirror = database.Database(sys.argv[1])
    try:
        async with mirror.alone("work"):
            print("alone", flush=True)
            await asyncio.Event().wait()
    except database.ClaimExpiredError:
        print("lost", flush=True)
    await mirror.close()

asyncio.run(main())
"""


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    database = Database(postgres_url)
    yield database
    await database.close()


async def hold(database: Database, holding: asyncio.Event) -> None:
    async with database.alone("work"):
        holding.set()
        await asyncio.Event().wait()


async def test_alone__a_clock_that_is_set_back_after_a_release_does_not_delay_the_next_claim(postgres_url: str) -> None:
    now = [7200.0]
    database = Database(postgres_url, lambda: now[0])
    async with asyncio.timeout(LONGEST_SECONDS), database.alone("work"):
        pass
    now[0] = 3600.0
    async with asyncio.timeout(LONGEST_SECONDS), database.alone("work"):
        pass
    await database.close()


async def test_alone__a_holder_across_a_silent_network_stops_before_another_begins(
    proxy: ByteProxy, url: str, database: Database, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits()
    for name, seconds in (("CLAIM_SECONDS", 3.0), ("RENEW_SECONDS", 0.5)):
        monkeypatch.setattr(database_module, name, seconds)
    order: list[str] = []
    holding = asyncio.Event()

    async def second() -> None:
        async with database.alone("work"):
            order.append("the second began")

    far = Database(url)
    async with asyncio.timeout(LONGEST_SECONDS), asyncio.TaskGroup() as group:
        first = group.create_task(_until_lost(far, holding, order))
        await holding.wait()
        group.create_task(second())
        proxy.forget()
        await first
    await far.close()
    assert order == ["the first stopped", "the second began"]


async def _until_lost(database: Database, holding: asyncio.Event, order: list[str]) -> None:
    try:
        async with database.alone("work"):
            holding.set()
            try:
                await asyncio.Event().wait()
            finally:
                order.append("the first stopped")
    except DatabaseUnavailableError:
        return


async def test_alone__a_holder_whose_claim_was_taken_is_told(
    postgres_url: str, database: Database, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "RENEW_SECONDS", 0.05)
    holding = asyncio.Event()
    async with asyncio.timeout(LONGEST_SECONDS):
        work = asyncio.create_task(hold(database, holding))
        await holding.wait()
        await fetch(
            postgres_url, 'UPDATE facts SET value = \'{"holder": "other", "until": 1e12}\' WHERE name = \'work\''
        )
        with pytest.raises(ClaimExpiredError):
            await work
    tally.add(scenarios=1, faults=1, refused=1)


async def test_alone__a_stopped_process_loses_its_claim_and_is_told(postgres_url: str, database: Database) -> None:
    """As on a machine that sleeps: its connections live, and it sends nothing."""
    program = (sys.executable, "-c", HOLDER, postgres_url)
    holder = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            said = [await holder.stdout.readline()]
            holder.send_signal(signal.SIGSTOP)
            async with database.alone("work"):
                holder.send_signal(signal.SIGCONT)
                said.append(await holder.stdout.readline())
    finally:
        with suppress(ProcessLookupError):
            holder.kill()
        await holder.wait()
    assert said == [b"alone\n", b"lost\n"]


@asynccontextmanager
async def _without_claims(_: Database, _name: str) -> AsyncIterator[None]:
    """No claim: two processes work at once all the time, as after a lost claim."""
    yield


@pytest.mark.parametrize("how", ["without claims", "claims expire"])
async def test_work_of_one_process_at_a_time__done_by_two_at_once__loses_and_leaves_nothing(
    postgres_url: str,
    upstreams: None,
    hub: Hub,
    tmp_path: Path,
    how: str,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes scrub without a pause, collect and evict, beside mirrors."""
    monkeypatch.setattr(scrub, "_AWAY_SECONDS", 0.01)
    monkeypatch.setattr(database_module, "RENEW_SECONDS", 0.01)
    # What a collection without a claim leaves is put or deleted again after this time: longer than a deletion takes.
    monkeypatch.setattr(chunks, "DELETE_SECONDS", 3.0)
    if how == "without claims":
        monkeypatch.setattr(Database, "alone", _without_claims)
    files = {name: {"w.bin": noise(MIB, number), f"{name}.txt": b"small"} for number, name in enumerate("abc")}
    for name, content in files.items():
        hub.repo(f"org/{name}").commit({**content, "shared.bin": noise(MIB, 9)})
    async with (
        asyncio.timeout(4 * LONGEST_SECONDS),
        _worker(postgres_url, tmp_path, "one") as one,
        _worker(postgres_url, tmp_path, "two") as two,
    ):
        for turn in range(at_scale(1, 5)):
            pair = (one, two) if turn % 2 else (two, one)
            work = [asyncio.create_task(_tried(mirror, name)) for mirror in pair for name in files]
            asked = [await mirror.http.post("/collections", json={"grace_seconds": 0}) for mirror in pair]
            assert {answer.status_code for answer in asked} == {202}
            for _ in range(100 if how == "claims expire" else 0):
                await fetch(postgres_url, END)
                tally.add(faults=1)
            for document in await asyncio.gather(*work):
                tally.add(scenarios=1, lost=document["status"] != "READY")
        for name, content in files.items():
            document = await one.ready(source(f"hf://org/{name}"))
            found = await two.tree(document["sources"][0]["manifest"])
            tally.add(wrong=found != {**content, "shared.bin": noise(MIB, 9)})
        await one.evict(all=True)
        while any(path.is_file() for path in (tmp_path / "store/chunks").rglob("*")):
            await one.collect(grace_seconds=0)
            await two.collect(grace_seconds=0)


def _worker(url: str, root: Path, name: str) -> AbstractAsyncContextManager[MirrorUnderTest]:
    at_once: dict[str, Any] = {"tombstone_seconds": 0, "collect_grace_seconds": 0, "scrub_seconds": 0.001}
    return mirror_under_test(root / name, database_url=url, store=f"file://{root}/store", **at_once)


async def _tried(mirror: MirrorUnderTest, name: str) -> dict[str, Any]:
    """Evict, which fails after the claim is lost, and mirror, which never fails."""
    await mirror.http.post("/evictions", json={"source": f"hf://org/{name}", "tier": "mirror"})
    return await mirror.mirror(source(f"hf://org/{name}"))
