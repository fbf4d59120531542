"""What every store promises a mirror: a directory for one process and for two that share it, memory, and buckets of all servers."""

import io
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Barrier, Event

import pytest

from bdn.core.chunk import CHUNK_SIZE, Buffer, Digest, digest_of
from bdn.core.errors import NotFoundError
from bdn.core.store import DELETE_SENT_SECONDS, NotDeletedError, StoredObject
from bdn.sources.sign_in import SourceContext
from bdn.store.boot_clock import since_boot
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
AnyStore = DirectoryStore | BucketStore | MemoryStore


class WrittenElsewhere(DirectoryStore):
    """One of two stores in a directory, as a worker and a server have them: the other one writes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._writer = DirectoryStore(root)

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        self._writer.put(digest, content)

    def delete(self, digests: Collection[Digest], *, began: float | None = None) -> None:
        self._writer.delete(digests, began=began)


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
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyStore]:
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


def full_chunk(fill: int = 0) -> bytes:
    """8 MiB of pages that all differ."""
    return b"".join((number + fill * CHUNK_SIZE).to_bytes(8, "big") * 512 for number in range(CHUNK_SIZE // 4096))


def test_a_chunk_is_opened_anew_by_every_reader_and_can_be_read_from_anywhere_in_it(store: AnyStore) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    with store.open(CHUNK) as first, store.open(CHUNK) as second:
        assert first.seek(0, io.SEEK_END) == len(CONTENT)
        first.seek(4)
        assert first.read(5) == CONTENT[4:9]
        assert second.read() == CONTENT


def test_an_absent_chunk_is_not_found_and_named(store: AnyStore) -> None:
    with pytest.raises(NotFoundError, match=str(named("absent"))):
        store.open(named("absent"))


def test_put__object_of_this_name_is_there__replaces_it(store: AnyStore) -> None:
    """Its row says that it is not stored: what is there may be wrong."""
    store.put(CHUNK, memoryview(b"wrong"))
    store.put(CHUNK, memoryview(CONTENT))
    assert content_of(store, CHUNK) == CONTENT


def test_a_part_of_a_buffer_can_be_put_which_the_caller_may_use_again_at_once(store: AnyStore) -> None:
    buffer = bytearray(b"<<<" + CONTENT + b">>>")
    store.put(CHUNK, memoryview(buffer)[3:-3])
    buffer[:] = bytes(len(buffer))
    assert content_of(store, CHUNK) == CONTENT


def test_delete__chunk_and_an_absent_one__both_are_gone_and_can_be_put_again(store: AnyStore) -> None:
    for content in (CONTENT, b"stays"):
        store.put(digest_of(content), memoryview(content))
    for _ in range(2):
        store.delete([CHUNK, named("absent")])
        with pytest.raises(NotFoundError):
            store.open(CHUNK)
        assert list(store.listed()) == [StoredObject(digest_of(b"stays"), 5)]
    store.put(CHUNK, memoryview(CONTENT))
    assert content_of(store, CHUNK) == CONTENT


def test_delete__caller_was_suspended__deletes_nothing_and_says_so(store: AnyStore) -> None:
    """Another mirror may have deleted the chunk meanwhile, and a third one may have put it anew."""
    if isinstance(store, MemoryStore):
        pytest.skip("no mirror's store")
    store.put(CHUNK, memoryview(CONTENT))
    with pytest.raises(NotDeletedError) as caught:
        store.delete([CHUNK], began=since_boot() - DELETE_SENT_SECONDS - 1)
    assert caught.value.left == {CHUNK}
    assert content_of(store, CHUNK) == CONTENT


def test_owner__of_several_databases__the_first_stays_until_another_replaces_it(store: AnyStore) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("no mirror's store")
    assert isinstance(store, DirectoryStore | BucketStore)
    assert store.owner() is None
    assert store.owner("first") == "first"
    assert (store.owner("second"), store.owner()) == ("first", "first")
    store.put(CHUNK, memoryview(CONTENT))
    assert [chunk.digest for chunk in store.listed()] == [CHUNK]
    store.drop_leftovers(time.time() + 10**6, dry_run=False)
    assert store.owner() == "first"
    assert (store.owner("second", replace=True), store.owner("first")) == ("second", "second")


def test_all_that_is_held_is_listed_in_the_order_of_digests(store: AnyStore) -> None:
    contents = [b"%d" % number for number in range(30)]
    for content in contents:
        store.put(digest_of(content), memoryview(content))
    assert [chunk.digest for chunk in store.listed()] == sorted(map(digest_of, contents))


def test_who_has_a_chunk_open_can_read_it_to_its_end_after_it_was_deleted(store: AnyStore) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    with store.open(CHUNK) as file:
        beginning = file.read(3)
        store.delete([CHUNK])
        assert beginning + file.read() == CONTENT


def test_the_empty_chunk_and_the_largest_come_back_whole(store: AnyStore) -> None:
    for content in (b"", full_chunk()):
        store.put(digest_of(content), memoryview(content))
        assert content_of(store, digest_of(content)) == content


def test_threads_that_put_one_chunk_at_once_all_succeed(store: AnyStore) -> None:
    content, count = full_chunk(), 8
    start = Barrier(count)

    def put() -> bytes:
        start.wait()
        store.put(digest_of(content), memoryview(content))
        return content_of(store, digest_of(content))  # held, for whoever returned from put

    with ThreadPoolExecutor(count) as threads:
        assert all(future.result() == content for future in [threads.submit(put) for _ in range(count)])


def test_threads_that_put_many_chunks_at_once_all_succeed(store: AnyStore) -> None:
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


def test_a_reader_beside_a_writer_sees_all_of_a_chunk_or_nothing(store: AnyStore) -> None:
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
