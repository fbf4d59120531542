"""S3Source keeps the contracts of a Source, a bucket and access, against moto behind real signatures."""

import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import md5
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.exceptions import ClientError

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import InvalidSourceError, UpstreamUnavailableError
from bdn.core.source.upstream import Checksum, ChecksumKind, Identity, Source, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.sources.refreshing import Refreshing
from bdn.sources.s3.bucket import RegionalBucket
from bdn.sources.s3.client import S3Endpoint, bucket_address, s3_client
from bdn.sources.s3.credentials import fixed_keys
from bdn.sources.s3.source import S3Source
from bdn.sources.settings import S3Credentials, UpstreamSettings
from bdn.sources.sign_in import SourceContext
from tests.contract.access_contract import Access, AccessContract
from tests.contract.bucket_contract import Bucket, BucketContract
from tests.contract.opening import NUMBERS, BucketUpstream, Opened, S3Like
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, consumed, listed, listed_within, only_file
from tests.doubles.faults import Fault, answer
from tests.doubles.ranges import read_range, read_whole
from tests.doubles.s3 import S3Bucket, S3Server
from tests.doubles.s3_errors import s3_error
from tests.doubles.sigv4 import Account

LARGE = bytes(CHUNK_SIZE) + b"last"


@pytest.fixture
def bucket(s3: S3Like) -> S3Bucket:
    bucket = s3.bucket()
    assert isinstance(bucket, S3Bucket)
    return bucket


@pytest.fixture
def opened(s3: S3Like, bucket: S3Bucket) -> Opened:
    """The whole bucket, read by its owner with keys that name no region."""
    return s3.open(bucket.name, "", s3.account)


class TestFolderOfAPrivateBucket(SourceContract):
    @pytest.fixture
    def upstream(self, s3: S3Like) -> Upstream:
        return s3.upstream("models/ü/a b+c%/")


class TestWholePublicBucket(SourceContract):
    @pytest.fixture
    def upstream(self, s3: S3Like) -> Upstream:
        bucket = s3.bucket(public=True)
        return BucketUpstream(bucket, lambda prefix: s3.open(bucket.name, prefix))


class TestBucketOfS3(BucketContract):
    @pytest.fixture
    def bucket(self, s3: S3Like) -> Bucket:
        return s3.upstream()


class TestAccessToS3(AccessContract):
    @pytest.fixture
    def access(self, s3: S3Like) -> Access:
        return s3.access()


# --- what a listing costs: of every kind of bucket, since they share it ---


async def test_a_prefix_that_is_one_object_costs_two_requests(
    s3: S3Like, s3_server: S3Server, bucket: S3Bucket
) -> None:
    bucket.put({"m/model.bin": CONTENT, "m/model.bin.sha256": b"x"})
    async with s3.open(bucket.name, "m/model.bin", s3.account) as source:
        assert set(await listed(source)) == {"model.bin"}
    assert s3_server.log.count("list-type=2") == s3_server.log.count() == 2


async def test_two_thousand_and_one_keys_cost_three_requests_of_which_only_those_that_are_consumed_are_made(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({f"m/a b+%{number:04}.txt": b"x" for number in range(2001)})
    async with opened as source:
        resolution = await source.resolve()
        await anext(source.list(resolution))
        assert s3_server.log.count() == 1
        assert await consumed(source.list(resolution)) == 2001
    assert s3_server.log.count() == 1 + 3


async def test_a_narrowed_listing_asks_once_for_each_beginning_and_for_nothing_else(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    s3_server.page_limit = 2
    bucket.put({f"{folder}/{number:04}.txt": b"x" for folder in ("a b", "c") for number in range(5)})
    bucket.put({"d/1.txt": b"x", "d/2.txt": b"x"})
    async with opened as source:
        assert await listed_within(source, "a b/0001", "d/") == ["a b/0001.txt", "d/1.txt", "d/2.txt"]
    asked = [parse_qs(urlsplit(request.target).query)["prefix"] for request in s3_server.log.find()]
    assert asked == [["a b/0001"], ["d/"]]


# --- locations ---


async def test_content_belongs_to_the_organisation_also_where_everybody_may_read(s3: S3Like) -> None:
    bucket = s3.bucket(public=True)
    bucket.put({"a.bin": b"x"})
    scopes = set()
    for organisation in ("acme", "other"):
        async with s3.open(bucket.name, organisation=organisation) as source:
            scopes.add((await only_file(source)).identity.scope)
    assert scopes == {"organisation:acme", "organisation:other"}


async def test_resolving_and_locating_a_file_of_one_chunk_cost_no_request(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({"a.bin": bytes(CHUNK_SIZE)})
    async with opened as source:
        assert (await source.resolve()).revision is None
        await source.locate(await only_file(source))
    assert s3_server.log.count() == 1


async def test_the_listed_etag_is_the_version_and_never_a_checksum(bucket: S3Bucket, opened: Opened) -> None:
    bucket.put({"a.bin": CONTENT})
    async with opened as source:
        file = await only_file(source)
        location = await source.locate(file)
    assert file.checksum is None
    assert file.version == location.etag == read_range(location, 0, 1).headers["etag"]


async def test_the_answer_for_a_file_of_one_chunk_states_its_best_checksum(bucket: S3Bucket, opened: Opened) -> None:
    bucket.put({"a.bin": CONTENT})
    bucket.state("a.bin", {"x-amz-checksum-crc64nvme": "AAECAwQFBgc=", "x-amz-checksum-type": "FULL_OBJECT"})
    async with opened as source:
        location = await source.locate(await only_file(source))
    assert location.checksum is None
    assert location.stated is not None
    whole = read_whole(location)
    assert whole.content == CONTENT
    assert location.stated(whole.headers) == Checksum(ChecksumKind.CRC64NVME, "0001020304050607")
    assert location.stated(read_range(location, 0, 1).headers) == Checksum(ChecksumKind.MD5, md5(CONTENT).hexdigest())


async def test_the_checksum_of_a_larger_file_is_learned_with_one_request(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({"a.bin": LARGE})
    bucket.state("a.bin", {"x-amz-checksum-crc32c": "AAECAw=="})
    async with opened as source:
        file = await only_file(source)
        location = await source.locate(file)
    assert location.checksum == Checksum(ChecksumKind.CRC32C, "00010203")
    assert location.stated is None
    (head,) = s3_server.log.find(method="HEAD")
    assert head.headers["if-match"] == file.version


async def test_a_location_is_signed_for_an_hour_and_does_not_hold_the_secret_key(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.put({"a.bin": b"x"})
    async with opened as source:
        location = await source.locate(await only_file(source))
    query = parse_qs(urlsplit(location.url).query)
    assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
    assert query["X-Amz-Expires"] == ["3600"]
    assert location.expires_at is not None
    assert abs(location.expires_at - time.time() - 3600) < 60
    assert s3_server.account.secret_access_key not in location.url


async def test_an_anonymous_location_is_a_plain_address_that_does_not_expire(s3: S3Like) -> None:
    bucket = s3.bucket(public=True)
    bucket.put({"a b.bin": b"x"})
    async with s3.open(bucket.name) as source:
        location = await source.locate(await only_file(source))
    assert location.url == f"{s3.settings.s3_endpoint_url}/{bucket.name}/a%20b.bin"
    assert location.expires_at is None


async def test_a_location_of_one_of_a_million_small_files_costs_little(opened: Opened) -> None:
    """A hundred calls, of Python and of C, are twenty microseconds; botocore makes a thousand for an address."""
    identity = Identity.of("organisation:acme", "s3")
    files = [
        UpstreamFile("a", 32768, identity, f"train/shard-{number % 10}/sample {number:05}.json", '"etag"')
        for number in range(100)
    ]
    calls = Counter[str]()
    async with opened as source:
        await source.locate(files[0])
        sys.setprofile(lambda _, event, __: calls.update([event]))
        try:
            for file in files:
                await source.locate(file)
        finally:
            sys.setprofile(None)
    assert calls["call"] + calls["c_call"] <= 100 * len(files), calls


# --- versions ---


async def test_a_large_file_of_a_bucket_that_keeps_versions_is_pinned_to_its_version(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.keep_versions()
    bucket.put({"a.bin": LARGE, "b.bin": LARGE})
    async with opened as source:
        files = await listed(source)
        locations = [await source.locate(file) for file in files.values()]
        bucket.put({"a.bin": LARGE[::-1], "b.bin": LARGE[::-1]})
    assert all("&versionId=" in location.url for location in locations)
    assert [read_range(location, CHUNK_SIZE, len(LARGE)).content for location in locations] == [b"last", b"last"]
    assert s3_server.log.count(method="HEAD") == 3  # one for each, and one to learn that versions may be read


@pytest.mark.parametrize("version", [None, "null"])  # "null" is what was written before versions were kept
async def test_without_versions_nothing_but_the_etag_pins_a_large_file(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened, version: str | None
) -> None:
    bucket.put({"a.bin": LARGE})
    bucket.state("a.bin", {"x-amz-version-id": version} if version else {})
    async with opened as source:
        location = await source.locate(await only_file(source))
    assert "versionId" not in location.url
    assert s3_server.log.count(method="HEAD") == 1
    bucket.put({"a.bin": LARGE[::-1]})
    assert read_range(location, 0, 4).status == 412


async def test_where_versions_may_not_be_read_the_etag_alone_pins_and_that_is_asked_once(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.keep_versions()
    bucket.put({"a.bin": LARGE})
    s3_server.fail(answer(403), "versionId", times=None)
    async with opened as source:
        file = await only_file(source)
        await source.locate(file)
        location = await source.locate(file)
    assert "versionId" not in location.url
    assert read_range(location, CHUNK_SIZE, len(LARGE)).content == b"last"
    assert s3_server.log.count("versionId") == 1


async def test_a_failure_to_learn_whether_versions_may_be_read_is_a_failure_and_asked_again(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened
) -> None:
    bucket.keep_versions()
    bucket.put({"a.bin": LARGE})
    s3_server.fail(answer(500), "versionId")
    async with opened as source:
        file = await only_file(source)
        with pytest.raises(UpstreamUnavailableError):
            await source.locate(file)
        assert "&versionId=" in (await source.locate(file)).url


# --- a bucket of another region is followed there, once ---


async def test_a_bucket_of_another_region_is_followed_there_for_listings_and_locations(
    s3: S3Like, s3_server: S3Server
) -> None:
    bucket = s3_server.bucket(f"regions-{next(NUMBERS)}", region="eu-central-2")
    bucket.put({"0.txt": b"x", "1.txt": b"x", "large.bin": LARGE})
    s3_server.page_limit = 2
    async with s3.open(bucket.name, "", s3.account) as source:
        files = await listed(source)
        assert len(files) == 3
        assert s3_server.log.count() == 3  # the first of them was sent elsewhere
        for path in ("0.txt", "large.bin"):
            location = await source.locate(files[path])
            assert "%2Feu-central-2%2Fs3%2F" in location.url
            assert read_range(location, 0, 1).status == 206


class ClientOfOneRegion:
    """Answers an empty listing where the bucket is, and elsewhere tells where that is."""

    def __init__(self, region: str) -> None:
        self._region = region

    async def list_objects_v2(self, **_: object) -> dict[str, bytes]:
        if self._region == "eu-central-2":
            return {"UnreadListing": b"<ListBucketResult></ListBucketResult>"}
        metadata = {"HTTPStatusCode": 301, "HTTPHeaders": {"x-amz-bucket-region": "eu-central-2"}}
        raise ClientError({"Error": {"Code": "PermanentRedirect"}, "ResponseMetadata": metadata}, "ListObjectsV2")

    async def generate_presigned_url(self, ClientMethod: str, Params: dict[str, str]) -> str:  # noqa: N803
        return f"https://{Params['Bucket']}.s3.{self._region}.amazonaws.com/{Params['Key']}?X-Amz-Signature=0"


async def test_objects_of_a_bucket_that_was_followed_are_read_at_the_address_of_its_own_region() -> None:
    async def open_client(region: str) -> ClientOfOneRegion:
        return ClientOfOneRegion(region)

    endpoint = S3Endpoint(None, "us-east-1", fixed_keys(S3Credentials("AKIA", "secret"), time.time), ("s3", "aws"))
    uri, context = BucketUri("s3", "weights", ""), SourceContext("acme", UpstreamSettings())
    source = S3Source(uri, context, RegionalBucket(uri, context, endpoint, open_client))
    assert await listed(source) == {}
    location = await source.locate(UpstreamFile("b", 1, Identity.of("organisation:acme", "s3"), "a/b", '"etag"'))
    assert location.url.startswith("https://weights.s3.eu-central-2.amazonaws.com/a/b?X-Amz-")


async def test_a_head_is_followed_as_well(s3_server: S3Server, bucket: S3Bucket, opened: Opened) -> None:
    bucket.put({"large.bin": LARGE})
    async with opened as source:
        file = (await listed(source))["large.bin"]
        bucket.region = "eu-central-2"
        location = await source.locate(file)
    assert "%2Feu-central-2%2Fs3%2F" in location.url
    assert read_range(location, 0, 1).status == 206
    assert s3_server.log.count(method="HEAD") == 2


def elsewhere(region: str, status: int = 301, code: str = "PermanentRedirect") -> Fault:
    document = s3_error(status, code).content
    assert isinstance(document, bytes)
    return answer(status, {"x-amz-bucket-region": region}, document)


@pytest.mark.parametrize(("status", "code"), [(301, "PermanentRedirect"), (307, "TemporaryRedirect"), (400, "Odd")])
async def test_every_form_of_the_answer_is_understood(
    s3_server: S3Server, bucket: S3Bucket, opened: Opened, status: int, code: str
) -> None:
    bucket.put({"a.txt": b"x"})
    s3_server.fail(elsewhere("ap-south-1", status, code))
    async with opened as source:
        assert "%2Fap-south-1%2Fs3%2F" in (await source.locate(await only_file(source))).url


async def test_regions_that_send_us_to_and_fro_are_asked_once_each(s3_server: S3Server, opened: Opened) -> None:
    s3_server.fail(elsewhere("eu-west-1"))
    s3_server.fail(elsewhere("us-east-1"), times=None)
    async with opened as source:
        for requests in (2, 3):
            with pytest.raises(InvalidSourceError, match="another region"):
                await listed(source)
            assert s3_server.log.count() == requests


@pytest.mark.parametrize("fault", [
    *map(elsewhere, ["us-east-1", "", "evil.example/", "eu-west-1.evil.example", "EU", "x" * 99]),
    answer(307, {"Location": "http://127.0.0.1:9/stolen"}, b""),
])  # fmt: skip
async def test_an_answer_that_names_no_other_region_is_not_followed(
    s3_server: S3Server, opened: Opened, fault: Fault
) -> None:
    s3_server.fail(fault, times=None)
    async with opened as source:
        with pytest.raises(InvalidSourceError, match=r'is in another region .*; add "aws_region" to the secret'):
            await listed(source)
    assert s3_server.log.count() == 1


# --- keys that are renewed are picked up by the next request ---


class Renewed(Refreshing[S3Credentials]):
    """Keys that a test changes; none of them is an error."""

    def __init__(self, current: S3Credentials | None) -> None:
        self.current = current

    async def get(self) -> S3Credentials:
        if self.current is None:
            raise UpstreamUnavailableError("sts", "the token service is away")
        return self.current


def temporary(server: S3Server, number: int, expires_at: float) -> S3Credentials:
    account = Account(f"ASIA{number}", f"secret-{number}", f"token-{number}")
    server.accounts[account.access_key_id] = account
    return S3Credentials(account.access_key_id, account.secret_access_key, account.session_token, None, expires_at)


@pytest.fixture
def keys(s3_server: S3Server) -> Renewed:
    return Renewed(temporary(s3_server, 1, 1000))


@pytest.fixture
async def source(s3: S3Like, bucket: S3Bucket, keys: Renewed) -> AsyncIterator[Source]:
    """The bucket read with these keys; it is always the beginning of 1970."""
    endpoint = S3Endpoint(s3.settings.s3_endpoint_url, "us-east-1", keys, ("s3",))
    uri, context = BucketUri("s3", bucket.name, ""), SourceContext("acme", s3.settings, clock=lambda: 0.0)
    async with AsyncExitStack() as stack:
        opened = RegionalBucket(
            uri,
            context,
            endpoint,
            lambda region: stack.enter_async_context(s3_client(bucket.name, endpoint, region, s3.settings)),
        )
        yield S3Source(uri, context, opened)


async def test_keys_that_were_renewed_sign_the_next_page_and_the_next_location(
    s3_server: S3Server, bucket: S3Bucket, keys: Renewed, source: Source
) -> None:
    bucket.put({"0.txt": b"x", "1.txt": b"x", "large.bin": LARGE})
    s3_server.page_limit = 2
    files = source.list(await source.resolve())
    found = {file.path: file for file in [await anext(files)]}
    before = await source.locate(found["0.txt"])
    del s3_server.accounts["ASIA1"]
    keys.current = temporary(s3_server, 2, 5000)
    found |= {file.path: file async for file in files}
    after = await source.locate(found["0.txt"])
    assert (await source.locate(found["large.bin"])).checksum is not None
    assert len(found) == 3
    assert ("ASIA1" in before.url, "ASIA2" in after.url) == (True, True)
    assert (before.expires_at, after.expires_at) == (1000, 3600)


async def test_a_failure_to_renew_keys_comes_out_as_it_is(bucket: S3Bucket, keys: Renewed, source: Source) -> None:
    bucket.put({"a.txt": b"x"})
    file = await only_file(source)
    keys.current = None
    for attempt in (source.locate(file), listed(source)):
        with pytest.raises(UpstreamUnavailableError, match="the token service is away"):
            await attempt


async def test_every_request_of_a_requester_pays_source_says_so(s3: S3Like, s3_server: S3Server) -> None:
    bucket = s3.bucket()
    bucket.put({"small.txt": CONTENT, "large.bin": b"x" * (CHUNK_SIZE + 1)})
    paying = replace(s3, settings=replace(s3.settings, s3_requester_pays=True))
    async with paying.open(bucket.name, account=s3.account) as source:
        for file in (await listed(source)).values():
            assert read_range(await source.locate(file), 0, 4).status == 206  # the server checks what is signed
    assert {request.headers.get("x-amz-request-payer") for request in s3_server.log.find()} == {"requester"}


async def test_virtual_addressing_puts_the_bucket_into_the_host_of_another_endpoint(s3: S3Like) -> None:
    endpoint = S3Endpoint("https://store.example:9000", "us-east-1", None, ("s3",), "virtual")
    async with s3_client("models", endpoint, "us-east-1", s3.settings) as client:
        assert await bucket_address(client, "models") == "https://models.store.example:9000/"
