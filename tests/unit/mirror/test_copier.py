"""Large files chunk by chunk, small ones packed into slabs, and the checksum of the whole: what is fetched, and how it ends early."""

import asyncio
import hashlib
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import BinaryIO

import pytest

from bdn.core.chunk import CHUNK_SIZE, EMPTY, Buffer, Digest, FileLayout, Slice, digest_of
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    ChecksumMismatchError,
    SourceChangedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.retry import OUTAGE_SECONDS
from bdn.core.source.upstream import Checksum, ChecksumKind, Identity, Location, UpstreamFile
from bdn.mirror.ingest import copier as module
from bdn.mirror.ingest.copier import Copier, Packed, WholeCheck, whole_check
from bdn.mirror.upstream.budget import UpstreamBudgets
from bdn.mirror.upstream.reader import LocatedFile, UpstreamReader
from bdn.mirror.upstream.retries import UpstreamRetries
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest
from bdn.transfer.under_way import UnderWay
from tests.support.content.layouts import pieces
from tests.support.content.memory_store import MemoryStore
from tests.support.content.noise import MIB, noise

CONTENT = noise(17 * MIB + 3, 1)
CHUNKS = pieces(CONTENT)
NAMES = [digest_of(chunk) for chunk in CHUNKS]
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CRC32 = f"{zlib.crc32(CONTENT):08x}"
WRONG_CRC32 = Checksum(ChecksumKind.CRC32, "00000000")
SMALL = {f"file-{number}": f"content of {number} ".encode() * (number + 1) for number in range(10)}
PATHS = list(SMALL)


class Upstream(RangedReader):
    """Serves from memory, unless the next thing scripted for a path says otherwise; notes the paths and chunks asked for."""

    def __init__(self) -> None:
        super().__init__(ConnectionPool(timeout_seconds=1))
        self.asked: list[str] = []
        self.chunks: list[int] = []
        self.scripted: dict[str, list[BdnError | Callable[[], None]]] = {}
        self.stated: Checksum | None = None

    def read_into(
        self,
        location: Location,
        request: RangeRequest,
        buffer: memoryview,
        goes_on: Callable[[int], bool] | None = None,
    ) -> Checksum | None:
        assert goes_on is not None
        self.asked.append(request.path)
        self.chunks.append(request.range.start // CHUNK_SIZE)
        if scripted := self.scripted.get(request.path):
            goes_on(len(buffer) // 2)
            happening = scripted.pop(0)
            if isinstance(happening, BdnError):
                raise happening
            happening()
        buffer[:] = SMALL.get(request.path, CONTENT)[request.range.start : request.range.stop]
        goes_on(len(buffer))
        return self.stated


class Places:
    """A source that is asked for locations."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.checksum: Checksum | None = None

    async def locate(self, file: UpstreamFile) -> Location:
        self.asked.append(file.path)
        return Location(f"http://upstream/{file.path}?{len(self.asked)}", checksum=self.checksum)


class CountingStore(MemoryStore):
    """Says when a chunk is put, and when one is read back."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0
        self.on_open: Callable[[], object] = bool
        self.on_put: Callable[[], object] = bool

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        self.on_put()
        super().put(digest, content)

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        self.opened += 1
        self.on_open()
        return super().open(digest, reader=reader)


class Bench:
    def __init__(self, threads: ByteThreads) -> None:
        self.store, self.upstream, self.source = CountingStore(), Upstream(), Places()
        self.pauses: list[float] = []
        reader = UpstreamReader(self.upstream, threads, UpstreamRetries(UpstreamBudgets(pause=self._pause)))
        self.copier = Copier(self.store, reader)
        self.told: list[tuple[int, Digest, int]] = []
        self.wrong: list[tuple[str, Digest]] = []
        self.packed: Packed | None = None
        self.under_way = UnderWay()
        self.shown: list[int] = []  # bytes told of and bytes under way, whenever somebody could look

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.look()

    def break_off(self) -> None:
        self.look()
        raise unavailable()

    def look(self) -> None:
        told = sum(size for _, _, size in self.told)
        self.shown.append(told + self.under_way.received)

    async def copy(
        self, sha256: str | None = SHA256, size: int = len(CONTENT), stored: Mapping[int, Digest] = {}
    ) -> FileLayout:
        checksum = Checksum(ChecksumKind.SHA256, sha256) if sha256 else None
        file = UpstreamFile("a.bin", size, Identity.of("public", "a"), "a.bin", "v", checksum)
        located = LocatedFile("hf://o/r", self.source, file)
        return await self.copier.copy(located, stored, self.store.put, self._note_chunk, self.under_way)

    def have(self, *indexes: int) -> dict[int, Digest]:
        """An earlier attempt has stored these chunks."""
        for index in indexes:
            self.store.put(NAMES[index], bytearray(CHUNKS[index]))
        return {index: NAMES[index] for index in indexes}

    async def pack(
        self,
        paths: Sequence[str] = PATHS,
        checksum: Checksum | None = None,
        prior: Mapping[str, FileLayout] = {},
    ) -> None:
        files = [UpstreamFile(p, len(SMALL[p]), Identity.of("public", p), p, "v", checksum) for p in paths]
        located = [LocatedFile("s3://bucket", self.source, file) for file in files]
        self.packed = await self.copier.pack(located, prior, self.store.put, self._note_wrong, self.under_way)

    def _note_chunk(self, index: int, digest: Digest, size: int) -> None:
        self.told.append((index, digest, size))
        self.look()

    async def _note_wrong(self, located: LocatedFile, content: bytes, _: ChecksumMismatchError) -> None:
        self.wrong.append((located.file.path, digest_of(content)))

    def check(self, paths: Sequence[str] = PATHS) -> None:
        """The slab is in the store: these files one after the other."""
        assert self.packed is not None
        slab, digests, _ = self.packed
        with self.store.open(slab) as file:
            assert file.read() == b"".join(SMALL[path] for path in paths)
        assert digests == [digest_of(SMALL[path]) for path in paths]


@pytest.fixture
def bench() -> Iterator[Bench]:
    threads = ByteThreads(2, "test")
    yield Bench(threads)
    threads.close()


# --- a large file ---


@pytest.mark.parametrize("sha256", [SHA256, None], ids=["a checksum", "none"])
async def test_every_chunk_is_fetched_stored_and_told_once(bench: Bench, sha256: str | None) -> None:
    assert await bench.copy(sha256) == FileLayout.of(len(CONTENT), tuple(NAMES))
    assert sorted(bench.told) == [(index, NAMES[index], len(CHUNKS[index])) for index in range(3)]
    assert (sorted(bench.upstream.chunks), len(bench.source.asked)) == ([0, 1, 2], 1)


async def test_an_outage_that_fails_more_requests_than_a_file_is_forgiven_rounds_is_survived(bench: Bench) -> None:
    bench.upstream.scripted["a.bin"] = [unavailable() for _ in range(15)]
    await bench.copy()
    assert len(bench.pauses) == 15


async def test_what_has_come_of_a_chunk_is_under_way_until_it_is_told_or_lost(bench: Bench) -> None:
    bench.upstream.scripted["a.bin"] = [bench.break_off, bench.look]
    bench.store.on_put = bench.look
    await bench.copy(sha256=None, size=CHUNK_SIZE)
    half_lost, half_put_told = [CHUNK_SIZE // 2, 0], [CHUNK_SIZE // 2, CHUNK_SIZE, CHUNK_SIZE]
    assert bench.shown == half_lost + half_put_told
    assert bench.under_way.received == 0


async def test_chunks_that_are_stored_already_are_not_fetched_but_checked_with_the_others(bench: Bench) -> None:
    await bench.copy(stored=bench.have(0, 2))
    assert (bench.upstream.chunks, len(bench.told)) == ([1], 1)


async def test_a_file_that_is_stored_whole_asks_for_no_location(bench: Bench) -> None:
    stored = bench.have(0, 1, 2)
    await bench.copy(stored=stored)
    assert (bench.upstream.asked, bench.source.asked) == ([], [])
    with pytest.raises(ChecksumMismatchError):
        await bench.copy(sha256="0" * 64, stored=stored)


async def test_an_empty_file_is_checked_without_a_request(bench: Bench) -> None:
    layout = await bench.copy(hashlib.sha256(b"").hexdigest(), 0)
    assert (layout.digest, bench.source.asked, bench.told) == (EMPTY, [], [])
    with pytest.raises(ChecksumMismatchError, match=r"'a\.bin' of hf://o/r"):
        await bench.copy("0" * 64, 0)


async def test_canceling_while_a_file_is_checked_does_not_wait_for_the_rest_of_it(bench: Bench) -> None:
    loop = asyncio.get_running_loop()
    copying = asyncio.create_task(bench.copy(stored=bench.have(0)))
    bench.store.on_open = lambda: loop.call_soon_threadsafe(copying.cancel)
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert bench.store.opened < 3


async def test_a_file_is_checked_on_its_way_and_not_read_back(bench: Bench) -> None:
    await bench.copy()
    with pytest.raises(ChecksumMismatchError, match=r"'a\.bin' of hf://o/r"):
        await bench.copy(sha256="0" * 64)
    assert bench.store.opened == 0


@pytest.mark.parametrize("stored", [(), (1,)], ids=["nothing", "one chunk"])
async def test_of_a_checksum_that_comes_with_the_location_only_what_was_stored_before_is_read_back(
    bench: Bench, stored: tuple[int, ...]
) -> None:
    known = bench.have(*stored)
    for crc, outcome in ((CRC32, nullcontext()), ("00000000", pytest.raises(ChecksumMismatchError))):
        bench.source.checksum = Checksum(ChecksumKind.CRC32, crc)
        bench.store.opened = 0
        with outcome:
            await bench.copy(sha256=None, stored=known)
        assert bench.store.opened == len(stored)


async def test_a_checksum_that_only_the_answer_states_is_checked_for_a_file_of_one_chunk(bench: Bench) -> None:
    size = CHUNK_SIZE
    bench.upstream.stated = Checksum(ChecksumKind.CRC32, f"{zlib.crc32(CHUNKS[0]):08x}")
    await bench.copy(sha256=None, size=size)
    bench.told.clear()
    bench.upstream.stated = WRONG_CRC32
    with pytest.raises(ChecksumMismatchError):
        await bench.copy(sha256=None, size=size)
    assert bench.told == [(0, NAMES[0], size)]  # it is stored as evidence


# --- a parcel of small files ---


def unavailable() -> BdnError:
    return UpstreamUnavailableError("s3://bucket", "reset")


async def test_small_files_become_one_slab_with_one_request_for_each(bench: Bench) -> None:
    await bench.pack()
    bench.check()
    assert bench.upstream.asked == PATHS


async def test_files_of_an_earlier_slab_are_read_from_the_store(bench: Bench) -> None:
    await bench.pack(PATHS[:5])
    assert bench.packed is not None
    slab, digests, _ = bench.packed
    offsets = itertools.accumulate((len(SMALL[path]) for path in PATHS[:5]), initial=0)
    size = sum(len(SMALL[path]) for path in PATHS[:5])
    prior = {
        Identity.of("public", path).key: FileLayout(digest, len(SMALL[path]), (digest,), Slice(slab, size, offset))
        for path, digest, offset in zip(PATHS[:5], digests, offsets, strict=False)
    }
    gone = digest_of(b"gone")
    other = prior[Identity.of("public", PATHS[1]).key]
    prior[Identity.of("public", PATHS[1]).key] = FileLayout(
        other.digest, other.size, other.chunks, Slice(gone, size, 0)
    )
    bench.upstream.asked.clear()
    await bench.pack(prior=prior)
    bench.check()
    assert bench.upstream.asked == [PATHS[1], *PATHS[5:]]  # the slab of one is not there
    assert bench.packed.fetched == sum(len(SMALL[path]) for path in bench.upstream.asked)


async def test_an_interruption_fetches_no_file_twice(bench: Bench) -> None:
    bench.upstream.scripted["file-4"] = [unavailable()]
    await bench.pack()
    bench.check()
    assert bench.upstream.asked == [*PATHS[:5], *PATHS[4:]]
    assert len(bench.pauses) == 1


async def test_a_file_that_fails_again_and_again_is_waited_for_and_then_given_up(bench: Bench) -> None:
    bench.upstream.scripted["file-4"] = [unavailable() for _ in range(100)]
    with pytest.raises(UpstreamUnavailableError):
        await bench.pack()
    assert bench.upstream.asked.count("file-4") > 3
    assert sum(bench.pauses) <= OUTAGE_SECONDS + 0.001
    assert len(bench.pauses) == bench.upstream.asked.count("file-4") - 1


async def test_failures_between_files_that_arrive_are_waited_out_and_do_not_add_up(bench: Bench) -> None:
    for path in PATHS[1:]:
        bench.upstream.scripted[path] = [unavailable()]
    await bench.pack()
    bench.check()
    assert len(bench.pauses) == len(PATHS) - 1


async def test_a_failure_that_stays_ends_it_at_once(bench: Bench) -> None:
    bench.upstream.scripted["file-4"] = [SourceChangedError("s3://bucket", "file-4", "it no longer exists")]
    with pytest.raises(SourceChangedError):
        await bench.pack()
    assert (bench.upstream.asked.count("file-4"), bench.pauses) == (1, [])


async def test_a_location_that_expired_is_asked_for_again_and_only_that_one(bench: Bench) -> None:
    bench.upstream.scripted["file-4"] = [LocationRefusedError("s3://bucket", "403")]
    await bench.pack()
    bench.check()
    assert [path for path in PATHS if bench.source.asked.count(path) != 1] == ["file-4"]


async def test_a_fresh_location_that_is_refused_as_well_is_a_refusal(bench: Bench) -> None:
    bench.upstream.scripted["file-0"] = [LocationRefusedError("s3://bucket", "403") for _ in range(2)]
    with pytest.raises(AuthRequiredError) as caught:
        await bench.pack()
    assert type(caught.value) is AuthRequiredError
    assert bench.packed is None


async def test_a_file_with_the_wrong_content_is_named_and_never_packed(bench: Bench) -> None:
    wrong = Checksum(ChecksumKind.SHA256, "0" * 64)
    with pytest.raises(ChecksumMismatchError, match="'file-0' of s3://bucket"):
        await bench.pack(checksum=wrong)
    assert (bench.packed, bench.wrong) == (None, [("file-0", digest_of(SMALL["file-0"]))] * 2)


async def test_a_checksum_that_only_the_answer_states_is_checked(bench: Bench) -> None:
    bench.upstream.stated = Checksum(ChecksumKind.MD5, hashlib.md5(SMALL["file-3"]).hexdigest())
    await bench.pack(["file-3"])
    bench.check(["file-3"])
    with pytest.raises(ChecksumMismatchError):
        await bench.pack(["file-5"])


async def test_canceling_waits_for_one_file_and_not_for_the_parcel(bench: Bench) -> None:
    loop, reached, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hang() -> None:
        loop.call_soon_threadsafe(reached.set)
        assert go_on.wait(60)

    bench.upstream.scripted["file-2"] = [hang]
    packing = asyncio.create_task(bench.pack())
    await reached.wait()
    packing.cancel()
    for _ in range(10):  # the cancellation reaches the group, then its tasks
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await packing
    assert bench.upstream.asked == PATHS[:3]


# --- the checksum of a whole file, whatever the order in which its chunks come ---

BY_NAME = dict(zip(NAMES, CHUNKS, strict=True))
RIGHT = {ChecksumKind.SHA1: hashlib.sha1(CONTENT).hexdigest(), ChecksumKind.CRC32: CRC32}
ORDERS = [
    (order, stored)
    for stored in ((), (0,), (1,), (0, 1), (2,), (0, 1, 2))
    for order in itertools.permutations(index for index in range(3) if index not in stored)
]


class ReadBack:
    def __init__(self) -> None:
        self.read: list[Digest] = []

    def __call__(self, digest: Digest, buffer: memoryview) -> None:
        self.read.append(digest)
        buffer[:] = BY_NAME[digest]


def bring(check: WholeCheck, order: Sequence[int]) -> None:
    for index in order:
        buffer = bytearray(CHUNKS[index])
        check.take(index, NAMES[index], memoryview(buffer))


def finish(check: WholeCheck, read_back: ReadBack) -> None:
    for index in check.left():
        read_back.read.append(NAMES[index])
        check.take_back(index, bytearray(CHUNKS[index]))
    check.check("file")


def sha1_check(read_back: ReadBack) -> WholeCheck:
    return whole_check(Checksum(ChecksumKind.SHA1, RIGHT[ChecksumKind.SHA1]), len(CONTENT), {}, read_back)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 0.0)


@pytest.mark.parametrize(("order", "stored"), ORDERS)
@pytest.mark.parametrize("kind", list(RIGHT))
@pytest.mark.usefixtures("no_waiting")
def test_every_order_gives_the_checksum_of_the_whole(
    kind: ChecksumKind, order: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    for digits, is_right in ((RIGHT[kind], True), ("0" * len(RIGHT[kind]), False)):
        read_back = ReadBack()
        check = whole_check(Checksum(kind, digits), len(CONTENT), {index: NAMES[index] for index in stored}, read_back)
        bring(check, order)
        if is_right:
            finish(check, read_back)
        else:
            with pytest.raises(ChecksumMismatchError):
                finish(check, read_back)
        assert len(read_back.read) == len(set(read_back.read))
        if kind.is_combinable:
            assert set(read_back.read) == {NAMES[index] for index in stored}


def test_a_chunk_that_comes_a_little_early_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 30.0)
    read_back = ReadBack()
    check = sha1_check(read_back)
    with ThreadPoolExecutor(2) as threads:
        early = [threads.submit(bring, check, [index]) for index in (2, 1)]
        bring(check, [0])
        for one in early:
            one.result(30)
    finish(check, read_back)
    assert read_back.read == []


def test_who_waits_for_a_turn_is_sent_home_when_nobody_wants_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 60.0)
    check = sha1_check(ReadBack())
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(bring, check, [2])
        check.stop()
        waiting.result(30)
