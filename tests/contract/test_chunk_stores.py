"""What every CollectableStore promises: a directory for one process and for two that share it, memory, and buckets of all servers."""

import io
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Barrier, Event

import pytest

from bdn.core.chunk import CHUNK_SIZE, Buffer, Digest, digest_of
from bdn.core.errors import NotFoundError
from bdn.core.store import CollectableStore, StoredChunk
from bdn.sources.sign_in import SourceContext
from bdn.store.bucket_store import BucketStore
from bdn.store.directory import DirectoryStore
from tests.doubles.gcs import GcsServer
from tests.doubles.object_server import ObjectServer
from tests.doubles.s3 import S3Server
from tests.support.content.bucket_stores import gcs_context, s3_context, store_at
from tests.support.content.memory_store import MemoryStore, content_of
from tests.support.content.names import named

CONTENT = b"the bytes of a chunk"
CHUNK = digest_of(CONTENT)
PREFIXES = count()


class WrittenElsewhere(DirectoryStore):
    """One of two stores in a directory, as a worker and a server have them: the other one writes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._writer = DirectoryStore(root)

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        self._writer.put(digest, content)

    def keep(self, digests: Sequence[Digest]) -> set[Digest]:
        return self._writer.keep(digests)


@pytest.fixture(scope="module")
def moto(shared_s3_server: S3Server) -> tuple[str, SourceContext]:
    return f"s3://{shared_s3_server.bucket('moto-store').name}", s3_context(shared_s3_server)


@pytest.fixture(scope="module")
def r2(shared_s3_server: S3Server) -> tuple[str, SourceContext]:
    return f"r2://4cc0.{shared_s3_server.bucket('r2-store', region='auto').name}", s3_context(shared_s3_server)


@pytest.fixture(scope="module")
def gcs(shared_gcs_server: GcsServer) -> tuple[str, SourceContext]:
    return f"gs://{shared_gcs_server.written_bucket('gcs-store').name}", gcs_context(shared_gcs_server)


@pytest.fixture(scope="module")
def careless(object_server: ObjectServer) -> tuple[str, SourceContext]:
    """A server that takes any checksum and overwrites what is there, as rclone's does."""
    objects = object_server.bucket("careless-store")
    objects.checks, objects.leaves_what_is_there = frozenset(), False
    return f"s3://{objects.name}", s3_context(object_server)


@pytest.fixture(params=["one process", "two processes", "memory", "seaweed", "moto", "r2", "gcs", "careless"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CollectableStore]:
    match request.param:
        case "one process":
            yield DirectoryStore(tmp_path / "store")
        case "two processes":
            yield WrittenElsewhere(tmp_path / "store")
        case "memory":
            yield MemoryStore()
        case server:
            bucket, context = request.getfixturevalue(server)
            with store_at(f"{bucket}/{next(PREFIXES)}/a b", context) as found:
                yield found


def seen(store: CollectableStore, digest: Digest) -> StoredChunk:
    (found,) = store.stored([digest])
    return found


def full_chunk(fill: int = 0) -> bytes:
    """8 MiB of pages that all differ."""
    return b"".join((number + fill * CHUNK_SIZE).to_bytes(8, "big") * 512 for number in range(CHUNK_SIZE // 4096))


def test_a_chunk_is_opened_anew_by_every_reader_and_can_be_read_from_anywhere_in_it(store: CollectableStore) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    with store.open(CHUNK) as first, store.open(CHUNK) as second:
        assert first.seek(0, io.SEEK_END) == len(CONTENT)
        first.seek(4)
        assert first.read(5) == CONTENT[4:9]
        assert second.read() == CONTENT


def test_an_absent_chunk_is_not_found_and_named(store: CollectableStore) -> None:
    with pytest.raises(NotFoundError, match=str(named("absent"))):
        store.open(named("absent"))


def test_an_existing_chunk_is_left_as_it_is(store: CollectableStore) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    store.put(CHUNK, memoryview(b"other bytes, which the caller should not have named so"))
    assert content_of(store, CHUNK) == CONTENT


def test_a_part_of_a_buffer_can_be_put_which_the_caller_may_use_again_at_once(store: CollectableStore) -> None:
    buffer = bytearray(b"<<<" + CONTENT + b">>>")
    store.put(CHUNK, memoryview(buffer)[3:-3])
    buffer[:] = bytes(len(buffer))
    assert content_of(store, CHUNK) == CONTENT


def test_a_chunk_is_collected_once_and_can_be_put_again(store: CollectableStore) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    found = seen(store, CHUNK)
    assert [store.collect([found]), store.collect([found])] == [[found], []]
    with pytest.raises(NotFoundError):
        store.open(CHUNK)
    assert not store.keep([CHUNK])
    assert list(store.stored()) == []
    store.put(CHUNK, memoryview(CONTENT))
    assert content_of(store, CHUNK) == CONTENT


def test_owner__of_several_databases__the_first_stays_until_another_replaces_it(store: CollectableStore) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("no mirror's store")
    assert isinstance(store, DirectoryStore | BucketStore)
    assert store.owner() is None
    assert store.owner("first") == "first"
    assert (store.owner("second"), store.owner()) == ("first", "first")
    store.put(CHUNK, memoryview(CONTENT))
    assert [chunk.digest for chunk in store.stored()] == [CHUNK]
    store.drop_leftovers(time.time() + 10**6, dry_run=False)
    assert store.owner() == "first"
    assert (store.owner("second", replace=True), store.owner("first")) == ("second", "second")


@pytest.mark.parametrize("again", ["put", "kept"])
def test_what_was_put_or_kept_since_it_was_seen_is_not_collected(store: CollectableStore, again: str) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    found = seen(store, CHUNK)
    if again == "put":
        store.put(CHUNK, memoryview(CONTENT))
    else:
        assert store.keep([CHUNK]) == {CHUNK}
    assert not store.collect([found])
    assert content_of(store, CHUNK) == CONTENT
    assert seen(store, CHUNK).kept_at > found.kept_at


def test_what_is_held_is_seen_with_its_size_and_when_it_was_put(store: CollectableStore) -> None:
    before = time.time()
    store.put(CHUNK, memoryview(CONTENT))
    store.put(named("other"), memoryview(b"other"))
    found = {chunk.digest: chunk for chunk in store.stored()}
    assert {digest: chunk.size for digest, chunk in found.items()} == {CHUNK: len(CONTENT), named("other"): 5}
    assert all(before - 1e-3 <= chunk.kept_at <= time.time() for chunk in found.values())
    assert list(store.stored([named("absent"), CHUNK])) == [found[CHUNK]]


def test_all_that_is_held_is_listed_in_the_order_of_digests(store: CollectableStore) -> None:
    contents = [b"%d" % number for number in range(30)]
    for content in contents:
        store.put(digest_of(content), memoryview(content))
    assert [chunk.digest for chunk in store.stored()] == sorted(map(digest_of, contents))


def test_who_has_a_chunk_open_can_read_it_to_its_end_after_it_was_collected(store: CollectableStore) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    with store.open(CHUNK) as file:
        beginning = file.read(3)
        assert store.collect([seen(store, CHUNK)])
        assert beginning + file.read() == CONTENT


def test_threads_that_put_and_collect_one_chunk_never_lose_it_to_who_put_it(store: CollectableStore) -> None:
    """As the mirror collects: first a look at the chunk, then at whether somebody is at work, then ``collect``."""
    content = b"put and collected"
    digest = digest_of(content)
    at_work, collected, done = Event(), Event(), Event()

    def collect() -> None:
        while not done.is_set():
            for chunk in store.stored([digest]):
                if not at_work.is_set() and store.collect([chunk]):
                    collected.set()

    with ThreadPoolExecutor(2) as threads:
        collecting = [threads.submit(collect) for _ in range(2)]
        try:
            for turn in range(2 if isinstance(store, BucketStore) else 40):  # a bucket takes five requests for one
                for again in range(10):
                    at_work.set()
                    if (turn + again) % 2 or not store.keep([digest]):
                        store.put(digest, memoryview(content))
                    assert content_of(store, digest) == content
                    at_work.clear()
                assert collected.wait(20)  # there is something to lose
                collected.clear()
        finally:
            done.set()
        for future in collecting:
            future.result()


def test_the_empty_chunk_and_the_largest_come_back_whole(store: CollectableStore) -> None:
    for content in (b"", full_chunk()):
        store.put(digest_of(content), memoryview(content))
        assert content_of(store, digest_of(content)) == content


def test_threads_that_put_one_chunk_at_once_all_succeed(store: CollectableStore) -> None:
    content, count = full_chunk(), 8
    start = Barrier(count)

    def put() -> bytes:
        start.wait()
        store.put(digest_of(content), memoryview(content))
        return content_of(store, digest_of(content))  # held, for whoever returned from put

    with ThreadPoolExecutor(count) as threads:
        assert all(future.result() == content for future in [threads.submit(put) for _ in range(count)])


def test_threads_that_put_many_chunks_at_once_all_succeed(store: CollectableStore) -> None:
    count, each = 8, 5 if isinstance(store, BucketStore) else 25
    start = Barrier(count)

    def put(thread: int) -> list[bytes]:
        contents = [b"chunk %d of thread %d" % (number, thread) for number in range(each)]
        start.wait()
        for content in contents:
            store.put(digest_of(content), memoryview(content))
        return contents

    with ThreadPoolExecutor(count) as threads:
        written = [future.result() for future in [threads.submit(put, thread) for thread in range(count)]]
    assert all(content_of(store, digest_of(content)) == content for contents in written for content in contents)


def test_a_reader_beside_a_writer_sees_all_of_a_chunk_or_nothing(store: CollectableStore) -> None:
    contents = [full_chunk(fill) for fill in range(3)]
    digests = [digest_of(content) for content in contents]
    done = Event()

    def write() -> None:
        try:
            for digest, content in zip(digests, contents, strict=True):
                store.put(digest, memoryview(content))
        finally:
            done.set()

    def sightings() -> set[int]:
        sizes = set()
        for digest in digests:
            try:
                sizes.add(len(content_of(store, digest)))
            except NotFoundError:
                sizes.add(-1)
        return sizes

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        seen = sightings()
        while not done.is_set():
            seen |= sightings()
        writing.result()
    assert seen <= {-1, CHUNK_SIZE}
    assert sightings() == {CHUNK_SIZE}
