"""What happens to a mirror when something else happens at the worst moment."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.mirror.ingest import worker
from bdn.mirror.ingest.progress import CopyProgress
from bdn.mirror.ingest.survey import Surveyor
from bdn.mirror.ingest.worker import Ingest
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import answer, cut, stall
from tests.doubles.hub import Hub
from tests.support.mirror.service import LONGEST_SECONDS, MirrorUnderTest, mirror_under_test, source, until

pytest_plugins = ("tests.support.mirror.fixtures",)

MODEL = source("hf://org/model")
LARGE = GeneratedContent(CHUNK_SIZE + 10)


@pytest.fixture(autouse=True)
def model(hub: Hub) -> None:
    hub.repo("org/model").commit({"model.safetensors": LARGE, "config.json": b"{}"})


async def change(mirror: MirrorUnderTest, *statements: str) -> None:
    """What another process does to the database; nobody here is told. Somebody here may have to finish writing first."""

    def carry_out() -> None:
        with closing(sqlite3.connect(mirror.data_dir / "mirror.sqlite", timeout=20)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    await asyncio.to_thread(carry_out)


CANCEL = "UPDATE mirrors SET status = 'CANCELED'", "UPDATE mirror_sources SET status = 'CANCELED'"


@pytest.mark.parametrize("moment", ["survey", "publish"])
async def test_a_mirror_that_another_process_cancels_is_not_brought_back_to_life(
    mirror: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    target, name = (Surveyor, "survey") if moment == "survey" else (Ingest, "_publish")
    do = getattr(target, name)

    async def cancel_first(self: Any, *given: Any, **named: Any) -> Any:
        result = await do(self, *given, **named) if moment == "survey" else None
        await change(mirror, *CANCEL)
        return result or await do(self, *given, **named)

    monkeypatch.setattr(target, name, cancel_first)
    document = await mirror.mirror(MODEL)
    await mirror.released()
    assert document["status"] == "CANCELED"
    assert {row[5] for row in mirror.rows("mirror_sources")["mirror_sources"]} == {"CANCELED"}
    assert mirror.count("manifests") == 0
    monkeypatch.setattr(target, name, do)
    assert (await mirror.ready(MODEL))["bytes_transferred"] in (0, LARGE.size + 2)


async def test_a_bug_fails_its_mirror_alone(mirror: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Surveyor, "survey", lambda *_, **__: 1 / 0)
        assert (await mirror.failed(MODEL))["message"].startswith("internal error: ZeroDivisionError")
    with monkeypatch.context() as patch:
        patch.setattr(Ingest, "run", lambda *_: 1 / 0)
        error = await mirror.failed(MODEL)
        assert (error["code"], error["retryable"]) == ("INTERNAL", False)
    await mirror.ready(MODEL)


async def test_a_worker_whose_bookkeeping_fails_leaves_the_mirror_for_later(
    upstreams: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(worker, "CLAIM_SECONDS", 0.05)
    monkeypatch.setattr(worker, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(worker, "FLUSH_SECONDS", LONGEST_SECONDS)  # what fails is what the mirror itself waits for
    flush, failures = CopyProgress.flush, [sqlite3.IntegrityError("scripted"), sqlite3.IntegrityError("scripted")]

    async def fail_first(self: CopyProgress) -> None:
        if failures:
            raise failures.pop()
        await flush(self)

    monkeypatch.setattr(CopyProgress, "flush", fail_first)
    async with mirror_under_test(tmp_path, jobs=1) as mirror:
        document = await mirror.mirror(MODEL)
        assert await mirror.tree(document["sources"][0]["manifest"])
    assert (document["status"], document["error"], failures) == ("READY", None, [])


async def test_a_half_copied_file_whose_chunk_the_store_loses_meanwhile_is_copied_again(
    mirror: MirrorUnderTest, hub: Hub
) -> None:
    hub.fail(cut(), origin="cdn", skip=1)
    hub.fail(answer(403), origin="cdn", skip=1, times=None)
    begun = await mirror.begin(MODEL)
    await until(lambda: mirror.count("identities") == 2)  # of the slab, and of the half-copied file
    hub.release_stalled()
    assert (await mirror.ended(begun["id"]))["status"] == "FAILED"
    hub.script.clear()
    for name in [name for name, size in mirror.chunks().items() if size in (CHUNK_SIZE, LARGE.size - CHUNK_SIZE)]:
        (mirror.data_dir / "store/chunks" / name).unlink()
    error = await mirror.failed(MODEL)
    assert (error["code"], error["retryable"]) == ("STORE_UNAVAILABLE", True)
    await mirror.tree(await mirror.manifest(MODEL))


async def test_a_mirror_that_goes_on_stays_at_its_commit(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo("org/moving")
    first = repo.commit({"a.bin": LARGE, "b.txt": b"old"})
    hub.fail(stall(), origin="cdn")
    async with mirror_under_test(tmp_path) as mirror:
        begun = await mirror.begin(source("hf://org/moving@main"))
        await until(lambda: hub.log.count(origin="cdn"))
    repo.commit({"b.txt": b"new"})
    hub.release_stalled()
    async with mirror_under_test(tmp_path) as mirror:
        document = await mirror.ended(begun["id"])
        assert document["sources"][0]["resolved_revision"] == first
        assert (await mirror.tree(document["sources"][0]["manifest"]))["b.txt"] == b"old"
        assert (await mirror.tree(await mirror.manifest(source("hf://org/moving@main"))))["b.txt"] == b"new"
