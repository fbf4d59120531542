"""Many processes of a mirror on one PostgreSQL, straight and through PgBouncer: waiters at one see what another changes."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg
import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.mirror.db import chunks, mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.ingest import worker
from bdn.wire.grants import new_signing_key
from bdn.wire.mirror_schema import Mirror
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.content.names import named
from tests.support.crash.killing_cluster import check_whole
from tests.support.mirror.backends import write_keys
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.postgres import fetch
from tests.support.mirror.process import SERVE, ServingProcess
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, statements_of, until
from tests.support.services.forked import executed

pytest_plugins = ("tests.support.mirror.fixtures",)

LARGE: Final = GeneratedContent(3 * CHUNK_SIZE + 1)
MODEL: Final = source("hf://org/model")
INTERVAL_SECONDS: Final = 0.9
OLD_SECONDS: Final = 0.4  # a read may be
LONGEST_SECONDS: Final = 90.0
ORGANISATION: Final = "default"
MINUTES: Final = 300.0  # by which clocks differ


@pytest.fixture(autouse=True)
def model(hub: Hub, upstreams: None) -> None:
    hub.repo("org/model").commit({"model.safetensors": LARGE, "config.json": b"{}"})
    hub.repo("org/other").commit({"other.bin": LARGE})


@dataclass(frozen=True)
class Way:
    """How the processes reach the database: the settings for it, and how the test does."""

    settings: dict[str, Any]
    straight: str

    async def fetch(self, query: str) -> list[Any]:
        """A look starts a process of the server: who looks until he sees something leaves time for what he waits for."""
        await asyncio.sleep(0.05)
        return await fetch(self.straight, query)

    def beside(self, tmp_path: Path, name: str, **options: Any) -> AbstractAsyncContextManager[MirrorUnderTest]:
        """One of several processes of a mirror: its own data directory, the same database and store."""
        return mirror_under_test(tmp_path / name, store=f"file://{tmp_path}/store", **self.settings, **options)


@pytest.fixture(params=["straight", "pooler"])
def way(request: pytest.FixtureRequest, postgres_url: str) -> Way:
    straight = postgres_url.replace("+asyncpg", "")
    if request.param == "straight":
        return Way({"database_url": straight}, straight)
    server = request.getfixturevalue("pgbouncer_server")
    pooled = f"{server}{urlsplit(straight).path}?statement_cache_size=0"
    return Way({"database_url": pooled}, straight)


async def followed(replica: MirrorUnderTest, mirror_id: str, seen: list[Mirror]) -> None:
    """As the server-sent events are made."""
    async for mirror in replica.service.requests.follow(mirror_id, ORGANISATION, INTERVAL_SECONDS):
        seen.append(mirror)


async def test_replicas__waiters_at_one_see_what_another_changes(way: Way, tmp_path: Path, hub: Hub) -> None:
    hub.fail(stall(), origin="cdn", skip=2, times=None)
    async with (
        asyncio.timeout(LONGEST_SECONDS),
        way.beside(tmp_path, "asks", work=False) as asks,
        way.beside(tmp_path, "waits", work=False) as waits,
        way.beside(tmp_path, "works"),
        asyncio.TaskGroup() as group,
    ):
        begun = (await asks.begin(MODEL))["id"]
        seen: list[Mirror] = []
        following = group.create_task(followed(waits, begun, seen))
        waited = group.create_task(waits.http.get(f"/mirror/{begun}?wait=60"))
        await until(lambda: seen and 0 < seen[-1].bytes_transferred < LARGE.size, "progress of another's work")
        hub.release_stalled()
        await following
        document = (await waited).json()
        assert (document["status"], seen[-1].status) == ("READY", "READY")
        tree = await waits.tree(document["sources"][0]["manifest"])
        assert tree == {"model.safetensors": LARGE.read(0, LARGE.size), "config.json": b"{}"}

        # Who cancels, who waits and who works are three processes.
        hub.fail(stall(), origin="cdn", times=None)
        begun = (await asks.begin(source("hf://org/other")))["id"]
        waited = group.create_task(asks.http.get(f"/mirror/{begun}?wait=60"))
        while not await way.fetch("SELECT 1 FROM mirrors WHERE claimed_by IS NOT NULL"):
            pass
        await waits.canceled(begun)
        assert (await waited).json()["status"] == "CANCELED"
        hub.release_stalled()
        while await way.fetch("SELECT 1 FROM mirrors WHERE claimed_by IS NOT NULL"):
            pass

        # A collection is carried out by the worker, and waited for elsewhere.
        assert (await waits.collect(grace_seconds=0))["status"] == "DONE"


@pytest.mark.promise("load")
@pytest.mark.parametrize("way", ["straight"], indirect=True)
async def test_replicas__all_watchers_of_a_mirror_share_its_reads(way: Way, tmp_path: Path) -> None:
    async with asyncio.timeout(LONGEST_SECONDS), way.beside(tmp_path, "shows", work=False) as shows:
        begun = (await shows.begin(MODEL))["id"]
        seen: list[list[Mirror]] = [[] for _ in range(500)]

        def reads(statements: list[str]) -> int:
            return sum("FROM mirrors" in statement for statement in statements)

        async with asyncio.TaskGroup() as group:
            started = time.monotonic()
            with statements_of(shows) as statements:
                for each in seen:
                    group.create_task(followed(shows, begun, each))
                await until(lambda: all(seen))
                database = Database(way.straight)  # as another process
                async with database.write() as session:
                    await mirrors.update_source(session, begun, 0, bytes_total=5)
                await until(lambda: all(each[-1].sources[0].bytes_total == 5 for each in seen))
                async with database.write() as session:
                    await mirrors.finish(session, begun, "CANCELED", now=time.time())
                await database.close()
        assert reads(statements) <= 2 + (time.monotonic() - started) / OLD_SECONDS
        assert {each[-1].status for each in seen} == {"CANCELED"}


# --- Who is killed ---
_SOONER: Final = (
    "from bdn.mirror.db import database; from bdn.mirror.ingest import worker; "
    "worker.CLAIM_SECONDS, worker.RENEW_SECONDS = database.CLAIM_SECONDS, database.RENEW_SECONDS = 2.0, 0.4"
)
# The claims of one that is killed expire sooner.
HASTY: Final = (sys.executable, "-c", f"{_SOONER}; from bdn.cli.main import main; main()", "serve", "--json")


async def holder(way: Way, name: str) -> str | None:
    """The holder of a claim that has not expired."""
    rows = await way.fetch(
        f"SELECT value->>'holder' AS holder FROM facts WHERE name = '{name}'"
        " AND (value->>'until')::float8 > extract(epoch FROM now())"
    )
    return rows[0]["holder"] if rows else None


@pytest.mark.parametrize("way", ["straight", "pooler"], indirect=True)
async def test_what_a_killed_process_did_alone_another_goes_on_with(way: Way, tmp_path: Path, hub: Hub) -> None:
    """It mirrors, collects, and keeps the store."""
    environ = {
        "BDN_DATABASE_URL": way.settings["database_url"],
        "BDN_STORE": f"file://{tmp_path}/store",
        "BDN_GRANT_KEY_FILE": str(write_keys(tmp_path / "grant-keys.pem", new_signing_key())),
    }
    hub.fail(stall(), origin="cdn", skip=1, times=None)
    async with (
        asyncio.timeout(LONGEST_SECONDS),
        await ServingProcess.start(tmp_path / "killed", command=HASTY, **environ) as killed,
    ):
        begun = await killed.begin(MODEL)
        await until(lambda: hub.log.count(origin="cdn") > 1, "the copy has begun")
        hold = await asyncpg.connect(way.straight)
        await hold.execute("BEGIN; LOCK TABLE manifests IN ACCESS EXCLUSIVE MODE")  # no collection comes to its end
        collection = (await killed.http.post("/collections", json={"grace_seconds": 0})).json()["id"]
        while not ((keeper := await holder(way, "store keeper")) and await holder(way, "collections")):
            pass
        async with await ServingProcess.start(tmp_path / "other", command=HASTY, **environ) as other:
            await killed.end(signal.SIGKILL)
            await hold.close()
            hub.release_stalled()
            document = await other.ended(begun)
            collected = (await other.http.get(f"/collections/{collection}", params={"wait": 60})).json()
            assert (document["status"], collected["status"]) == ("READY", "DONE")
            while await holder(way, "store keeper") in (None, keeper):
                pass
            assert await other.end(signal.SIGTERM) == 0


async def test_a_database_is_migrated_through_a_pooler(empty_postgres_url: str, pgbouncer_server: str) -> None:
    database = Database(f"{pgbouncer_server}{urlsplit(empty_postgres_url).path}?statement_cache_size=0")
    await database.migrate()
    await database.check_version()
    await database.close()


# --- Clocks ---
@pytest.fixture
async def ahead(way: Way, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with way.beside(tmp_path, "ahead", clock=lambda: time.time() + MINUTES) as mirror:
        yield mirror


@pytest.fixture
async def behind(way: Way, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with way.beside(tmp_path, "behind", clock=lambda: time.time() - MINUTES) as mirror:
        yield mirror


@pytest.mark.parametrize("way", ["straight"], indirect=True)
async def test_processes_whose_clocks_differ_by_minutes_take_each_other_for_living(
    way: Way, ahead: MirrorUnderTest, behind: MirrorUnderTest, hub: Hub
) -> None:
    hub.fail(stall(), origin="cdn", times=None)
    for here, there in ((ahead, behind), (behind, ahead)):
        node = here.data_dir.name
        agent, same = FakeAgent(here, node), FakeAgent(there, node)
        await agent.beat()
        assert {one["node"]: one["alive"] for one in (await there.get("/agents"))["items"]}[node]
        eviction = await here.ask("evictions", all=True, tier="node", node=node)
        assert [command["id"] for command in (await same.beat(wait_seconds=30))["pending"]] == [eviction["id"]]
        assert (await there.get(f"/evictions/{eviction['id']}"))["status"] == "RUNNING"
    begun = [await ahead.begin(MODEL), await behind.begin(source("hf://org/other"))]
    claims = "SELECT id, claimed_by, claim_expires_at - extract(epoch FROM now()) AS left FROM mirrors"
    while not all(row["claimed_by"] for row in await way.fetch(claims)):
        pass
    before = {row["id"]: row["claimed_by"] for row in await way.fetch(claims)}
    for watched in (ahead, behind):  # each has looked for work since
        done = (
            await watched.begin({**MODEL, "source": "hf://org/none", "mount_location": f"/{watched.data_dir.name}"})
        )["id"]
        await watched.ended(done)
    rows = {row["id"]: row for row in await way.fetch(claims)}
    assert {one["id"]: rows[one["id"]]["claimed_by"] for one in begun} == before
    assert all(0 < rows[one["id"]]["left"] <= worker.CLAIM_SECONDS + MINUTES / 2 for one in begun)
    hub.release_stalled()
    assert {(await ahead.ended(one["id"]))["status"] for one in begun} == {"READY"}


@pytest.mark.parametrize("way", ["straight"], indirect=True)
async def test_collect__by_a_process_whose_clock_is_ahead__grants_the_whole_grace(way: Way, tmp_path: Path) -> None:
    options: dict[str, Any] = {"clock": lambda: time.time() + MINUTES, "scrub_seconds": 0, "collect_seconds": 0}
    async with way.beside(tmp_path, "ahead", **options) as ahead:
        database = ahead.service.requests.database
        async with database.write() as session:
            set_id = await chunks.of(session, chunks.begin, "mir_0/0")
            await chunks.of(session, chunks.acquire, set_id, {named("chunk"): 1}, database.now())
            await chunks.of(session, chunks.acquire, set_id, {}, 0.0, [named("chunk")])
            await chunks.of(session, chunks.end, [set_id], database.now())
        for grace_seconds, freed in ((MINUTES / 2, 0), (0, 1)):
            assert (await ahead.collect(grace_seconds=grace_seconds))["bytes_freed"] == freed


def serving_off_by(seconds: float) -> tuple[str, ...]:
    """A process that takes its machine's clock for so much later, and records no chunk before all are there."""
    clock = f"import time; right = time.time; time.time = lambda: right() + {seconds}"
    late = "from bdn.mirror.ingest import worker; worker.FLUSH_SECONDS = 10_000.0"
    python, option, code, *arguments = SERVE
    return executed((python, option, f"{clock}; {late}; {code}", *arguments))  # before anything is imported


@pytest.mark.promise("collection")
@pytest.mark.parametrize("way", ["straight"], indirect=True)
async def test_what_a_process_behind_copies_now_is_not_old_to_one_ahead(way: Way, tmp_path: Path, hub: Hub) -> None:
    """One collects while the other has put a chunk, dated minutes ago, that nothing names yet."""
    environ = {
        "BDN_DATABASE_URL": way.straight,
        "BDN_STORE": f"file://{tmp_path}/store",
        "BDN_GRANT_KEY_FILE": str(write_keys(tmp_path / "grant-keys.pem", new_signing_key())),
        "BDN_TOMBSTONE_SECONDS": "0",
    }

    def chunks() -> set[Path]:
        return set(tmp_path.glob("store/chunks/*/*/*"))

    hub.fail(stall(), origin="cdn", skip=1, times=None)
    async with (
        asyncio.timeout(3 * LONGEST_SECONDS),  # with two starts of an interpreter
        await ServingProcess.start(tmp_path / "behind", command=serving_off_by(-MINUTES / 2), **environ) as behind,
    ):
        begun = await behind.begin(MODEL)
        await until(chunks, seconds=LONGEST_SECONDS)
        put = chunks()
        async with await ServingProcess.start(
            tmp_path / "ahead", command=serving_off_by(MINUTES / 2), **environ
        ) as ahead:
            body = {"grace_seconds": 0}
            collected = (await ahead.http.post("/collections", json=body, params={"wait": 60})).json()
            assert (collected["status"], collected["bytes_freed"], put - chunks()) == ("DONE", 0, set())
            hub.release_stalled()
            document = await ahead.ended(begun)
            assert document["status"] == "READY"
            await check_whole(ahead, document)
            evicted = await ahead.http.post("/evictions", json={"all": True, "tier": "mirror"}, params={"wait": 60})
            assert (evicted.json()["status"], chunks()) == ("DONE", set())
