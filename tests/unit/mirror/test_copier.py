"""One file, chunk by chunk: what is fetched, what is not, and how it ends early."""

import asyncio
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import BinaryIO

import pytest

from bdn.core.chunk import CHUNK_SIZE, EMPTY, Digest, FileLayout, digest_of
from bdn.core.errors import ChecksumMismatchError
from bdn.core.source.upstream import Checksum, ChecksumKind, Identity, Location, UpstreamFile
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.upstream.budget import UpstreamRetries
from bdn.mirror.upstream.reader import LocatedFile, UpstreamReader
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.ranged import RangedReader, RangeRequest
from tests.support.content.memory_store import MemoryStore

CONTENT = bytes(range(251)) * (2 * CHUNK_SIZE // 251 + 7)
CHUNKS = [CONTENT[start : start + CHUNK_SIZE] for start in range(0, len(CONTENT), CHUNK_SIZE)]
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Ranges(RangedReader):
    """Reads from memory, and notes which chunks."""

    def __init__(self) -> None:
        super().__init__(ConnectionPool(timeout_seconds=1))
        self.read: list[int] = []
        self.stated: Checksum | None = None

    def read_into(
        self, location: Location, request: RangeRequest, buffer: memoryview, is_wanted: Callable[[], bool] | None = None
    ) -> Checksum | None:
        assert location.url == "memory"
        self.read.append(request.range.start // CHUNK_SIZE)
        buffer[:] = CONTENT[request.range.start : request.range.stop]
        return self.stated


class OneFile:
    """A source that is asked for one location."""

    def __init__(self) -> None:
        self.located = 0
        self.checksum: Checksum | None = None

    async def locate(self, file: UpstreamFile) -> Location:
        self.located += 1
        return Location("memory", checksum=self.checksum)


class Bench:
    def __init__(self, store: MemoryStore, threads: ByteThreads) -> None:
        self.store, self.ranges, self.source = store, Ranges(), OneFile()
        self.copier = Copier(store, UpstreamReader(self.ranges, threads, UpstreamRetries()))
        self.told: list[tuple[int, Digest, int]] = []

    async def copy(
        self, sha256: str | None = SHA256, size: int = len(CONTENT), stored: Mapping[int, Digest] = {}
    ) -> FileLayout:
        checksum = Checksum(ChecksumKind.SHA256, sha256) if sha256 else None
        file = UpstreamFile("a.bin", size, Identity.of("public", "a"), "a.bin", "v", checksum)
        located = LocatedFile("hf://o/r", self.source, file)
        return await self.copier.copy(located, stored, lambda *chunk: self.told.append(chunk))


class CountingStore(MemoryStore):
    """Says when a chunk is read back."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0
        self.on_open: Callable[[], object] = bool

    def open(self, digest: Digest) -> BinaryIO:
        self.opened += 1
        self.on_open()
        return super().open(digest)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def bench(store: CountingStore) -> Iterator[Bench]:
    threads = ByteThreads(2, "test")
    yield Bench(store, threads)
    threads.close()


async def test_every_chunk_is_fetched_stored_and_told_once(bench: Bench) -> None:
    layout = await bench.copy()
    names = [digest_of(chunk) for chunk in CHUNKS]
    assert layout == FileLayout.of(len(CONTENT), tuple(names))
    assert sorted(bench.told) == [(index, names[index], len(CHUNKS[index])) for index in range(3)]
    assert (sorted(bench.ranges.read), bench.source.located) == ([0, 1, 2], 1)


async def test_chunks_that_are_stored_already_are_not_fetched_but_checked_with_the_others(bench: Bench) -> None:
    stored = {}
    for index in (0, 2):
        stored[index] = digest_of(CHUNKS[index])
        bench.store.put(stored[index], bytearray(CHUNKS[index]))
    await bench.copy(stored=stored)
    assert (bench.ranges.read, len(bench.told)) == ([1], 1)


async def test_a_file_that_is_stored_whole_asks_for_no_location(bench: Bench) -> None:
    stored = {index: digest_of(chunk) for index, chunk in enumerate(CHUNKS)}
    for chunk in CHUNKS:
        bench.store.put(digest_of(chunk), bytearray(chunk))
    await bench.copy(stored=stored)
    assert (bench.ranges.read, bench.source.located) == ([], 0)
    with pytest.raises(ChecksumMismatchError):
        await bench.copy(sha256="0" * 64, stored=stored)


async def test_an_empty_file_is_checked_without_a_request(bench: Bench) -> None:
    layout = await bench.copy(hashlib.sha256(b"").hexdigest(), 0)
    assert (layout.digest, bench.source.located, bench.told) == (EMPTY, 0, [])
    with pytest.raises(ChecksumMismatchError, match=r"'a\.bin' of hf://o/r"):
        await bench.copy("0" * 64, 0)


async def test_canceling_while_a_file_is_checked_does_not_wait_for_the_rest_of_it(
    bench: Bench, store: CountingStore
) -> None:
    loop = asyncio.get_running_loop()
    store.put(digest_of(CHUNKS[0]), bytearray(CHUNKS[0]))
    copying = asyncio.create_task(bench.copy(stored={0: digest_of(CHUNKS[0])}))
    store.on_open = lambda: loop.call_soon_threadsafe(copying.cancel)
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert store.opened < 3


async def test_a_file_is_checked_on_its_way_and_not_read_back(bench: Bench, store: CountingStore) -> None:
    await bench.copy()
    with pytest.raises(ChecksumMismatchError, match=r"'a\.bin' of hf://o/r"):
        await bench.copy(sha256="0" * 64)
    assert store.opened == 0


CRC32 = f"{zlib.crc32(CONTENT):08x}"


async def test_a_checksum_that_is_only_known_with_the_location_is_checked(bench: Bench, store: CountingStore) -> None:
    bench.source.checksum = Checksum(ChecksumKind.CRC32, CRC32)
    await bench.copy(sha256=None)
    bench.source.checksum = Checksum(ChecksumKind.CRC32, "00000000")
    with pytest.raises(ChecksumMismatchError):
        await bench.copy(sha256=None)
    assert store.opened == 0


async def test_of_a_checksum_of_parts_only_the_parts_that_were_stored_before_are_read_back(
    bench: Bench, store: CountingStore
) -> None:
    store.put(digest_of(CHUNKS[1]), bytearray(CHUNKS[1]))
    for crc, outcome in ((CRC32, nullcontext()), ("00000000", pytest.raises(ChecksumMismatchError))):
        bench.source.checksum = Checksum(ChecksumKind.CRC32, crc)
        store.opened = 0
        with outcome:
            await bench.copy(sha256=None, stored={1: digest_of(CHUNKS[1])})
        assert store.opened == 1


async def test_a_checksum_that_only_the_answer_states_is_checked_for_a_file_of_one_chunk(bench: Bench) -> None:
    size = CHUNK_SIZE
    bench.ranges.stated = Checksum(ChecksumKind.CRC32, f"{zlib.crc32(CHUNKS[0]):08x}")
    await bench.copy(sha256=None, size=size)
    bench.told.clear()
    bench.ranges.stated = Checksum(ChecksumKind.CRC32, "00000000")
    with pytest.raises(ChecksumMismatchError):
        await bench.copy(sha256=None, size=size)
    assert bench.told == [(0, digest_of(CHUNKS[0]), size)]  # it is stored as evidence


async def test_a_file_without_any_checksum_is_copied(bench: Bench) -> None:
    assert (await bench.copy(sha256=None)).size == len(CONTENT)
