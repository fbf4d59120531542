"""The readers of chunks keep the contract of a ChunkReader: over HTTP, verifying, retrying, and all three at once."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from bdn.core.errors import StoreUnavailableError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import ChunkReader, RetryingReader, VerifyingReader
from bdn.transfer.http_chunks import HttpChunkReader
from tests.contract.chunk_reader_contract import ChunkReaderContract
from tests.support.content.memory_store import MemoryStore
from tests.support.content.readers import CountedWaits, ScriptedReader, StoreReader
from tests.support.content.shelves import Shelf, serving
from tests.support.network.raw_server import RawServer


@pytest.fixture
def connections() -> Iterator[ConnectionPool]:
    with closing(ConnectionPool(timeout_seconds=20)) as pool:
        yield pool


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Shelf, str]]:
    """One server for all these tests: ending one takes a while."""
    shelf = Shelf()
    with serving(shelf) as server:
        yield shelf, f"http://127.0.0.1:{server.port}"


@pytest.fixture
def address(served: tuple[Shelf, str], store: MemoryStore) -> str:
    shelf, url = served
    shelf.store = store
    return url


@pytest.fixture
def nowhere() -> str:
    """An address where nobody listens."""
    with RawServer() as server:
        return server.url


def retrying(inner: ChunkReader) -> RetryingReader:
    return RetryingReader(inner, RetryPolicy(), CountedWaits())


def verifying(inner: ChunkReader) -> VerifyingReader:
    return VerifyingReader(inner, inner, lambda _: None)


class TestHttpChunkReader(ChunkReaderContract):
    @pytest.fixture
    def reader(self, connections: ConnectionPool, address: str) -> ChunkReader:
        return HttpChunkReader(connections, address)

    @pytest.fixture
    def unavailable(self, connections: ConnectionPool, nowhere: str) -> ChunkReader:
        return HttpChunkReader(connections, nowhere)


class TestVerifyingReader(ChunkReaderContract):
    @pytest.fixture
    def reader(self, store: MemoryStore) -> ChunkReader:
        return verifying(StoreReader(store))

    @pytest.fixture
    def unavailable(self) -> ChunkReader:
        return verifying(ScriptedReader([StoreUnavailableError("it restarts")]))


class TestRetryingReader(ChunkReaderContract):
    @pytest.fixture
    def reader(self, store: MemoryStore) -> ChunkReader:
        return retrying(StoreReader(store))

    @pytest.fixture
    def unavailable(self) -> ChunkReader:
        return retrying(ScriptedReader([StoreUnavailableError("it restarts") for _ in range(100)]))


class TestAllReadersTogether(ChunkReaderContract):
    @pytest.fixture
    def reader(self, connections: ConnectionPool, address: str) -> ChunkReader:
        return retrying(verifying(HttpChunkReader(connections, address)))

    @pytest.fixture
    def unavailable(self, connections: ConnectionPool, nowhere: str) -> ChunkReader:
        return retrying(verifying(HttpChunkReader(connections, nowhere)))
