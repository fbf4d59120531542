"""Work that one process does at a time: whoever is not alone any more hears of it, and what two do at once is right all the same."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest

from bdn.mirror.db import alone, postgres
from bdn.mirror.db.alone import LockLostError
from bdn.mirror.db.database import Database
from bdn.mirror.scrub import rounds as keeping
from tests.doubles.hub import Hub
from tests.support.agent.rig import MIB, noise
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source
from tests.support.network.fault_proxy_bytes import ByteProxy
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("network")
pytest_plugins = ("tests.support.mirror.fixtures",)

LONGEST_SECONDS: Final = 30.0
NEVER: Final = 1000.0
LOCKS: Final = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
HOLDER: Final = """
import asyncio, sys
from bdn.mirror.db import alone
from bdn.mirror.db.database import Database

async def main():
    alone.CONFIRM_SECONDS, alone.FORGOTTEN_SECONDS = 0.1, 1.0
    database = Database(sys.argv[1])
    try:
        async with database.alone("work"):
            print("alone", flush=True)
            await asyncio.Event().wait()
    except alone.LockLostError:
        print("lost", flush=True)
    await database.close()

asyncio.run(main())
"""


async def run(url: str, query: str) -> list[Any]:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        return list(await connection.fetch(query))
    finally:
        await connection.close()


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    database = Database(postgres_url)
    yield database
    await database.close()


async def hold(database: Database, holding: asyncio.Event) -> None:
    async with database.alone("work"):
        holding.set()
        await asyncio.Event().wait()


async def test_who_held_a_lock_across_a_network_that_fell_silent_stops_before_another_begins(
    postgres_url: str, database: Database, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("CONFIRM_SECONDS", 0.05), ("BELIEF_SECONDS", 0.5), ("FORGOTTEN_SECONDS", NEVER)):
        monkeypatch.setattr(alone, name, seconds)
    monkeypatch.setattr(postgres, "STATEMENT_SECONDS", NEVER)
    host, _, port = postgres_url.partition("@")[2].partition("/")[0].partition(":")
    proxy = ByteProxy((host, int(port)))
    order: list[str] = []
    holding = asyncio.Event()

    async def second() -> None:
        async with database.alone("work"):
            order.append("the second began")

    with proxy.running():
        far = Database(postgres_url.replace(f":{port}/", f":{proxy.port}/"))
        async with asyncio.timeout(LONGEST_SECONDS), asyncio.TaskGroup() as group:
            first = group.create_task(_until_lost(far, holding, order))
            await holding.wait()
            group.create_task(second())
            proxy.forget()
            await first
        await far.close()
    tally.add(scenarios=1, faults=1, refused=1)
    assert order == ["the first stopped", "the second began"]


async def _until_lost(database: Database, holding: asyncio.Event, order: list[str]) -> None:
    try:
        await hold(database, holding)
    except LockLostError:
        return
    finally:
        order.append("the first stopped")


async def test_who_lost_the_session_hears_of_it_at_once(
    postgres_url: str, database: Database, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a failover, or when an operator ends it; and who is canceled before he has heard of it is canceled."""
    monkeypatch.setattr(alone, "BELIEF_SECONDS", NEVER)
    async with asyncio.timeout(LONGEST_SECONDS):
        for is_canceled in (False, True):
            monkeypatch.setattr(alone, "CONFIRM_SECONDS", NEVER if is_canceled else 0.05)
            holding = asyncio.Event()
            work = asyncio.create_task(hold(database, holding))
            await holding.wait()
            await run(postgres_url, LOCKS)
            if is_canceled:
                work.cancel()
            with pytest.raises(asyncio.CancelledError if is_canceled else LockLostError):
                await work
            tally.add(scenarios=1, faults=1, refused=1)


async def test_who_stands_still_is_forgotten_and_finds_out_when_he_goes_on(
    postgres_url: str, database: Database, tally: Tally
) -> None:
    """A machine that sleeps, or a process that is stopped: its connections live, and it says nothing."""
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
    tally.add(scenarios=1, faults=1, refused=1)
    assert said == [b"alone\n", b"lost\n"]


@asynccontextmanager
async def _everybody(_: Database, _name: str) -> AsyncIterator[None]:
    """No lock at all: what a lost one comes to, all the time."""
    yield


@pytest.mark.parametrize("how", ["nobody is alone", "sessions end"])
async def test_what_two_do_at_once_that_one_should_loses_nothing_and_leaves_nothing(
    postgres_url: str,
    upstreams: None,
    hub: Hub,
    tmp_path: Path,
    how: str,
    tally: Tally,
    scale: Scale,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two keepers that scrub without a pause, and collections and evictions beside mirrors."""
    monkeypatch.setattr(keeping, "_AWAY_SECONDS", 0.01)
    monkeypatch.setattr(alone, "CONFIRM_SECONDS", 0.01)
    if how == "nobody is alone":
        monkeypatch.setattr(Database, "alone", _everybody)
    files = {name: {"w.bin": noise(MIB, number), f"{name}.txt": b"small"} for number, name in enumerate("abc")}
    for name, content in files.items():
        hub.repo(f"org/{name}").commit({**content, "shared.bin": noise(MIB, 9)})
    async with (
        asyncio.timeout(4 * LONGEST_SECONDS),
        _worker(postgres_url, tmp_path, "one") as one,
        _worker(postgres_url, tmp_path, "two") as two,
    ):
        for turn in range(scale.of(1, 5)):
            pair = (one, two) if turn % 2 else (two, one)
            work = [asyncio.create_task(_tried(mirror, name)) for mirror in pair for name in files]
            asked = [await mirror.http.post("/collections", json={"grace_seconds": 0}) for mirror in pair]
            assert {answer.status_code for answer in asked} == {202}
            while how == "sessions end" and not all(task.done() for task in work):
                tally.add(faults=len(await run(postgres_url, LOCKS)))
            for document in await asyncio.gather(*work):
                tally.add(scenarios=1, lost=document["status"] != "READY")
        for name, content in files.items():
            document = await one.ready(source(f"hf://org/{name}"))
            found = await two.tree(document["sources"][0]["manifest"])
            tally.add(wrong=found != {**content, "shared.bin": noise(MIB, 9)})
        await one.evict(all=True)
        await one.collect(grace_seconds=0)
        await two.collect(grace_seconds=0)
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def _worker(url: str, root: Path, name: str) -> AbstractAsyncContextManager[MirrorUnderTest]:
    at_once: dict[str, Any] = {"tombstone_seconds": 0, "collect_grace_seconds": 0, "scrub_seconds": 0.001}
    return mirror_under_test(root / name, database_url=url, store=f"file://{root}/store", **at_once)


async def _tried(mirror: MirrorUnderTest, name: str) -> dict[str, Any]:
    """Evict, which whoever has lost the lock may be refused, and mirror, which is never."""
    await mirror.http.post("/evictions", json={"source": f"hf://org/{name}", "tier": "mirror"})
    return await mirror.mirror(source(f"hf://org/{name}"))
