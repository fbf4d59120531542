"""What is copied, what is found to be there already, how both are counted, and what of it the database is told, and when."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, digest_of
from bdn.core.errors import ChecksumMismatchError, UpstreamUnavailableError
from bdn.core.source.upstream import Identity, Listing, Resolution, UpstreamFile
from bdn.mirror.chunks.writer import SetWriter
from bdn.mirror.db import chunks, identities, mirrors
from bdn.mirror.db.chunks import SetEndedError
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.errors import DatabaseUnavailableError
from bdn.mirror.db.identities import NOT_YET, Known
from bdn.mirror.db.waiting import SingleFlight
from bdn.mirror.ingest.copier import ChunkStored, Copier, Packed, Put, WrongContent
from bdn.mirror.ingest.copy_missing import CopyMissing
from bdn.mirror.ingest.progress import ClaimLostError, CopyProgress, SourceCounters
from bdn.mirror.ingest.survey import Survey, units_of
from bdn.mirror.upstream.reader import LocatedFile
from bdn.transfer.under_way import UnderWay
from tests.support.content.layouts import pieces
from tests.support.content.memory_store import MemoryStore
from tests.support.content.noise import MIB, noise
from tests.support.mirror.service import database_under_test


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """With the mirror ``mir_1``, which ``worker:1`` has claimed."""
    async with database_under_test(tmp_path) as database:
        async with database.write() as session:
            await mirrors.insert(session, "mir_1", "o", "k", [{"source": "s", "mount_location": "/m"}], now=1.0)
            now = time.time()
            assert await mirrors.claim(session, "worker:1", now=now, until=now + 60) == ("mir_1", "o")
        yield database


# --- what the database is told: in batches, nothing lost, and nothing about the mirror without a claim ---

ONE, TWO = digest_of(b"1"), digest_of(b"2")
SIZE = CHUNK_SIZE + 1
WHOLE = Known("id", SIZE, digest_of(b"file"), ONE.to_bytes() + TWO.to_bytes())


@dataclass
class Told:
    """A progress with its database; ``broken`` makes writes fail when they are committed."""

    database: Database
    broken: bool = False
    writes: int = 0

    @staticmethod
    def now() -> float:
        return time.time()

    def progress(self, claimant: str = "worker:1") -> CopyProgress:
        progress = CopyProgress(self, "mir_1", claimant, lambda _: None)  # type: ignore[arg-type]
        progress.counters[0] = SourceCounters()
        return progress

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteSession]:
        self.writes += 1
        async with self.database.write() as session:
            yield session
            if self.broken:
                raise DatabaseUnavailableError("scripted")

    async def known(self, key: str = "id") -> Known | None:
        async with self.database.read() as session:
            return (await identities.find(session, [key])).get(key)

    async def counters(self) -> tuple[int, int]:
        async with self.database.read() as session:
            (source,) = (await mirrors.get(session, "mir_1", None)).sources
        return source.bytes_transferred, source.bytes_reused


@pytest.fixture
def told(database: Database) -> Told:
    return Told(database)


async def test_chunks_of_a_half_copied_file_are_found_until_it_is_complete(told: Told) -> None:
    progress = told.progress()
    progress.begin_file("id", SIZE, None)
    progress.chunk_stored("id", 1, TWO)
    progress.transferred(0, 1)
    await progress.flush()
    assert await told.known() == Known("id", SIZE, None, NOT_YET + TWO.to_bytes())
    assert await told.counters() == (1, 0)
    await progress.unit_complete(WHOLE)
    await progress.flush()
    assert await told.known() == WHOLE


async def test_what_has_come_and_is_not_in_the_database_is_under_way(told: Told) -> None:
    progress = told.progress()
    with progress.counters[0].under_way.read() as arriving:
        arriving.received = 5
        progress.transferred(0, CHUNK_SIZE)
        assert progress.bytes_under_way(0, (await told.counters())[0]) == CHUNK_SIZE + 5
        await progress.flush()
        assert progress.bytes_under_way(0, (await told.counters())[0]) == 5
    assert progress.bytes_under_way(0, CHUNK_SIZE) == 0
    assert progress.bytes_under_way(0, CHUNK_SIZE + 1) == 0  # another worker has taken over
    assert progress.bytes_under_way(1, 0) == 0  # a source that nobody has begun


async def test_what_could_not_be_told_is_told_the_next_time(told: Told) -> None:
    progress = told.progress()
    progress.begin_file("id", SIZE, None)
    progress.chunk_stored("id", 0, ONE)
    progress.transferred(0, CHUNK_SIZE)
    progress.reused(0, 7)
    told.broken = True
    with pytest.raises(DatabaseUnavailableError):
        await progress.flush()
    assert (await told.known(), await told.counters()) == (None, (0, 0))
    told.broken = False
    await progress.flush()
    assert await told.known() == Known("id", SIZE, None, ONE.to_bytes() + NOT_YET)
    assert await told.counters() == (CHUNK_SIZE, 7)


async def test_a_unit_is_told_with_its_bytes_when_its_caller_was_canceled(told: Told) -> None:
    progress = told.progress()
    progress.transferred(0, SIZE)
    caller = asyncio.create_task(progress.unit_complete(WHOLE))
    await asyncio.sleep(0)
    caller.cancel()
    await progress.flush()
    assert (await told.known(), await told.counters()) == (WHOLE, (SIZE, 0))


async def test_units_that_are_complete_together_share_a_transaction(told: Told) -> None:
    progress = told.progress()

    async def complete(number: int) -> None:
        await progress.unit_complete(Known(f"id {number}", 1, ONE, ONE.to_bytes()))
        progress.transferred(0, 1)  # what the next one could write by itself

    await asyncio.gather(*map(complete, range(20)))
    assert told.writes == 2  # the first one, and all that came meanwhile
    assert [(await told.known(f"id {number}")) is not None for number in range(20)] == [True] * 20


async def test_a_dropped_file_is_forgotten(told: Told) -> None:
    progress = told.progress()
    progress.begin_file("id", SIZE, None)
    progress.chunk_stored("id", 0, ONE)
    await progress.flush()
    await progress.drop("id")
    await progress.flush()
    assert await told.known() is None


async def test_nothing_of_a_mirror_is_written_after_another_worker_took_over(told: Told) -> None:
    progress = told.progress("worker:2")
    progress.transferred(0, 5)
    with pytest.raises(ClaimLostError):
        await progress.flush()
    assert await told.counters() == (0, 0)


# --- what is copied ---

CONTENT = noise(17 * MIB + 3, 1)
PIECES = pieces(CONTENT)
NAMES = [digest_of(piece) for piece in PIECES]


@dataclass
class Copies:
    """A copier that needs no upstream; notes what it was asked for."""

    asked: list[tuple[str, set[int]]] = field(default_factory=list)
    slabs: list[list[str]] = field(default_factory=list)
    failing: str = ""
    wrong_parts: bool = False  # what an earlier attempt stored is not of this file

    async def copy(
        self, located: LocatedFile, stored: Mapping[int, Digest], put: Put, on_stored: ChunkStored, _: UnderWay
    ) -> FileLayout:
        self.asked.append((located.file.path, set(stored)))
        if self.wrong_parts and stored:
            raise ChecksumMismatchError(located.file.path, "right", "wrong")
        layout = FileLayout.of(len(CONTENT), tuple(NAMES))
        for chunk in layout.placed():
            if chunk.index not in stored:
                await asyncio.to_thread(put, chunk.digest, bytearray(PIECES[chunk.index]))
                on_stored(chunk.index, chunk.digest, chunk.range.size)
        return layout

    async def pack(
        self,
        files: Sequence[LocatedFile],
        prior: Mapping[str, FileLayout],
        put: Put,
        on_wrong: WrongContent,
        under_way: UnderWay,
    ) -> Packed:
        self.slabs.append([located.file.path for located in files])
        await asyncio.sleep(0)
        if self.failing in self.slabs[-1]:
            self.failing = ""
            raise UpstreamUnavailableError("s", "gone")
        contents = [located.file.path.encode()[:1] * located.file.size for located in files]
        slab = b"".join(contents)
        await asyncio.to_thread(put, digest_of(slab), bytearray(slab))
        return Packed(digest_of(slab), list(map(digest_of, contents)), len(slab))


@dataclass
class Rig:
    database: Database
    copies: Copies = field(default_factory=Copies)
    in_progress: SingleFlight[str, Known] = field(default_factory=SingleFlight)
    store: MemoryStore = field(default_factory=MemoryStore)

    async def writer(self, owner: str) -> SetWriter:
        async with self.database.write() as session:
            return SetWriter(self.database, self.store, await chunks.of(session, chunks.begin, owner))

    async def half_copied(self, *indexes: int) -> Known:
        """A mirror that failed has stored these chunks of the large file."""
        writer = await self.writer("mir_0/0")
        for index in indexes:
            await asyncio.to_thread(writer.put, NAMES[index], PIECES[index])
        raw = b"".join(NAMES[index].to_bytes() if index in indexes else NOT_YET for index in range(3))
        known = Known(LARGE.identity.key, LARGE.size, None, raw)
        async with self.database.write() as session:
            await identities.record(session, [known])
            await chunks.of(session, chunks.end, [writer.set_id], time.time())
        return known

    async def gather(self, *files: UpstreamFile, owner: str = "mir_1/0", known: Known | None = None) -> SourceCounters:
        """Bring files of which a survey found nothing, or a part of the first."""
        progress = CopyProgress(self.database, "mir_1", "worker:1", lambda _: None)
        total, writer = sum(file.size for file in files), await self.writer(owner)
        held = {} if known is None else await writer.hold(known.chunks.values())
        stored = sum(held.values())
        progress.counters[0] = SourceCounters(0, stored)
        lacking = {unit.key: unit.size for unit in units_of(files)}
        survey = Survey(Resolution(None), Listing(files), {known.key: known} if known else {}, (), lacking)
        copier: Copier = self.copies  # type: ignore[assignment]
        unused: Any = None
        await CopyMissing(copier, self.in_progress, progress, writer, unused, "s", 0, survey).run()
        named = {chunk for one in survey.known.values() for chunk in one.chunks.values()}
        async with self.database.read() as session:
            found = await chunks.of(session, chunks.names, writer.set_id)
            is_stored = await chunks.of(session, chunks.stored, named)
        assert set(is_stored) == named
        assert set(found) >= named
        assert {unit.key for unit in units_of(files)} == survey.known.keys()
        assert progress.counters[0].transferred + progress.counters[0].reused == total
        return progress.counters[0]


@pytest.fixture
def rig(database: Database) -> Rig:
    return Rig(database)


def file(path: str, size: int) -> UpstreamFile:
    return UpstreamFile(path, size, Identity.of("public", path), path, "v")


SMALL, LARGE = file("small", 10), file("large", len(CONTENT))
TINY = [file(f"tiny-{number}", number + 1) for number in range(5)]


async def test_what_is_missing_is_copied_and_counted(rig: Rig) -> None:
    counters = await rig.gather(LARGE, SMALL)
    assert (rig.copies.asked, rig.copies.slabs) == ([("large", set())], [["small"]])
    assert (counters.transferred, counters.reused) == (LARGE.size + 10, 0)


@pytest.mark.parametrize("wanted", [SMALL, LARGE], ids=["small", "large"])
async def test_what_another_mirror_copied_since_the_survey_is_found(rig: Rig, wanted: UpstreamFile) -> None:
    await rig.gather(wanted, owner="mir_0/0")
    rig.copies.asked.clear()
    rig.copies.slabs.clear()
    counters = await rig.gather(wanted)
    assert (rig.copies.asked, rig.copies.slabs) == ([], [])
    assert (counters.transferred, counters.reused) == (0, wanted.size)


@pytest.mark.parametrize("is_surveyed", [True, False], ids=["before the survey", "since the survey"])
async def test_chunks_that_an_earlier_attempt_stored_are_not_copied_again(rig: Rig, is_surveyed: bool) -> None:
    known = await rig.half_copied(1)
    counters = await rig.gather(LARGE, known=known if is_surveyed else None)
    assert rig.copies.asked == [("large", {1})]
    assert (counters.transferred, counters.reused) == (LARGE.size - CHUNK_SIZE, CHUNK_SIZE)


async def test_chunks_that_were_collected_since_are_copied_again(rig: Rig) -> None:
    await rig.half_copied(0, 1)
    async with rig.database.write() as session:
        while await chunks.of(session, chunks.take_apart):
            pass
        now = time.time() + 1
        gone = await chunks.of(session, chunks.collect, 0, now)
    assert len(gone) == 2
    async with rig.database.write() as session:
        await chunks.of(session, chunks.forget, gone, now)
    assert (await rig.gather(LARGE)).transferred == LARGE.size


async def test_two_mirrors_of_the_same_files_fetch_each_once(rig: Rig) -> None:
    first, second = await asyncio.gather(rig.gather(LARGE, *TINY), rig.gather(LARGE, *TINY, owner="mir_1/1"))
    assert rig.copies.slabs == [[each.path for each in TINY]]
    assert rig.copies.asked == [("large", set())]
    assert first.transferred + second.transferred == LARGE.size + sum(each.size for each in TINY)


async def test_a_mirror_that_waits_for_one_that_fails_copies_by_itself(rig: Rig) -> None:
    rig.copies.failing = "tiny-2"
    failed, other = await asyncio.gather(rig.gather(*TINY), rig.gather(*TINY, owner="mir_1/1"), return_exceptions=True)
    assert isinstance(failed, UpstreamUnavailableError)
    assert isinstance(other, SourceCounters)
    assert (other.transferred, other.reused) == (sum(each.size for each in TINY), 0)


async def test_a_file_whose_earlier_chunks_are_wrong_is_copied_from_the_start(rig: Rig) -> None:
    known = await rig.half_copied(1)
    rig.copies.wrong_parts = True
    counters = await rig.gather(LARGE, known=known)
    assert rig.copies.asked == [("large", {1}), ("large", set())]
    assert (counters.transferred, counters.reused) == (LARGE.size, 0)


async def test_nothing_is_copied_for_a_mirror_that_was_canceled(rig: Rig) -> None:
    async with rig.database.write() as session:
        await chunks.of(session, chunks.begin, "mir_1/0")
    writer = await rig.writer("mir_1/0")
    async with rig.database.write() as session:
        await mirrors.finish(session, "mir_1", "CANCELED", now=time.time())
    with pytest.raises(SetEndedError):
        await asyncio.to_thread(writer.put, NAMES[0], PIECES[0])
    assert list(rig.store.listed()) == []
