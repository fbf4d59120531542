"""A file of several chunks from a server that ignores ``Range``: one answer, read once, in order."""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from bdn.core.chunk import CHUNK_SIZE, ByteRange, Digest, FileLayout, digest_of
from bdn.core.errors import ChecksumMismatchError, SourceChangedError, UpstreamUnavailableError
from bdn.core.source.upstream import Checksum, ChecksumKind, Identity, Location, UpstreamFile
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.upstream.budget import UpstreamBudgets
from bdn.mirror.upstream.reader import LocatedFile, UpstreamReader
from bdn.mirror.upstream.retries import UpstreamRetries
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.in_order import InOrderReader
from bdn.transfer.ranged import RangedReader, RangeRequest
from bdn.transfer.under_way import UnderWay
from tests.doubles import faults
from tests.doubles.http_origin import Answer, Origin, Request
from tests.support.content.layouts import pieces
from tests.support.content.memory_store import MemoryStore
from tests.support.content.noise import MIB, noise
from tests.support.network.raw_server import RawServer, answering, message
from tests.support.network.upstream import CONTENT as SMALL
from tests.support.network.upstream import SIZE as SMALL_SIZE
from tests.support.network.upstream import SOURCE

CONTENT = noise(17 * MIB + 3, 1)
OTHER = bytes(len(CONTENT))
CHUNKS = pieces(CONTENT)
NAMES = [digest_of(chunk) for chunk in CHUNKS]
ETAG = '"v1"'
SHA256 = Checksum(ChecksumKind.SHA256, hashlib.sha256(CONTENT).hexdigest())


class Bench:
    """A server without ranges, and a copier that reads from it."""

    def __init__(self, stack: ExitStack) -> None:
        self.served, self.etag = CONTENT, ETAG
        self.origin = stack.enter_context(Origin("origin", self._answer))
        self.threads = stack.enter_context(closing(ByteThreads(1, "test")))
        self.store = MemoryStore()
        self.told: list[int] = []
        self.url = f"{self.origin.url}/file"
        self.pinned: str | None = ETAG
        self.stored = asyncio.Event()
        pool = stack.enter_context(closing(ConnectionPool(timeout_seconds=10)))
        reader = UpstreamReader(RangedReader(pool), self.threads, UpstreamRetries(UpstreamBudgets(pause=self._pause)))
        self.copier = Copier(self.store, reader)

    async def copy(
        self, checksum: Checksum | None = SHA256, size: int = len(CONTENT), stored: tuple[int, ...] = ()
    ) -> FileLayout:
        for index in stored:
            self.store.put(NAMES[index], bytearray(CHUNKS[index]))
        file = UpstreamFile("file", size, Identity.of("public", "file"), "file", "v1", checksum)
        known = {index: NAMES[index] for index in stored}
        return await self.copier.copy(
            LocatedFile("hf://o/r", self, file), known, self.store.put, self._note, UnderWay()
        )

    async def locate(self, _: UpstreamFile) -> Location:
        return Location(self.url, etag=self.pinned)

    def _answer(self, _: Request) -> Answer:
        return Answer(200, {"ETag": self.etag}, self.served)

    def _note(self, index: int, _: Digest, size: int) -> None:
        assert size == len(CHUNKS[index])
        self.told.append(index)
        self.stored.set()

    @staticmethod
    async def _pause(_: float) -> None:
        """No time passes."""


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


RANGED = 3  # requests for the first range, before the file is read in order


def ranges(bench: Bench) -> list[str | None]:
    """Of the requests; None for the whole file."""
    return [request.headers.get("range") for request in bench.origin.log.find()]


@pytest.mark.parametrize("checksum", [SHA256, None], ids=["a checksum", "none"])
async def test_a_file_of_several_chunks_is_read_once_and_in_order_where_ranges_are_ignored(
    bench: Bench, checksum: Checksum | None
) -> None:
    assert await bench.copy(checksum) == FileLayout.of(len(CONTENT), tuple(NAMES))
    assert bench.told == [0, 1, 2]
    assert ranges(bench) == [f"bytes=0-{CHUNK_SIZE - 1}"] * RANGED + [None]


async def test_workers_that_share_a_file_end_in_one_request_for_all_of_it(bench: Bench) -> None:
    with closing(ByteThreads(1, "test")) as threads:
        bench.copier = replace(bench.copier, reader=replace(bench.copier.reader, threads=threads))
        assert await bench.copy() == FileLayout.of(len(CONTENT), tuple(NAMES))
    assert ranges(bench).count(None) == 1


async def test_chunks_that_are_stored_already_are_not_stored_again(bench: Bench) -> None:
    await bench.copy(stored=(0, 2))
    assert bench.told == [1]
    assert ranges(bench).count(None) == 1


async def test_wrong_content_is_a_wrong_checksum(bench: Bench) -> None:
    bench.served = OTHER
    with pytest.raises(ChecksumMismatchError):
        await bench.copy()


@pytest.mark.parametrize("fault", [faults.truncate(2 * CHUNK_SIZE + 5), faults.reset(2 * CHUNK_SIZE + 5)])
async def test_an_answer_that_breaks_off_is_requested_again_and_what_is_stored_is_dropped(
    bench: Bench, fault: faults.Fault
) -> None:
    bench.origin.fail(fault, skip=RANGED)
    assert await bench.copy() == FileLayout.of(len(CONTENT), tuple(NAMES))
    assert bench.told == [0, 1, 2]
    assert ranges(bench)[RANGED:] == [None, None]


async def test_an_answer_that_always_breaks_off_ends_with_the_reason(bench: Bench) -> None:
    bench.origin.fail(faults.truncate(CHUNK_SIZE + 5), skip=RANGED, times=None)
    with pytest.raises(UpstreamUnavailableError, match="ended"):
        await bench.copy()
    assert bench.told == [0]


@pytest.mark.parametrize(("pinned", "served", "etag", "said"), [
    (ETAG, OTHER, '"v2"', "its ETag changed"), (None, OTHER, '"v2"', "its ETag changed"), (ETAG, CONTENT[:-1], ETAG, "its size was"),
], ids=["another ETag than was listed", "another ETag", "another size"])  # fmt: skip
async def test_a_file_that_is_another_in_the_second_answer_has_changed(
    bench: Bench, pinned: str | None, served: bytes, etag: str, said: str
) -> None:
    def change() -> None:
        bench.served, bench.etag = served, etag

    bench.pinned = pinned
    bench.origin.fail(faults.truncate(CHUNK_SIZE + 5), skip=RANGED)
    bench.origin.fail(faults.right_after(change), skip=RANGED)
    with pytest.raises(SourceChangedError, match=said):
        await bench.copy(checksum=None)


async def test_canceling_closes_the_connection(bench: Bench) -> None:
    bench.origin.fail(faults.stall(CHUNK_SIZE + 5), skip=RANGED)
    copying = asyncio.create_task(bench.copy())
    await bench.stored.wait()
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying


# --- the reader by itself ---


def framed(body: bytes) -> bytes:
    """A 200 of unknown length, in pieces of 256 bytes."""
    cut = [body[at : at + 256] for at in range(0, len(body), 256)]
    sent = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in cut)
    return message("200 OK", "Transfer-Encoding: chunked", body=sent + b"0\r\n\r\n")


def read_in_order(reader: InOrderReader, url: str, *starts: int) -> bytes:
    """Ranges of 1000 bytes, the last one of what is left."""
    found = bytearray()
    for start in starts:
        wanted = ByteRange(start, min(start + 1000, SMALL_SIZE))
        buffer = bytearray(wanted.size)
        reader.read_into(Location(url), RangeRequest(SOURCE, "file", wanted, SMALL_SIZE), memoryview(buffer))
        found += buffer
    return bytes(found)


@pytest.fixture
def in_order() -> Iterator[InOrderReader]:
    with closing(ConnectionPool(timeout_seconds=10)) as pool, InOrderReader(RangedReader(pool)) as reader:
        yield reader


@pytest.mark.parametrize("answer", [framed(SMALL), message("200 OK", body=SMALL)], ids=["in pieces", "to its end"])
def test_an_answer_without_a_length_is_read(in_order: InOrderReader, answer: bytes) -> None:
    with RawServer(answering(answer)) as server:
        assert read_in_order(in_order, server.url, 0, 1000, 2000, 3000, 4000) == SMALL


def test_bytes_between_two_ranges_are_dropped_and_a_range_before_them_is_requested_again(
    in_order: InOrderReader,
) -> None:
    with RawServer(answering(framed(SMALL)), answering(framed(SMALL))) as server:
        assert read_in_order(in_order, server.url, 3000, 4000, 1000) == SMALL[3000:] + SMALL[1000:2000]
        assert server.connections == 2


@pytest.mark.parametrize("body", [SMALL + b"x", SMALL[:-1], SMALL[:1500]], ids=["longer", "shorter", "half"])
def test_a_body_in_pieces_of_another_size_means_that_the_source_changed(in_order: InOrderReader, body: bytes) -> None:
    with RawServer(answering(framed(body))) as server, pytest.raises(SourceChangedError, match="its size was"):
        read_in_order(in_order, server.url, 0, 1000, 2000, 3000, 4000)
