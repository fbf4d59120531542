"""What the reader of ranges makes of the locations of GCS: the two meet nowhere else."""

import gzip
from collections.abc import Iterator

import pytest

from bdn.core.chunk import ByteRange
from bdn.core.errors import ChecksumMismatchError, SourceChangedError, UpstreamRateLimitedError
from bdn.core.source.upstream import Location, Source, UpstreamFile
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.checksums import RunningChecksum
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest
from tests.contract.source_contract import CONTENT, listed
from tests.doubles.faults import flip_byte, rate_limited
from tests.doubles.gcs import GcsServer
from tests.doubles.gcs_objects import GcsBucket
from tests.support.mirror.gcs_sources import Way
from tests.support.network.egress import LOOPBACK


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def bucket(server: GcsServer) -> GcsBucket:
    return server.bucket("ranges")


@pytest.fixture
def reader() -> Iterator[RangedReader]:
    pool = ConnectionPool(timeout_seconds=5, egress=LOOPBACK)
    yield RangedReader(pool)
    pool.close()


def way_of(server: GcsServer) -> Way:
    return Way(server.url, server.token_url, server.account.key(server.token_url))


async def located(source: Source, path: str) -> tuple[UpstreamFile, Location]:
    file = (await listed(source))[path]
    return file, await source.locate(file)


def read(reader: RangedReader, file: UpstreamFile, location: Location, start: int, stop: int) -> bytearray:
    buffer = bytearray(stop - start)
    request = RangeRequest("gs://ranges", file.path, ByteRange(start, stop), file.size)
    reader.read_into(location, request, memoryview(buffer))
    return buffer


async def test_the_listed_checksum_is_that_of_the_bytes_that_are_read(
    server: GcsServer, bucket: GcsBucket, reader: RangedReader
) -> None:
    bucket.put({"a b+c%.bin": CONTENT})
    async with way_of(server).open("gs://ranges") as source:
        file, location = await located(source, "a b+c%.bin")
    assert file.checksum is not None
    server.fail(flip_byte(7), "alt=media", skip=1)
    for expected in (None, ChecksumMismatchError):
        checksum = RunningChecksum(file.checksum, file.size)
        checksum.update(read(reader, file, location, 0, file.size))
        if expected is None:
            checksum.check("a.bin")
        else:
            with pytest.raises(expected):
                checksum.check("a.bin")


async def test_an_object_that_was_stored_compressed_is_read_in_ranges_and_stays_compressed(
    server: GcsServer, bucket: GcsBucket, reader: RangedReader
) -> None:
    stored = gzip.compress(CONTENT, mtime=0)
    bucket.put({"tokenizer.json": stored}, encoding="gzip")
    async with way_of(server).open("gs://ranges") as source:
        file, location = await located(source, "tokenizer.json")
    middle = file.size // 2
    halves = read(reader, file, location, 0, middle) + read(reader, file, location, middle, file.size)
    assert halves == stored


@pytest.mark.parametrize("change", ["replaced", "deleted"])
async def test_an_object_that_changes_in_the_middle_of_a_copy_is_a_source_that_changed(
    server: GcsServer, bucket: GcsBucket, reader: RangedReader, change: str
) -> None:
    bucket.put({"a.bin": CONTENT})
    async with way_of(server).open("gs://ranges") as source:
        file, location = await located(source, "a.bin")
        assert read(reader, file, location, 0, 9) == CONTENT[:9]
        if change == "replaced":
            bucket.put({"a.bin": CONTENT})  # also with the same bytes
        else:
            bucket.delete("a.bin")
        for again in (location, await source.locate(file)):
            with pytest.raises(SourceChangedError):
                read(reader, file, again, 9, 20)


async def test_a_token_that_was_withdrawn_and_a_rate_limit_are_told_apart(
    server: GcsServer, bucket: GcsBucket, reader: RangedReader
) -> None:
    bucket.put({"a.bin": CONTENT})
    async with way_of(server).open("gs://ranges") as source:
        file, location = await located(source, "a.bin")
    server.fail(rate_limited(3), "alt=media")
    with pytest.raises(UpstreamRateLimitedError) as raised:
        read(reader, file, location, 0, 9)
    assert raised.value.retry_after_seconds == 3
    server.tokens.withdraw_all()
    with pytest.raises(LocationRefusedError):
        read(reader, file, location, 0, 9)
