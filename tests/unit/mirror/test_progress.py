"""What a running mirror tells the database: in batches, nothing lost, and nothing without a claim."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, FileLayout, Slab, digest_of
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.errors import DatabaseUnavailableError
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow
from bdn.mirror.ingest.copy_missing import ClaimLostError, Progress, SourceCounters
from tests.support.mirror.service import database_under_test, rows_of

ONE, TWO = digest_of(b"1"), digest_of(b"2")
LAYOUT = FileLayout.of(CHUNK_SIZE + 1, (ONE, TWO))


@dataclass
class Kept:
    """A progress with its database; ``broken`` makes writes fail when they are committed, ``gate`` makes the next one wait."""

    database: Database
    folder: Path
    flushed: list[str] = field(default_factory=list)
    transferred: list[int] = field(default_factory=list)
    broken: bool = False
    gate: asyncio.Event | None = None

    def progress(self, claimant: str = "worker:1") -> Progress:
        progress = Progress(self, "mir_1", claimant, self.flushed.extend, self.transferred.append)  # type: ignore[arg-type]
        progress.counters[0] = SourceCounters()
        return progress

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteSession]:
        gate, self.gate = self.gate, None
        if gate is not None:
            await gate.wait()
        async with self.database.write() as session:
            yield session
            if self.broken:
                raise DatabaseUnavailableError("scripted")

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return [self._without_time(table, row) for row in rows_of(self.folder / "mirror.sqlite", table)[table]]

    @staticmethod
    def _without_time(table: str, row: tuple[Any, ...]) -> tuple[Any, ...]:
        return row[:-1] if table in ("copied_chunks", "contents") else row

    def counters(self) -> tuple[int, int]:
        ((*_, transferred, reused, _, _),) = self.rows("mirror_sources")
        return transferred, reused


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    async with database_under_test(tmp_path) as database:
        mirror = MirrorRow(id="mir_1", organisation="o", request_key="k", status="PENDING", created_at=1.0)
        row = MirrorSourceRow(
            mirror_id="mir_1", position=0, request={}, source="s", mount_location="/m", status="PENDING", warnings=[]
        )
        async with database.write() as session:
            await mirrors.insert(session, mirror, [row])
            now = time.time()
            assert await mirrors.claim(session, "worker:1", now=now, until=now + 60) == "mir_1"
        yield Kept(database, tmp_path)


async def test_chunks_are_kept_until_their_file_is_complete(kept: Kept) -> None:
    progress = kept.progress()
    progress.chunk_stored(0, "id", 0, ONE, CHUNK_SIZE)
    await progress.flush()
    assert kept.rows("copied_chunks") == [("id", 0, ONE.hex)]
    progress.chunk_stored(0, "id", 1, TWO, 1)
    progress.file_complete("id", LAYOUT)
    await progress.flush()
    assert kept.rows("copied_chunks") == []
    assert kept.rows("identities") == [("id", LAYOUT.digest.hex)]
    assert kept.rows("contents") == [(LAYOUT.digest.hex, LAYOUT.size, ONE.to_bytes() + TWO.to_bytes())]
    assert kept.counters() == (LAYOUT.size, 0)
    assert (kept.flushed, kept.transferred) == (["id"], [CHUNK_SIZE, 1])


async def test_what_could_not_be_told_is_told_the_next_time(kept: Kept) -> None:
    progress = kept.progress()
    progress.chunk_stored(0, "half", 0, ONE, CHUNK_SIZE)
    progress.file_complete("id", LAYOUT)
    progress.reused(0, 7)
    kept.broken = True
    with pytest.raises(DatabaseUnavailableError):
        await progress.flush()
    assert (kept.flushed, kept.counters()) == ([], (0, 0))
    kept.broken = False
    await progress.flush()
    assert kept.rows("copied_chunks") == [("half", 0, ONE.hex)]
    assert (kept.counters(), kept.flushed) == ((CHUNK_SIZE, 7), ["id"])


async def test_a_flush_that_is_canceled_loses_nothing(kept: Kept) -> None:
    progress = kept.progress()
    progress.chunk_stored(0, "half", 0, ONE, CHUNK_SIZE)
    kept.gate = gate = asyncio.Event()
    flushing = asyncio.create_task(progress.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    gate.set()
    await progress.flush()
    assert kept.rows("copied_chunks") == [("half", 0, ONE.hex)]


async def test_a_later_flush_waits_for_an_earlier_one(kept: Kept) -> None:
    progress = kept.progress()
    progress.chunk_stored(0, "id", 0, ONE, CHUNK_SIZE)
    kept.gate = gate = asyncio.Event()
    first = asyncio.create_task(progress.flush())
    await asyncio.sleep(0)
    progress.chunk_stored(0, "id", 1, TWO, 1)
    progress.file_complete("id", LAYOUT)
    second = asyncio.create_task(progress.flush())
    dropping = asyncio.create_task(progress.drop("other"))
    await asyncio.wait([second], timeout=0.05)
    gate.set()
    await asyncio.gather(first, second, dropping)
    assert kept.rows("copied_chunks") == []  # the first flush's row came before the second one cleared it


async def test_a_dropped_file_is_forgotten_here_and_there(kept: Kept) -> None:
    progress = kept.progress()
    progress.chunk_stored(0, "wrong", 0, ONE, CHUNK_SIZE)
    await progress.flush()
    progress.chunk_stored(0, "wrong", 1, TWO, 1)
    progress.chunk_stored(0, "right", 0, TWO, 1)
    await progress.drop("wrong")
    await progress.flush()
    assert kept.rows("copied_chunks") == [("right", 0, TWO.hex)]


async def test_nothing_is_written_after_another_worker_took_over(kept: Kept) -> None:
    progress = kept.progress()
    progress.chunk_stored(0, "half", 0, ONE, CHUNK_SIZE)
    async with kept.database.write() as session:
        assert await mirrors.claim(session, "worker:2", now=time.time() + 61, until=time.time() + 120) == "mir_1"
    for attempt in (progress.flush(), progress.drop("half")):
        with pytest.raises(ClaimLostError):
            await attempt
    with pytest.raises(ClaimLostError):
        async with progress.writing():
            pytest.fail("it may write")
    assert kept.rows("copied_chunks") == []
    await kept.progress("worker:2").drop("nothing")


async def test_of_a_canceled_mirror_what_was_stored_is_told_and_nothing_else(kept: Kept) -> None:
    progress = kept.progress()
    progress.chunk_stored(0, "half", 0, ONE, CHUNK_SIZE)
    async with kept.database.write() as session:
        assert await mirrors.finish(session, "mir_1", "CANCELED", now=2.0)
    with pytest.raises(ClaimLostError):
        async with progress.writing():
            pytest.fail("it may write")
    await progress.flush()
    assert kept.rows("copied_chunks") == [("half", 0, ONE.hex)]
    progress.chunk_stored(0, "half", 1, TWO, 1)
    async with kept.database.write() as session:  # its claim ran out, and an eviction may have been
        assert not await mirrors.renew_claim(session, "mir_1", "worker:1", time.time() + 60)
        await mirrors.release_claims(session, "worker")
    with pytest.raises(ClaimLostError):
        await progress.flush()


async def test_what_is_abandoned_is_nothing_to_build_on(kept: Kept) -> None:
    progress = kept.progress()
    progress.file_complete("id", LAYOUT)
    progress.abandon()
    assert kept.flushed == ["id"]
    assert kept.rows("contents") == []


async def test_one_slab_of_two_scopes_is_recorded_for_both(kept: Kept) -> None:
    progress = kept.progress()
    for scope in ("public", "organisation:o"):
        slab = Slab(digest_of(b"12"), 2, scope)
        progress.packed(0, slab, 2)
        progress.file_complete(f"{scope} 1", FileLayout.packed(ONE, 1, slab, 0))
    await progress.flush()
    assert {scope for _, scope in kept.rows("slab_scopes")} == {"public", "organisation:o"}
    assert kept.rows("slab_slices") == [(ONE.hex, digest_of(b"12").hex, 0)]
    assert kept.transferred == [2, 2]


async def test_who_waited_for_a_packed_file_may_tell_the_database_first(kept: Kept) -> None:
    progress, slab = kept.progress(), Slab(digest_of(b"12"), 2, "public")
    progress.lies_in(slab)
    progress.file_complete("somebody else packed it", FileLayout.packed(ONE, 1, slab, 0))
    await progress.flush()
    assert kept.rows("slabs") == [(slab.digest.hex, 2)]
    assert kept.transferred == []
