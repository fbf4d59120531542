"""What every ChunkReader promises (``transfer/chunk_readers.py``). Suites inherit it and say what their reader reads from."""

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import BdnError, NotFoundError
from bdn.transfer.chunk_readers import ChunkReader, PartialChunk
from tests.support.content.memory_store import MemoryStore
from tests.support.content.names import named
from tests.support.content.readers import read_chunk, read_named

CONTENT = b"the bytes of a chunk"
LARGEST = b"".join(number.to_bytes(8, "big") * 512 for number in range(CHUNK_SIZE // 4096))


class ChunkReaderContract(ABC):
    @pytest.fixture
    def store(self) -> MemoryStore:
        """What the reader under test reads from, in the end."""
        store = MemoryStore()
        for content in (CONTENT, b"", LARGEST):
            store.put(digest_of(content), memoryview(content))
        return store

    @pytest.fixture
    @abstractmethod
    def reader(self, store: MemoryStore) -> ChunkReader: ...

    @pytest.fixture
    @abstractmethod
    def unavailable(self) -> ChunkReader:
        """A reader whose chunks are out of reach for now."""

    def test_a_chunk_fills_the_buffer(self, reader: ChunkReader) -> None:
        assert read_chunk(reader, CONTENT) == CONTENT

    def test_the_empty_chunk_fills_an_empty_buffer(self, reader: ChunkReader) -> None:
        assert read_chunk(reader, b"") == b""

    def test_the_largest_chunk_fills_the_largest_buffer(self, reader: ChunkReader) -> None:
        assert read_chunk(reader, LARGEST) == LARGEST

    def test_nothing_beside_the_buffer_is_written(self, reader: ChunkReader) -> None:
        memory = bytearray(b"<<<" + b"\xee" * len(CONTENT) + b">>>")
        reader.read_into(PartialChunk(digest_of(CONTENT), memoryview(memory)[3:-3]))
        assert memory == b"<<<" + CONTENT + b">>>"

    def test_a_reader_goes_on_where_another_one_broke_off(self, reader: ChunkReader) -> None:
        chunk = PartialChunk(digest_of(CONTENT), memoryview(bytearray(len(CONTENT))))
        chunk.buffer[:7] = CONTENT[:7]
        chunk.received(chunk.buffer[:7])
        reader.read_into(chunk)
        chunk.check()
        assert (bytes(chunk.buffer), chunk.missing) == (CONTENT, 0)

    def test_a_chunk_can_be_read_again(self, reader: ChunkReader) -> None:
        assert [read_chunk(reader, CONTENT) for _ in range(3)] == [CONTENT] * 3

    def test_an_absent_chunk_is_not_found_and_named(self, reader: ChunkReader) -> None:
        with pytest.raises(NotFoundError, match=str(named("absent"))):
            read_named(reader, named("absent"), 8)

    def test_an_absent_chunk_does_not_spoil_the_reader(self, reader: ChunkReader) -> None:
        with pytest.raises(NotFoundError):
            read_named(reader, named("absent"), 8)
        assert read_chunk(reader, CONTENT) == CONTENT

    def test_threads_may_read_at_once(self, reader: ChunkReader) -> None:
        count = 4
        start = Barrier(count)

        def read(content: bytes) -> bool:
            start.wait()
            return all(read_chunk(reader, content) == content for _ in range(5))

        with ThreadPoolExecutor(count) as threads:
            assert all(threads.map(read, [CONTENT, LARGEST, CONTENT, LARGEST]))

    def test_what_is_out_of_reach_for_now_is_an_error_that_may_pass(self, unavailable: ChunkReader) -> None:
        with pytest.raises(BdnError) as raised:
            read_chunk(unavailable, CONTENT)
        assert raised.value.transient
