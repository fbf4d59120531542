"""S3Source keeps the contract of a Source on SeaweedFS: a second server, of which nothing is ours."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import AuthRequiredError, SourceChangedError
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.sources.settings import UpstreamSettings
from tests.contract.access_contract import SESAME, Access, AccessContract
from tests.contract.bucket_contract import Bucket, BucketContract
from tests.contract.opening import S3Like
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, listed, only_file
from tests.doubles.ranges import read_range, read_whole
from tests.doubles.seaweed import SeaweedServer
from tests.doubles.sigv4 import Account
from tests.support.network.egress import LOOPBACK


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    with SeaweedServer(tmp_path_factory.mktemp("seaweed") / "server") as server:
        yield server


@dataclass(frozen=True)
class Filled:
    """A bucket that a test fills with the AWS client."""

    name: str
    client: Any

    def put(self, objects: Mapping[str, bytes]) -> None:
        for key, content in objects.items():
            self.client.put_object(Bucket=self.name, Key=key, Body=content)


@pytest.fixture
def server(weed: SeaweedServer) -> S3Like:
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=weed.url)
    return S3Like(settings, weed.account, weed.stranger, lambda name, _: Filled(weed.bucket(name), weed.client))


@pytest.fixture
def filled(server: S3Like) -> Filled:
    bucket = server.bucket()
    assert isinstance(bucket, Filled)
    return bucket


class TestFolderOfSeaweed(SourceContract):
    @pytest.fixture
    def upstream(self, server: S3Like) -> Upstream:
        return server.upstream("models/ü/a b+c%/")

    async def test_a_path_that_must_not_become_a_file_is_listed_for_the_selector_to_refuse(self) -> None:  # type: ignore[override]
        pytest.skip("SeaweedFS takes no such names")


class TestBucketOfSeaweed(BucketContract):
    """Its keys are paths: it takes none with an empty or a dot segment, and none that is an object and ends in a slash for another."""

    @pytest.fixture
    def bucket(self, server: S3Like) -> Bucket:
        return server.upstream()

    @pytest.mark.parametrize("marker", [{}])
    async def test_a_prefix_that_is_both_object_and_folder_asks_for_a_slash(
        self, bucket: Bucket, marker: dict[str, bytes]
    ) -> None:
        await super().test_a_prefix_that_is_both_object_and_folder_asks_for_a_slash(bucket, marker)

    async def test_an_object_beside_an_empty_folder_of_its_name_is_the_object(self) -> None:  # type: ignore[override]
        pytest.skip("SeaweedFS takes no such keys")

    async def test_keys_with_empty_and_dot_segments_are_listed_normalised_and_can_be_read(self) -> None:  # type: ignore[override]
        pytest.skip("SeaweedFS takes no such keys")

    async def test_a_key_that_would_be_absolute_below_its_prefix_is_listed_for_the_selector_to_refuse(self) -> None:  # type: ignore[override]
        pytest.skip("SeaweedFS takes no such keys")


class TestAccessToSeaweed(AccessContract):
    readable = ("private",)

    @pytest.fixture
    def access(self, server: S3Like) -> Access:
        return server.access()


LARGE = bytes(CHUNK_SIZE) + b"last"


async def test_the_signature_covers_the_object_and_the_headers(server: S3Like, filled: Filled) -> None:
    filled.put({"a.bin": b"one", "b.bin": b"two"})
    async with server.open(filled.name, "", server.account) as source:
        location = await source.locate((await listed(source))["a.bin"])
    assert read_whole(location).content == b"one"
    other_object = replace(location, url=location.url.replace("a.bin", "b.bin"))
    other_header = replace(location, headers=(*location.headers[:1], ("x-amz-checksum-mode", "DISABLED")))
    longer_life = replace(location, url=location.url.replace("Expires=3600", "Expires=360000"))
    assert [read_whole(changed).status for changed in (other_object, other_header, longer_life)] == [403, 403, 403]


async def test_the_checksum_that_the_server_has_is_stated_for_a_small_file_and_learned_for_a_large_one(
    server: S3Like, filled: Filled
) -> None:
    filled.put({"large.bin": LARGE, "small.bin": CONTENT})
    async with server.open(filled.name, "", server.account) as source:
        large, small = [await source.locate(file) for file in (await listed(source)).values()]
    assert large.checksum == Checksum(ChecksumKind.CRC32, f"{zlib.crc32(LARGE):08x}")
    assert read_range(large, CHUNK_SIZE, len(LARGE)).content == b"last"
    assert small.checksum is None
    assert small.stated is not None
    answer = read_whole(small)
    assert answer.content == CONTENT
    assert small.stated(answer.headers) == Checksum(ChecksumKind.CRC32, f"{zlib.crc32(CONTENT):08x}")


async def test_an_object_of_parts_has_no_md5(server: S3Like, filled: Filled) -> None:
    upload = {"Bucket": filled.name, "Key": "a.bin"}
    upload["UploadId"] = filled.client.create_multipart_upload(**upload)["UploadId"]
    etags = [
        filled.client.upload_part(**upload, PartNumber=number, Body=body)["ETag"]
        for number, body in ((1, LARGE[:CHUNK_SIZE]), (2, LARGE[CHUNK_SIZE:]))
    ]
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
    filled.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    async with server.open(filled.name, "", server.account) as source:
        file = await only_file(source)
        location = await source.locate(file)
    assert file.version.endswith('-2"')
    assert location.checksum is None
    assert read_range(location, CHUNK_SIZE, len(LARGE)).content == b"last"


async def test_a_large_file_of_a_bucket_that_keeps_versions_is_read_to_its_end_in_the_version_it_was_listed_in(
    server: S3Like, filled: Filled
) -> None:
    filled.client.put_bucket_versioning(Bucket=filled.name, VersioningConfiguration={"Status": "Enabled"})
    filled.put({"a.bin": LARGE})
    async with server.open(filled.name, "", server.account) as source:
        file = await only_file(source)
        location = await source.locate(file)
        assert "&versionId=" in location.url
        filled.put({"a.bin": LARGE[::-1]})
        assert read_range(location, 0, 4).content == bytes(4)
        with pytest.raises(SourceChangedError, match="ETag"):
            await source.locate(file)
        filled.client.delete_object(Bucket=filled.name, Key="a.bin")
        assert read_range(location, CHUNK_SIZE, len(LARGE)).content == b"last"
        with pytest.raises(SourceChangedError):
            await source.locate(file)


@pytest.mark.parametrize(("account", "said"), [
    (Account("bdn", SESAME), "SignatureDoesNotMatch"),
    (Account("unknown", SESAME), "InvalidAccessKeyId"),
    (Account("stranger", "stranger"), "AccessDenied"),
])  # fmt: skip
async def test_seaweed_s_own_refusals_are_told_apart(
    server: S3Like, filled: Filled, account: Account, said: str
) -> None:
    async with server.open(filled.name, "", account) as source:
        with pytest.raises(AuthRequiredError, match=said):
            await listed(source)
