"""S3Source keeps the contract of a Source, against moto behind real signatures."""

import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from hashlib import md5
from urllib.parse import parse_qs, urlsplit

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.source.upstream import Checksum, ChecksumKind, Identity, Source, UpstreamFile
from bdn.sources.settings import UpstreamSettings
from tests.contract.access_contract import Access, AccessContract
from tests.contract.bucket_contract import Bucket, BucketContract
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, consumed, listed, listed_within
from tests.doubles.ranges import read_range, read_whole
from tests.doubles.s3 import S3Bucket, S3Server
from tests.doubles.sigv4 import Account
from tests.support.mirror.s3_upstreams import FolderUpstream, PrivateBucket, S3Access, S3Like
from tests.support.network.egress import LOOPBACK

Opened = AbstractAsyncContextManager[Source]
STRANGER = Account("AKIASTRANGER", "stranger")
LARGE = bytes(CHUNK_SIZE) + b"last"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    with S3Server() as server:
        server.accounts[STRANGER.access_key_id] = STRANGER
        server.strangers.add(STRANGER.access_key_id)
        yield server


@pytest.fixture
def server(shared_server: S3Server) -> S3Server:
    shared_server.log.clear()
    shared_server.script.clear()
    return shared_server


@pytest.fixture
def s3(server: S3Server) -> S3Like:
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=server.url)
    return S3Like(settings, server.account, STRANGER, lambda name, public: server.bucket(name, public=public))


@pytest.fixture
def bucket(s3: S3Like) -> S3Bucket:
    bucket = s3.bucket()
    assert isinstance(bucket, S3Bucket)
    return bucket


@pytest.fixture
def opened(s3: S3Like, bucket: S3Bucket) -> Opened:
    """The whole bucket, read by its owner."""
    return s3.open(bucket.name, "", s3.account)


class TestFolderOfAPrivateBucket(SourceContract):
    @pytest.fixture
    def upstream(self, s3: S3Like, bucket: S3Bucket) -> Upstream:
        return FolderUpstream(s3, bucket, "models/a b+c%/")


class TestWholePublicBucket(SourceContract):
    @pytest.fixture
    def upstream(self, s3: S3Like) -> Upstream:
        return FolderUpstream(s3, s3.bucket(public=True), anonymous=True)


class TestBucketOfS3(BucketContract):
    @pytest.fixture
    def bucket(self, s3: S3Like) -> Bucket:
        return PrivateBucket(s3, s3.bucket())


class TestAccessToS3(AccessContract):
    @pytest.fixture
    def access(self, s3: S3Like) -> Access:
        return S3Access(s3)


async def only_file(source: Source) -> UpstreamFile:
    (file,) = (await listed(source)).values()
    return file


async def test_a_prefix_that_is_one_object_costs_two_requests(s3: S3Like, server: S3Server, bucket: S3Bucket) -> None:
    bucket.put({"m/model.bin": CONTENT, "m/model.bin.sha256": b"x"})
    async with s3.open(bucket.name, "m/model.bin", s3.account) as source:
        assert set(await listed(source)) == {"model.bin"}
    assert server.log.count("list-type=2") == server.log.count() == 2


async def test_two_thousand_and_one_keys_cost_three_requests_and_none_is_lost(
    server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({f"m/a b+%{number:04}.txt": b"x" for number in range(2001)})
    async with opened as source:
        assert len(await listed(source)) == 2001
    assert server.log.count() == 3


async def test_a_narrowed_listing_asks_once_for_each_beginning_and_for_nothing_else(
    server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({f"{folder}/{number:04}.txt": b"x" for folder in ("a b", "c") for number in range(1001)})
    bucket.put({"d/1.txt": b"x", "d/2.txt": b"x"})
    async with opened as source:
        assert await listed_within(source, "a b/0001", "d/") == ["a b/0001.txt", "d/1.txt", "d/2.txt"]
    assert [parse_qs(urlsplit(request.target).query)["prefix"] for request in server.log.find()] == [
        ["a b/0001"],
        ["d/"],
    ]


async def test_a_listing_asks_for_no_more_pages_than_are_consumed(
    server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({f"{number:04}.txt": b"x" for number in range(1001)})
    async with opened as source:
        resolution = await source.resolve()
        await anext(source.list(resolution))
        assert server.log.count() == 1
        assert await consumed(source.list(resolution)) == 1001


async def test_content_belongs_to_the_organisation_also_where_everybody_may_read(s3: S3Like) -> None:
    bucket = s3.bucket(public=True)
    bucket.put({"a.bin": b"x"})
    scopes = set()
    for organisation in ("acme", "other"):
        async with s3.open(bucket.name, organisation=organisation) as source:
            scopes.add((await only_file(source)).identity.scope)
    assert scopes == {"organisation:acme", "organisation:other"}


async def test_resolving_and_locating_a_file_of_one_chunk_cost_no_request(
    server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({"a.bin": bytes(CHUNK_SIZE)})
    async with opened as source:
        assert (await source.resolve()).revision is None
        await source.locate(await only_file(source))
    assert server.log.count() == 1


async def test_the_listed_etag_is_the_version_and_never_a_checksum(bucket: S3Bucket, opened: Opened) -> None:
    bucket.put({"a.bin": CONTENT})
    async with opened as source:
        file = await only_file(source)
        location = await source.locate(file)
    answer = read_range(location, 0, 1)
    assert file.checksum is None
    assert file.version == location.etag == answer.headers["etag"]


async def test_the_answer_for_a_file_of_one_chunk_states_its_best_checksum(bucket: S3Bucket, opened: Opened) -> None:
    bucket.put({"a.bin": CONTENT})
    bucket.state("a.bin", {"x-amz-checksum-crc64nvme": "AAECAwQFBgc=", "x-amz-checksum-type": "FULL_OBJECT"})
    async with opened as source:
        location = await source.locate(await only_file(source))
    assert location.checksum is None
    assert location.stated is not None
    answer = read_whole(location)
    assert answer.content == CONTENT
    assert location.stated(answer.headers) == Checksum(ChecksumKind.CRC64NVME, "0001020304050607")
    assert location.stated(read_range(location, 0, 1).headers) == Checksum(ChecksumKind.MD5, md5(CONTENT).hexdigest())


async def test_the_checksum_of_a_larger_file_is_learned_with_one_request(
    server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({"a.bin": LARGE})
    bucket.state("a.bin", {"x-amz-checksum-crc32c": "AAECAw=="})
    async with opened as source:
        file = await only_file(source)
        location = await source.locate(file)
    assert location.checksum == Checksum(ChecksumKind.CRC32C, "00010203")
    assert location.stated is None
    (head,) = server.log.find(method="HEAD")
    assert head.headers["if-match"] == file.version


async def test_a_large_file_of_a_bucket_that_keeps_versions_is_pinned_to_its_version(
    server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.keep_versions()
    bucket.put({"a.bin": LARGE, "b.bin": LARGE})
    async with opened as source:
        files = await listed(source)
        locations = [await source.locate(file) for file in files.values()]
        bucket.put({"a.bin": LARGE[::-1], "b.bin": LARGE[::-1]})
    assert all("&versionId=" in location.url for location in locations)
    assert [read_range(location, CHUNK_SIZE, len(LARGE)).content for location in locations] == [b"last", b"last"]
    assert server.log.count(method="HEAD") == 3  # one for each, and one to learn that versions may be read


async def test_without_versions_nothing_but_the_etag_pins_a_large_file(bucket: S3Bucket, opened: Opened) -> None:
    bucket.put({"a.bin": LARGE})
    async with opened as source:
        location = await source.locate(await only_file(source))
    assert "versionId" not in location.url
    bucket.put({"a.bin": LARGE[::-1]})
    assert read_range(location, 0, 4).status == 412


async def test_a_location_is_signed_for_an_hour_and_does_not_hold_the_secret_key(
    server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({"a.bin": b"x"})
    async with opened as source:
        location = await source.locate(await only_file(source))
    query = parse_qs(urlsplit(location.url).query)
    assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
    assert query["X-Amz-Expires"] == ["3600"]
    assert location.expires_at is not None
    assert abs(location.expires_at - time.time() - 3600) < 60
    assert server.account.secret_access_key not in location.url


async def test_an_anonymous_location_is_a_plain_address_that_does_not_expire(s3: S3Like) -> None:
    bucket = s3.bucket(public=True)
    bucket.put({"a b.bin": b"x"})
    async with s3.open(bucket.name) as source:
        location = await source.locate(await only_file(source))
    assert location.url == f"{s3.settings.s3_endpoint_url}/{bucket.name}/a%20b.bin"
    assert location.expires_at is None


async def test_a_location_of_one_of_a_million_small_files_costs_little(
    opened: Opened,
) -> None:
    identity = Identity.of("organisation:acme", "s3")
    files = [
        UpstreamFile("a", 32768, identity, f"train/shard-{number % 10}/sample {number:05}.json", '"etag"')
        for number in range(5000)
    ]
    async with opened as source:
        await source.locate(files[0])
        spent = []
        for _ in range(3):
            before = time.process_time()
            for file in files:
                await source.locate(file)
            spent.append((time.process_time() - before) / len(files))
    assert min(spent) < 60e-6
