"""GcsSource keeps the contracts of a Source, a bucket and access, against a double that is as strict as GCS, and an emulator."""

import gc
import gzip
import json
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import parse_qs, urlsplit

import pytest

from bdn.core.chunk import ByteRange
from bdn.core.source.upstream import Checksum, ChecksumKind, UpstreamFile
from bdn.net.http1.pool import ConnectionPool
from bdn.sources.bucket_source import BucketObject
from bdn.transfer.ranged import RangedReader, RangeRequest
from tests.contract.access_contract import Access, AccessContract
from tests.contract.bucket_contract import Bucket, BucketContract
from tests.contract.opening import NUMBERS, GcsWay, Opened, gcs_access
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, listed, only_file
from tests.doubles.faults import answer
from tests.doubles.gcs import GcsBucket, GcsServer
from tests.doubles.gcs_emulator import EmulatedBucket, GcsEmulator
from tests.doubles.ranges import read_range
from tests.support.network.egress import LOOPBACK


@pytest.fixture
def bucket(gcs_server: GcsServer) -> GcsBucket:
    return gcs_server.bucket(f"source-{next(NUMBERS)}")


@pytest.fixture
def public(gcs_server: GcsServer) -> GcsBucket:
    return gcs_server.bucket(f"public-{next(NUMBERS)}", public=True)


@pytest.fixture
def opened(gcs_server: GcsServer, bucket: GcsBucket) -> Opened:
    """The whole bucket, with the key of an account that may read it."""
    return GcsWay.of(gcs_server).open(bucket.name)


class TestFolderOfAPrivateBucket(SourceContract):
    @pytest.fixture
    def upstream(self, gcs_server: GcsServer, bucket: GcsBucket) -> Upstream:
        return GcsWay.of(gcs_server).upstream(bucket, "models/ü/a b+c%/")


class TestWholePublicBucketInSmallPages(SourceContract):
    @pytest.fixture
    def upstream(self, gcs_server: GcsServer, public: GcsBucket) -> Upstream:
        gcs_server.page_limit = 3
        return GcsWay(gcs_server.url).upstream(public)


class TestBucket(BucketContract):
    @pytest.fixture
    def bucket(self, gcs_server: GcsServer) -> Bucket:
        return GcsWay.of(gcs_server).upstream(gcs_server.bucket(f"bucket-{next(NUMBERS)}"))


class TestAccess(AccessContract):
    @pytest.fixture
    def access(self, gcs_server: GcsServer) -> Access:
        return gcs_access(gcs_server)


# --- an emulator that nobody here wrote: what it does otherwise than GCS is skipped, fact by fact ---


@pytest.fixture(scope="module")
def emulator() -> Iterator[GcsEmulator]:
    with GcsEmulator() as emulator:
        yield emulator


@pytest.fixture
def emulated(emulator: GcsEmulator) -> EmulatedBucket:
    return emulator.bucket(f"emulated-{next(NUMBERS)}")


class EmulatorContract(SourceContract):
    async def test_a_range_behind_the_end_is_refused(self) -> None:  # type: ignore[override]
        pytest.skip("the emulator answers 206 without bytes instead of 416")

    async def test_the_old_location_of_a_replaced_file_never_answers_with_new_bytes(self) -> None:  # type: ignore[override]
        pytest.skip("the emulator ignores the generation that is asked for")

    @pytest.mark.parametrize("path", ["back\\slash", "nul\0byte", "x" * 300])
    async def test_a_path_that_must_not_become_a_file_is_listed_for_the_selector_to_refuse(
        self, upstream: Upstream, path: str
    ) -> None:
        """Without those with "..", which the emulator's own file system refuses to hold."""
        await super().test_a_path_that_must_not_become_a_file_is_listed_for_the_selector_to_refuse(upstream, path)


class TestFolderOfAnEmulator(EmulatorContract):
    @pytest.fixture
    def upstream(self, emulator: GcsEmulator, emulated: EmulatedBucket) -> Upstream:
        return GcsWay(emulator.url).upstream(emulated, "models/ü/a b+c%/")


class TestBucketOfAnEmulator(BucketContract):
    @pytest.fixture
    def bucket(self, emulator: GcsEmulator, emulated: EmulatedBucket) -> Bucket:
        return GcsWay(emulator.url).upstream(emulated)

    async def test_every_page_of_a_long_listing_is_read(self) -> None:  # type: ignore[override]
        pytest.skip("the emulator has no pages: it ignores maxResults")


async def test_the_emulator_s_own_crc32c_is_the_checksum(emulator: GcsEmulator, emulated: EmulatedBucket) -> None:
    emulated.put({"a.bin": bytes(32), "b.bin": CONTENT})
    async with GcsWay(emulator.url).open(emulated.name) as source:
        files = await listed(source)
    assert files["a.bin"].checksum == Checksum(ChecksumKind.CRC32C, "8a9136aa")
    assert files["a.bin"].version != files["b.bin"].version


# --- requests, checksums and generations ---


async def test_a_page_has_a_thousand_objects_and_nothing_that_is_not_used(
    gcs_server: GcsServer, bucket: GcsBucket, opened: Opened
) -> None:
    bucket.put({f"{number:04}.txt": b"x" for number in range(1100)})
    async with opened as source:
        assert len(await listed(source)) == 1100
    pages = [parse_qs(urlsplit(request.target).query) for request in gcs_server.log.find(origin="gcs")]
    assert [page["maxResults"] for page in pages] == [["1000"]] * 2
    assert gcs_server.log.bytes_served(origin="gcs") < 1100 * 150  # a full description takes 500 bytes


async def test_resolving_and_locating_cost_no_request_but_the_first_token(
    gcs_server: GcsServer, bucket: GcsBucket, opened: Opened
) -> None:
    bucket.put({"a.bin": CONTENT})
    async with opened as source:
        assert (await source.resolve()).revision is None
        assert gcs_server.log.count() == 0
        file = (await listed(source))["a.bin"]
        await source.locate(file)
    assert [request.origin for request in gcs_server.log.find()] == ["oauth", "gcs"]


@pytest.mark.parametrize("composite", [False, True])
async def test_the_checksum_is_the_crc32c_also_of_composite_objects(
    bucket: GcsBucket, opened: Opened, composite: bool
) -> None:
    # RFC 3720, appendix B.4: of 32 bytes of zeroes.
    bucket.put({"a.bin": bytes(32)}, composite=composite)
    async with opened as source:
        assert (await listed(source))["a.bin"].checksum == Checksum(ChecksumKind.CRC32C, "8a9136aa")


@pytest.mark.parametrize(("hashes", "checksum"), [
    ({"crc32c": "ipE2qg==", "md5Hash": "cLw8Wd7k+dF3ZNCKAOr3GA=="}, Checksum(ChecksumKind.CRC32C, "8a9136aa")),
    ({"md5Hash": "1B2M2Y8AsgTpgAmY7PhCfg=="}, Checksum(ChecksumKind.MD5, "d41d8cd98f00b204e9800998ecf8427e")),
    ({}, None),
])  # fmt: skip
async def test_a_server_without_crc32c_may_state_an_md5_or_nothing(
    gcs_server: GcsServer, public: GcsBucket, hashes: dict[str, str], checksum: Checksum | None
) -> None:
    document = {"items": [{"name": "a.bin", "generation": "1", "size": "32", **hashes}]}
    gcs_server.fail(answer(200, {"Content-Type": "application/json"}, json.dumps(document).encode()))
    async with GcsWay(gcs_server.url).open(public.name) as source:
        assert (await listed(source))["a.bin"].checksum == checksum


def alive() -> int:
    return sum(isinstance(value, BucketObject | UpstreamFile) for value in gc.get_objects())


async def test_a_long_listing_takes_the_memory_of_one_page(
    gcs_server: GcsServer, bucket: GcsBucket, opened: Opened
) -> None:
    gcs_server.page_limit = 100
    bucket.put({f"{number:03}.bin": b"x" for number in range(300)})
    gc.collect()
    before = alive()
    held = []
    async with opened as source:
        async for file in source.list(await source.resolve()):
            if file.path.endswith("50.bin"):
                held.append(alive() - before)
    assert len(held) == 3
    assert max(held) <= 101


async def test_a_generation_that_was_replaced_or_deleted_is_gone(bucket: GcsBucket, opened: Opened) -> None:
    bucket.put({"a.bin": b"before", "b.bin": b"before"})
    async with opened as source:
        files = await listed(source)
        bucket.put({"a.bin": b"after!"})
        bucket.delete("b.bin")
        for file in files.values():
            assert f"&generation={file.version}" in (await source.locate(file)).url
            assert read_range(await source.locate(file), 0, 6).status == 404


async def test_the_same_bytes_written_again_are_another_identity(gcs_server: GcsServer, bucket: GcsBucket) -> None:
    identities = set()
    for _ in range(2):
        bucket.put({"a.bin": b"same"})
        async with GcsWay.of(gcs_server).open(bucket.name) as source:
            identities.add((await listed(source))["a.bin"].identity.key)
    assert len(identities) == 2


async def test_the_token_travels_in_a_header_and_is_in_no_repr(
    gcs_server: GcsServer, bucket: GcsBucket, opened: Opened
) -> None:
    bucket.put({"a.bin": CONTENT})
    async with opened as source:
        location = await source.locate((await listed(source))["a.bin"])
    token = dict(location.headers)["Authorization"].removeprefix("Bearer ")
    assert gcs_server.tokens.owner_of(token) == gcs_server.account.email
    assert token not in location.url
    assert token not in repr(location) + repr(source)
    assert location.expires_at is not None


async def test_anonymous_reading_sends_no_token_and_its_locations_do_not_end(
    gcs_server: GcsServer, public: GcsBucket
) -> None:
    public.put({"a.bin": CONTENT})
    async with GcsWay(gcs_server.url).open(public.name) as source:
        location = await source.locate((await listed(source))["a.bin"])
    assert location.expires_at is None
    assert [request.headers.get("authorization") for request in gcs_server.log.find()] == [None]
    assert dict(location.headers).keys() == {"Accept-Encoding"}


async def test_an_object_that_was_stored_compressed_is_read_in_ranges_and_stays_compressed(
    bucket: GcsBucket, opened: Opened
) -> None:
    stored = gzip.compress(CONTENT, mtime=0)
    bucket.put({"tokenizer.json": stored}, encoding="gzip")
    async with opened as source:
        file = await only_file(source)
        location = await source.locate(file)
    found, middle = bytearray(file.size), file.size // 2
    with closing(ConnectionPool(timeout_seconds=5, egress=LOOPBACK)) as pool:
        for start, stop in ((0, middle), (middle, file.size)):
            request = RangeRequest("gs://ranges", file.path, ByteRange(start, stop), file.size)
            RangedReader(pool).read_into(location, request, memoryview(found)[start:stop])
    assert found == stored
