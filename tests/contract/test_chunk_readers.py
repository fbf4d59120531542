"""What every ChunkReader promises (``transfer/chunk_readers.py``): over HTTP, verifying, retrying, and all three at once."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from threading import Barrier

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import BdnError, NotFoundError, StoreUnavailableError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import ChunkReader, PartialChunk, RetryingReader, VerifyingReader
from bdn.transfer.http_chunks import HttpChunkReader
from tests.support.content.memory_store import MemoryStore
from tests.support.content.names import named
from tests.support.content.noise import noise
from tests.support.content.readers import CountedWaits, ScriptedReader, StoreReader, read_chunk, read_named
from tests.support.content.shelves import Shelf, serving
from tests.support.network.raw_server import RawServer

CONTENT = b"the bytes of a chunk"
LARGEST = noise(CHUNK_SIZE)


def retrying(inner: ChunkReader) -> ChunkReader:
    return RetryingReader(inner, RetryPolicy(), CountedWaits())


def verifying(inner: ChunkReader) -> ChunkReader:
    return VerifyingReader(inner, inner, lambda _: None)


@dataclass
class Places:
    """A store that holds the chunks, by itself and at an address, and an address where nobody listens."""

    store: MemoryStore
    connections: ConnectionPool
    address: str
    nowhere: str


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    store = MemoryStore()
    for content in (CONTENT, b"", LARGEST):
        store.put(digest_of(content), memoryview(content))
    with RawServer() as gone:
        nowhere = gone.url
    with closing(ConnectionPool(timeout_seconds=20)) as pool, serving(Shelf(store)) as server:
        yield Places(store, pool, f"http://127.0.0.1:{server.port}", nowhere)


def over_http(places: Places) -> ChunkReader:
    return HttpChunkReader(places.connections, places.address)


def to_nowhere(places: Places) -> ChunkReader:
    return HttpChunkReader(places.connections, places.nowhere)


def failing(_: Places) -> ChunkReader:
    return ScriptedReader([StoreUnavailableError("it restarts") for _ in range(100)])


READERS: dict[str, tuple[Callable[[Places], ChunkReader], Callable[[Places], ChunkReader]]] = {
    "http": (over_http, to_nowhere),
    "verifying": (lambda places: verifying(StoreReader(places.store)), lambda places: verifying(failing(places))),
    "retrying": (lambda places: retrying(StoreReader(places.store)), lambda places: retrying(failing(places))),
    "all": (lambda places: retrying(verifying(over_http(places))), lambda places: retrying(verifying(to_nowhere(places)))),
}  # fmt: skip


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, places: Places) -> ChunkReader:
    return READERS[request.param][0](places)


def test_a_chunk_fills_the_buffer_however_large_and_however_often(reader: ChunkReader) -> None:
    for content in (CONTENT, b"", LARGEST, CONTENT):
        assert read_chunk(reader, content) == content


def test_nothing_beside_the_buffer_is_written(reader: ChunkReader) -> None:
    memory = bytearray(b"<<<" + b"\xee" * len(CONTENT) + b">>>")
    reader.read_into(PartialChunk(digest_of(CONTENT), memoryview(memory)[3:-3]))
    assert memory == b"<<<" + CONTENT + b">>>"


def test_a_reader_goes_on_where_another_one_broke_off(reader: ChunkReader) -> None:
    chunk = PartialChunk(digest_of(CONTENT), memoryview(bytearray(len(CONTENT))))
    chunk.buffer[:7] = CONTENT[:7]
    chunk.received(chunk.buffer[:7])
    reader.read_into(chunk)
    chunk.check()
    assert (bytes(chunk.buffer), chunk.missing) == (CONTENT, 0)


def test_an_absent_chunk_is_not_found_and_named_and_does_not_spoil_the_reader(reader: ChunkReader) -> None:
    with pytest.raises(NotFoundError, match=str(named("absent"))):
        read_named(reader, named("absent"), 8)
    assert read_chunk(reader, CONTENT) == CONTENT


def test_threads_may_read_at_once(reader: ChunkReader) -> None:
    count = 4
    start = Barrier(count)

    def read(content: bytes) -> bool:
        start.wait()
        return all(read_chunk(reader, content) == content for _ in range(5))

    with ThreadPoolExecutor(count) as threads:
        assert all(threads.map(read, [CONTENT, LARGEST, CONTENT, LARGEST]))


@pytest.mark.parametrize("name", READERS)
def test_what_is_out_of_reach_for_now_is_an_error_that_may_pass(places: Places, name: str) -> None:
    with pytest.raises(BdnError) as raised:
        read_chunk(READERS[name][1](places), CONTENT)
    assert raised.value.transient
