"""S3Source keeps the contract of a Source on OpenStack Swift: a second server, of which nothing is ours."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import md5

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import AuthRequiredError, SourceChangedError, SourceNotFoundError
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.sources.settings import UpstreamSettings
from tests.contract.access_contract import SESAME, Access, AccessContract
from tests.contract.bucket_contract import Bucket, BucketContract
from tests.contract.opening import S3Like
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, listed, only_file
from tests.doubles.ranges import read_range, read_whole
from tests.doubles.sigv4 import Account
from tests.doubles.swift import PAGE, SwiftBucket, SwiftServer
from tests.support.network.egress import LOOPBACK


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    with SwiftServer(tmp_path_factory.mktemp("swift") / "server") as server:
        yield server


@pytest.fixture
def server(swift: SwiftServer) -> S3Like:
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=swift.url)
    return S3Like(settings, swift.account, swift.stranger, lambda name, _public: swift.bucket(name))


@pytest.fixture
def filled(swift: SwiftServer, server: S3Like) -> SwiftBucket:
    bucket = server.bucket()
    assert isinstance(bucket, SwiftBucket)
    return bucket


class TestFolderOfSwift(SourceContract):
    @pytest.fixture
    def upstream(self, server: S3Like) -> Upstream:
        return server.upstream("models/ü/a b+c%/")

    # Swift has no names with NUL.
    @pytest.mark.parametrize("path", ["a/../../etc/passwd", "../up", "back\\slash", "x" * 300])
    async def test_a_path_that_must_not_become_a_file_is_listed_for_the_selector_to_refuse(
        self, upstream: Upstream, path: str
    ) -> None:
        await super().test_a_path_that_must_not_become_a_file_is_listed_for_the_selector_to_refuse(upstream, path)


class TestBucketOfSwift(BucketContract):
    keys_of_several_pages = 2 * PAGE + 1

    @pytest.fixture
    def bucket(self, server: S3Like) -> Bucket:
        return server.upstream()


class TestAccessToSwift(AccessContract):
    readable = ("private",)  # requests without a signature are not S3's for Swift: it has another interface for them

    @pytest.fixture
    def access(self, server: S3Like) -> Access:
        return server.access()

    async def test_private_content_asks_strangers_for_a_secret(self, access: Access) -> None:
        async with access("anonymous") as source:
            with pytest.raises(SourceNotFoundError):
                await listed(source)


LARGE = bytes(CHUNK_SIZE) + b"last"


async def test_the_signature_covers_the_object_and_the_headers(server: S3Like, filled: SwiftBucket) -> None:
    filled.put({"a.bin": b"one", "b.bin": b"two"})
    async with server.open(filled.name, "", server.account) as source:
        location = await source.locate((await listed(source))["a.bin"])
    assert read_whole(location).content == b"one"
    other_object = replace(location, url=location.url.replace("a.bin", "b.bin"))
    other_header = replace(location, headers=(*location.headers[:1], ("x-amz-checksum-mode", "DISABLED")))
    longer_life = replace(location, url=location.url.replace("Expires=3600", "Expires=360000"))
    assert [read_whole(changed).status for changed in (other_object, other_header, longer_life)] == [403, 403, 403]


async def test_the_answer_to_a_get_of_a_small_file_states_its_md5(server: S3Like, filled: SwiftBucket) -> None:
    filled.put({"a.bin": CONTENT})
    async with server.open(filled.name, "", server.account) as source:
        location = await source.locate(await only_file(source))
    answer = read_whole(location)
    assert location.checksum is None
    assert location.stated is not None
    assert answer.content == CONTENT
    assert location.stated(answer.headers) == Checksum(ChecksumKind.MD5, md5(CONTENT).hexdigest())


async def test_the_md5_of_a_large_file_is_learned_by_locating(server: S3Like, filled: SwiftBucket) -> None:
    filled.put({"a.bin": LARGE})
    async with server.open(filled.name, "", server.account) as source:
        location = await source.locate(await only_file(source))
    assert location.checksum == Checksum(ChecksumKind.MD5, md5(LARGE).hexdigest())
    assert read_range(location, CHUNK_SIZE, len(LARGE)).content == b"last"


async def test_an_object_of_parts_has_no_md5(server: S3Like, filled: SwiftBucket) -> None:
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
    server: S3Like, filled: SwiftBucket
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
    (Account("test:reader", SESAME), "SignatureDoesNotMatch"),
    (Account("test:nobody", SESAME), "SignatureDoesNotMatch"),
    (Account("test:stranger", "stranger"), "AccessDenied"),
])  # fmt: skip
async def test_swift_s_own_refusals_are_told_apart(
    server: S3Like, filled: SwiftBucket, account: Account, said: str
) -> None:
    async with server.open(filled.name, "", account) as source:
        with pytest.raises(AuthRequiredError, match=said):
            await listed(source)
