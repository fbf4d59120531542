"""Another process keeps the embedded database locked: what writes waits or says so, what reads goes on, and nothing is lost."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final

import pytest

from bdn.mirror.api import control
from bdn.mirror.db import database
from bdn.mirror.ingest import worker
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.agent.rig import MIB, noise
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, until
from tests.support.promises.tally import Tally

pytestmark = pytest.mark.promise("network")
pytest_plugins = ("tests.support.mirror.fixtures",)

LONGEST_SECONDS: Final = 60.0
RUNNING, ASKED = source("hf://org/running"), source("hf://org/asked")
FILES: Final = {"hf://org/running": {"w.bin": noise(17 * MIB, 1)}, "hf://org/asked": {"w.bin": noise(MIB, 2)}}


@pytest.fixture
def hasty(upstreams: None, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that looks at everything often, and an upstream whose copies stand still."""
    for name, seconds in (("POLL_SECONDS", 0.02), ("RENEW_SECONDS", 0.05), ("CLAIM_SECONDS", 1.0)):
        monkeypatch.setattr(worker, name, seconds)
    monkeypatch.setattr(control, "PROBE_SECONDS", 0.3)
    for name, files in FILES.items():
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


async def is_said_by_readyz(mirror: MirrorUnderTest) -> str:
    async with asyncio.timeout(LONGEST_SECONDS):
        while (answer := await mirror.http.get("/readyz")).is_success:  # noqa: ASYNC110 - its own clock decides
            await asyncio.sleep(0.02)
    return str(answer.json()["error"]["message"])


async def whole(mirror: MirrorUnderTest, *ids: str) -> bool:
    """READY in the end, with the right files, and each asked for once."""
    documents = [await mirror.ended(mirror_id) for mirror_id in ids]
    parts = [(document["status"], document["sources"][0]) for document in documents]
    return len(ids) == mirror.count("mirrors") and all(
        [status == "READY" and await mirror.tree(part["manifest"]) == FILES[part["source"]] for status, part in parts]
    )


@pytest.mark.usefixtures("hasty")
async def test_a_write_waits_for_a_lock_that_passes(hub: Hub, tmp_path: Path, tally: Tally) -> None:
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror") as mirror:
        running = await mirror.begin(RUNNING)
        await until(lambda: hub.log.count(origin="cdn"), "the copy has begun")
        async with locked(mirror):
            asked = asyncio.create_task(mirror.post(ASKED))
            hub.release_stalled()
            said = await is_said_by_readyz(mirror)
            seen = await mirror.http.get(f"/mirror/{running['id']}")
        answer = await asked

        tally.add(scenarios=1, faults=1, lost=not await whole(mirror, running["id"], answer.json()["id"]))
        assert "another process" in said
        assert (seen.status_code, answer.status_code) == (200, 202)
        assert (await mirror.http.get("/readyz")).is_success


@pytest.mark.usefixtures("hasty")
async def test_a_lock_that_stays_is_named_to_whoever_writes(
    hub: Hub, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to those who wait behind others; and the copy that ran goes on afterwards."""
    monkeypatch.setattr(database, "WRITER_SECONDS", 0.5)
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror") as mirror:
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
        assert any("others have been writing" in answer.text for answer in answers)
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["retryable"]) == (503, "STORE_UNAVAILABLE", True)
