"""What is brought, what is found to be there already, how both are counted, and what of it the database is told, and when."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, Slab, digest_of
from bdn.core.errors import ChecksumMismatchError, UpstreamUnavailableError
from bdn.core.source.upstream import Identity, Listing, Resolution, UpstreamFile
from bdn.core.store import is_small
from bdn.mirror.db import contents, mirrors, removal
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.errors import DatabaseUnavailableError
from bdn.mirror.ingest.copier import ChunkStored, Copier, PackedFile, WrongContent
from bdn.mirror.ingest.copy_missing import CopyMissing
from bdn.mirror.ingest.progress import ClaimLostError, CopiesInProgress, Progress, SourceCounters, StoredContents
from bdn.mirror.ingest.survey import Survey
from bdn.mirror.upstream.reader import LocatedFile
from bdn.transfer.under_way import UnderWay
from tests.support.content.memory_store import MemoryStore
from tests.support.mirror.backends import Embedded
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


# --- what the database is told: in batches, nothing lost, and nothing without a claim ---

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

    @staticmethod
    def now() -> float:
        return time.time()

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
        """All but their times."""
        found = Embedded(self.folder).rows(table)[table]
        return [row[:-1] for row in found] if table in ("copied_chunks", "contents") else found

    def counters(self) -> tuple[int, int]:
        ((*_, transferred, reused, _, _, _, _),) = self.rows("mirror_sources")
        return transferred, reused


@pytest.fixture
def kept(database: Database, tmp_path: Path) -> Kept:
    return Kept(database, tmp_path)


@pytest.fixture
def progress(kept: Kept) -> Progress:
    return kept.progress()


async def test_chunks_are_kept_until_their_file_is_complete(kept: Kept, progress: Progress) -> None:
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


async def test_what_has_come_and_is_not_in_the_database_is_under_way(kept: Kept, progress: Progress) -> None:
    with progress.counters[0].under_way.read() as arriving:
        arriving.received = 5
        progress.chunk_stored(0, "id", 0, ONE, CHUNK_SIZE)
        assert progress.bytes_under_way(0, kept.counters()[0]) == CHUNK_SIZE + 5
        await progress.flush()
        assert progress.bytes_under_way(0, kept.counters()[0]) == 5
    assert progress.bytes_under_way(0, CHUNK_SIZE) == 0
    assert progress.bytes_under_way(0, CHUNK_SIZE + 1) == 0  # another worker has taken over
    assert progress.bytes_under_way(1, 0) == 0  # a source that nobody has begun


async def test_what_could_not_be_told_is_told_the_next_time(kept: Kept, progress: Progress) -> None:
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


async def test_a_flush_that_is_canceled_loses_nothing(kept: Kept, progress: Progress) -> None:
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


async def test_a_later_flush_waits_for_an_earlier_one(kept: Kept, progress: Progress) -> None:
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


async def test_a_dropped_file_is_forgotten_here_and_there(kept: Kept, progress: Progress) -> None:
    progress.chunk_stored(0, "wrong", 0, ONE, CHUNK_SIZE)
    await progress.flush()
    progress.chunk_stored(0, "wrong", 1, TWO, 1)
    progress.chunk_stored(0, "right", 0, TWO, 1)
    await progress.drop("wrong")
    await progress.flush()
    assert kept.rows("copied_chunks") == [("right", 0, TWO.hex)]


async def test_nothing_is_written_after_another_worker_took_over(kept: Kept, progress: Progress) -> None:
    progress.chunk_stored(0, "half", 0, ONE, CHUNK_SIZE)
    async with kept.database.write() as session:
        assert await mirrors.claim(session, "worker:2", now=time.time() + 61, until=time.time() + 120) == (
            "mir_1",
            "o",
        )
    for attempt in (progress.flush(), progress.drop("half")):
        with pytest.raises(ClaimLostError):
            await attempt
    with pytest.raises(ClaimLostError):
        async with progress.writing():
            pytest.fail("it may write")
    assert kept.rows("copied_chunks") == []
    await kept.progress("worker:2").drop("nothing")


async def test_of_a_canceled_mirror_what_was_stored_is_told_and_nothing_else(kept: Kept, progress: Progress) -> None:
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


async def test_what_is_abandoned_is_nothing_to_build_on(kept: Kept, progress: Progress) -> None:
    progress.file_complete("id", LAYOUT)
    progress.abandon()
    assert kept.flushed == ["id"]
    assert kept.rows("contents") == []


async def test_one_slab_of_two_scopes_is_recorded_for_both(kept: Kept, progress: Progress) -> None:
    for scope in ("public", "organisation:o"):
        slab = Slab(digest_of(b"12"), 2, scope)
        progress.packed(0, slab, 2)
        progress.file_complete(f"{scope} 1", FileLayout.packed(ONE, 1, slab, 0))
    await progress.flush()
    assert {scope for _, scope in kept.rows("slab_scopes")} == {"public", "organisation:o"}
    assert kept.rows("slab_slices") == [(ONE.hex, digest_of(b"12").hex, 0)]
    assert kept.transferred == [2, 2]


async def test_who_waited_for_a_packed_file_may_tell_the_database_first(kept: Kept, progress: Progress) -> None:
    slab = Slab(digest_of(b"12"), 2, "public")
    progress.lies_in(slab)
    progress.file_complete("somebody else packed it", FileLayout.packed(ONE, 1, slab, 0))
    await progress.flush()
    assert kept.rows("slabs") == [(slab.digest.hex, 2)]
    assert kept.transferred == []


# --- what is brought ---

NAMES = [digest_of(bytes([index])) for index in range(4)]


SLAB = Slab(digest_of(b"slab"), CHUNK_SIZE, "public")


def layout_of(size: int) -> FileLayout:
    if is_small(size):
        return FileLayout.packed(digest_of(bytes(size)), size, SLAB, 100)
    return FileLayout.of(size, tuple(NAMES[: -(-size // CHUNK_SIZE)]))


@dataclass
class Copies:
    """A copier and a packer that need no upstream; note what they were asked for."""

    asked: list[tuple[str, set[int]]] = field(default_factory=list)
    parcels: list[list[str]] = field(default_factory=list)
    failing: str = ""
    wrong_parts: bool = False  # what an earlier attempt stored is not of this file
    store: MemoryStore = field(default_factory=MemoryStore)

    async def copy(
        self, located: LocatedFile, stored: Mapping[int, Digest], on_stored: ChunkStored, _: UnderWay
    ) -> FileLayout:
        self.asked.append((located.file.path, set(stored)))
        if self.wrong_parts and stored:
            raise ChecksumMismatchError(located.file.path, "right", "wrong")
        layout = layout_of(located.file.size)
        for chunk in layout.placed():
            if chunk.index not in stored:
                self.store.put(chunk.digest, bytearray())
                on_stored(chunk.index, chunk.digest, chunk.range.size)
        return layout

    def put(self, size: int) -> None:
        """What a file of this size lies in, as somebody else put it."""
        layout = layout_of(size)
        for digest in layout.chunks if layout.slice is None else (SLAB.digest,):
            self.store.put(digest, bytearray())

    async def pack(
        self, parcel: Sequence[LocatedFile], on_packed: PackedFile, on_wrong: WrongContent, _: UnderWay
    ) -> None:
        self.parcels.append([located.file.path for located in parcel])
        await asyncio.sleep(0)
        for located in parcel:
            if located.file.path == self.failing:
                raise UpstreamUnavailableError("s", "gone")
            self.store.put(SLAB.digest, bytearray())
            on_packed(located, layout_of(located.file.size), SLAB)


@dataclass
class Rig:
    database: Database
    copies: Copies = field(default_factory=Copies)
    in_progress: CopiesInProgress = field(default_factory=CopiesInProgress)

    async def record(self, wanted: UpstreamFile) -> None:
        """It is complete, as far as the database knows."""
        async with self.database.write() as session:
            await contents.record_slabs(session, [SLAB])
            await contents.record_contents(session, {wanted.identity.key: layout_of(wanted.size)}, 1.0)

    async def half_copied(self, *indexes: int) -> None:
        """These chunks of the large file are stored, as far as the database knows."""
        chunks = [(LARGE.identity.key, index, NAMES[index]) for index in indexes]
        async with self.database.write() as session:
            await contents.record_chunks(session, chunks, 1.0)

    async def gather(self, *files: UpstreamFile, recorded: set[str] | None = None, stored: int = 0) -> SourceCounters:
        """Bring files of which a survey found nothing, or so many bytes of the first."""
        progress = Progress(self.database, "mir_1", "worker:1", lambda _: None, lambda _: None)
        total = sum(file.size for file in files)
        progress.counters[0] = SourceCounters(0, stored)
        half = {files[0].identity.key: stored} if stored else {}
        survey = Survey(Resolution(None), Listing(files), bytes([1] * len(files)), half, (), total - stored)
        copier: Copier = self.copies  # type: ignore[assignment]
        unused: Any = None
        stored_contents, known = StoredContents(self.database, self.copies.store), recorded or set()
        copying = CopyMissing(stored_contents, copier, self.in_progress, progress, unused, "s", 0, survey, known)
        await copying.run()
        await progress.flush()
        async with self.database.read() as session:
            digests = await contents.known(session, [file.identity.key for file in files])
        assert digests == {file.identity.key: layout_of(file.size).digest for file in files}
        assert progress.counters[0].transferred + progress.counters[0].reused == total
        return progress.counters[0]


@pytest.fixture
def rig(database: Database) -> Rig:
    return Rig(database)


def file(path: str, size: int) -> UpstreamFile:
    return UpstreamFile(path, size, Identity.of("public", path), path, "v")


SMALL, LARGE = file("small", 10), file("large", 2 * CHUNK_SIZE + 5)


async def test_what_is_missing_is_brought_and_counted(rig: Rig) -> None:
    counters = await rig.gather(SMALL, LARGE)
    assert (rig.copies.asked, rig.copies.parcels) == ([("large", set())], [["small"]])
    assert (counters.transferred, counters.reused) == (LARGE.size + 10, 0)


@pytest.mark.parametrize(("wanted", "told"), [
    (SMALL, {SMALL.identity.key}), (LARGE, {LARGE.identity.key}),
    (LARGE, set()),  # it is looked for without being told
], ids=["small", "large", "large, not told"])  # fmt: skip
async def test_what_another_mirror_brought_since_the_survey_is_found(
    rig: Rig, wanted: UpstreamFile, told: set[str]
) -> None:
    rig.copies.put(wanted.size)
    await rig.record(wanted)
    counters = await rig.gather(wanted, recorded=told)
    assert (rig.copies.asked, rig.copies.parcels) == ([], [])
    assert (counters.transferred, counters.reused) == (0, wanted.size)


@pytest.mark.parametrize(("stored", "surveyed"), [({1}, 0), ({1}, CHUNK_SIZE), (set(), CHUNK_SIZE)],
                         ids=["since the survey", "before the survey", "dropped since the survey"])  # fmt: skip
async def test_chunks_that_an_earlier_attempt_stored_are_not_brought_again(
    rig: Rig, stored: set[int], surveyed: int
) -> None:
    for index in stored:
        rig.copies.store.put(NAMES[index], bytearray())
        await rig.half_copied(index)
    counters = await rig.gather(LARGE, stored=surveyed)
    assert rig.copies.asked == [("large", stored)]
    reused = CHUNK_SIZE * len(stored)
    assert (counters.transferred, counters.reused) == (LARGE.size - reused, reused)


TINY = [file(f"tiny-{number}", number + 1) for number in range(5)]


async def test_two_mirrors_of_the_same_small_files_fetch_each_once(rig: Rig) -> None:
    first, second = await asyncio.gather(rig.gather(*TINY[:4]), rig.gather(*TINY[1:]))
    assert sorted(path for parcel in rig.copies.parcels for path in parcel) == [each.path for each in TINY]
    assert (first.transferred, first.reused) == (10, 0)
    assert (second.transferred, second.reused) == (5, 9)


async def test_who_waits_for_a_parcel_that_fails_fetches_itself_what_did_not_come(rig: Rig) -> None:
    rig.copies.failing = "tiny-2"
    waiting = [file("tiny-1", 2), file("tiny-3", 4)]
    failed, other = await asyncio.gather(rig.gather(*TINY), rig.gather(*waiting), return_exceptions=True)
    assert isinstance(failed, UpstreamUnavailableError)
    assert isinstance(other, SourceCounters)
    assert (other.transferred, other.reused) == (4, 2)
    assert rig.copies.parcels == [[each.path for each in TINY], ["tiny-3"]]


async def test_a_file_whose_earlier_chunks_are_wrong_is_copied_from_the_start(rig: Rig) -> None:
    rig.copies.store.put(NAMES[1], bytearray())
    await rig.half_copied(1)
    rig.copies.wrong_parts = True
    counters = await rig.gather(LARGE, stored=CHUNK_SIZE)
    assert rig.copies.asked == [("large", {1}), ("large", set())]
    assert (counters.transferred, counters.reused) == (LARGE.size, 0)
    async with rig.database.read() as session:
        unnamed = removal.Unnamed.among(rig.copies.store.stored([NAMES[1]]))
        await removal.strike_named(session, unnamed, None)
        assert not unnamed.left  # it is evidence


@pytest.mark.parametrize("wanted", [SMALL, LARGE], ids=["small", "large"])
async def test_what_is_recorded_and_gone_from_the_store_is_brought_again(rig: Rig, wanted: UpstreamFile) -> None:
    """Somebody collects it between the look at the rows and the look at the chunks."""
    await rig.record(wanted)
    counters = await rig.gather(wanted, recorded={wanted.identity.key})
    assert (counters.transferred, counters.reused) == (wanted.size, 0)


async def test_a_half_copied_file_that_is_gone_on_with_is_as_good_as_new(rig: Rig) -> None:
    rig.copies.store.put(NAMES[1], bytearray())
    await rig.half_copied(0, 1)
    stored, before = StoredContents(rig.database, rig.copies.store), time.time()
    assert await stored.parts(LARGE.identity.key) == {1: NAMES[1]}  # the other one is gone
    assert {chunk.kept_at >= before for chunk in rig.copies.store.stored()} == {True}
    async with rig.database.write() as session:
        assert (await removal.take_half_copied(session, before)).count == 0


async def test_what_somebody_else_brought_and_is_gone_since_is_brought_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mirror ended, and nobody who runs now ever put these chunks."""
    loop, key = asyncio.get_running_loop(), LARGE.identity.key
    assert rig.in_progress.lead(key)
    rig.in_progress.land(key, layout_of(LARGE.size))

    def gone(_: Sequence[Digest]) -> set[Digest]:
        loop.call_soon_threadsafe(rig.in_progress.recorded, [key], "mir_0")
        return set()

    monkeypatch.setattr(rig.copies.store, "keep", gone)
    assert (await rig.gather(LARGE)).transferred == LARGE.size


def test_a_source_learns_what_others_record_and_the_only_source_of_a_mirror_nothing_of_itself() -> None:
    copies = CopiesInProgress()
    with copies.recorded_by_others("a") as alone:
        copies.recorded(["1"], "a")
        assert alone == set()
        with copies.recorded_by_others("b") as other:
            copies.recorded(["2"], "a")
            assert (alone, other) == (set(), {"2"})
            with copies.recorded_by_others("a") as second:
                copies.recorded(["3"], "a")
                assert (alone, other, second) == ({"3"}, {"2", "3"}, {"3"})
        copies.recorded(["4"], "b")
        assert alone == {"3", "4"}
    copies.recorded(["5"], "b")
    assert alone == {"3", "4"}
