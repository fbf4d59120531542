"""A bucket of another region is followed there, once; keys that are renewed are picked up by the next request."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import pytest
from botocore.exceptions import ClientError

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import InvalidSourceError, UpstreamUnavailableError
from bdn.core.source.upstream import Source
from bdn.core.source.uri import BucketUri
from bdn.sources.s3.bucket import S3Bucket, connect
from bdn.sources.s3.client import HeadAnswer, ListingAnswer, S3Endpoint
from bdn.sources.s3.source import S3Source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import S3Credentials, StaticS3Credentials
from tests.contract.source_contract import listed
from tests.doubles.faults import Fault, answer
from tests.doubles.ranges import read_range
from tests.doubles.s3 import S3Server, s3_error
from tests.doubles.sigv4 import Account
from tests.support.mirror.s3_upstreams import S3Like
from tests.support.network.egress import LOOPBACK

NUMBERS = count()
LARGE = bytes(CHUNK_SIZE) + b"last"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(shared_server: S3Server) -> S3Server:
    shared_server.log.clear()
    shared_server.script.clear()
    return shared_server


def opened(server: S3Server, bucket: str) -> AbstractAsyncContextManager[Source]:
    """With keys that name no region, so it is opened in us-east-1."""
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=server.url)
    s3 = S3Like(settings, server.account, Account("", ""), lambda name, public: server.bucket(name, public=public))
    return s3.open(bucket, "", server.account)


async def test_a_bucket_of_another_region_is_followed_there_for_listings_and_locations(server: S3Server) -> None:
    bucket = server.bucket(f"regions-{next(NUMBERS)}", region="eu-central-2")
    bucket.put({f"{number:04}.txt": b"x" for number in range(1001)} | {"large.bin": LARGE})
    async with opened(server, bucket.name) as source:
        files = await listed(source)
        assert len(files) == 1002
        assert server.log.count() == 3  # the first of them was sent elsewhere
        for path in ("0000.txt", "large.bin"):
            location = await source.locate(files[path])
            assert "%2Feu-central-2%2Fs3%2F" in location.url
            assert read_range(location, 0, 1).status == 206


class ClientOfOneRegion:
    """Answers an empty listing where the bucket is, and elsewhere tells where that is."""

    def __init__(self, region: str) -> None:
        self._region = region

    async def list_objects_v2(self, **_: object) -> ListingAnswer:
        if self._region == "eu-central-2":
            return {"UnreadListing": b"<ListBucketResult></ListBucketResult>"}
        metadata = {"HTTPStatusCode": 301, "HTTPHeaders": {"x-amz-bucket-region": "eu-central-2"}}
        raise ClientError({"Error": {"Code": "PermanentRedirect"}, "ResponseMetadata": metadata}, "ListObjectsV2")

    async def head_object(self, **_: object) -> HeadAnswer:
        raise NotImplementedError

    async def generate_presigned_url(self, ClientMethod: str, Params: dict[str, str]) -> str:  # noqa: N803
        return f"https://{Params['Bucket']}.s3.{self._region}.amazonaws.com/{Params['Key']}?X-Amz-Signature=0"


async def test_objects_of_a_bucket_that_was_followed_are_read_at_the_address_of_its_own_region() -> None:
    async def open_client(region: str) -> ClientOfOneRegion:
        return ClientOfOneRegion(region)

    keys = StaticS3Credentials(S3Credentials("AKIA", "secret"))
    bucket = S3Bucket(BucketUri("s3", "weights", ""), S3Endpoint(None, "us-east-1", keys), open_client)
    assert (await bucket.page("")).objects == ()
    assert (await bucket.address("a/b")).url.startswith("https://weights.s3.eu-central-2.amazonaws.com/a/b?X-Amz-")


async def test_a_head_is_followed_as_well(server: S3Server) -> None:
    bucket = server.bucket(f"regions-{next(NUMBERS)}")
    bucket.put({"large.bin": LARGE})
    async with opened(server, bucket.name) as source:
        file = (await listed(source))["large.bin"]
        bucket.region = "eu-central-2"
        location = await source.locate(file)
    assert "%2Feu-central-2%2Fs3%2F" in location.url
    assert read_range(location, 0, 1).status == 206
    assert server.log.count(method="HEAD") == 2


def elsewhere(region: str, status: int = 301, code: str = "PermanentRedirect") -> Fault:
    document = s3_error(status, code).content
    assert isinstance(document, bytes)
    return answer(status, {"x-amz-bucket-region": region}, document)


@pytest.mark.parametrize(("status", "code"), [(301, "PermanentRedirect"), (307, "TemporaryRedirect"), (400, "Odd")])
async def test_every_form_of_the_answer_is_understood(server: S3Server, status: int, code: str) -> None:
    bucket = server.bucket(f"regions-{next(NUMBERS)}")
    bucket.put({"a.txt": b"x"})
    server.fail(elsewhere("ap-south-1", status, code))
    async with opened(server, bucket.name) as source:
        files = await listed(source)
        assert "%2Fap-south-1%2Fs3%2F" in (await source.locate(files["a.txt"])).url


async def test_regions_that_send_us_to_and_fro_are_asked_once_each(server: S3Server) -> None:
    bucket = server.bucket(f"regions-{next(NUMBERS)}")
    server.fail(elsewhere("eu-west-1"))
    server.fail(elsewhere("us-east-1"), times=None)
    async with opened(server, bucket.name) as source:
        for requests in (2, 3):
            with pytest.raises(InvalidSourceError, match="another region"):
                await listed(source)
            assert server.log.count() == requests


@pytest.mark.parametrize("region", ["us-east-1", "", "evil.example/", "eu-west-1.evil.example", "EU", "x" * 99])
async def test_an_answer_that_names_no_other_region_is_not_followed(server: S3Server, region: str) -> None:
    bucket = server.bucket(f"regions-{next(NUMBERS)}")
    server.fail(elsewhere(region), times=None)
    async with opened(server, bucket.name) as source:
        with pytest.raises(InvalidSourceError, match='add "aws_region" to the secret'):
            await listed(source)
    assert server.log.count() == 1


async def test_a_redirect_to_an_address_is_not_followed(server: S3Server) -> None:
    bucket = server.bucket(f"regions-{next(NUMBERS)}")
    server.fail(answer(307, {"Location": f"{server.url}/stolen"}, b""), times=None)
    async with opened(server, bucket.name) as source:
        with pytest.raises(InvalidSourceError, match="another region"):
            await listed(source)
    assert server.log.count() == 1


@dataclass
class Renewed:
    """Keys that a test changes; none of them is an error."""

    current: S3Credentials | None
    asked: list[S3Credentials] = field(default_factory=list)

    async def get(self) -> S3Credentials:
        if self.current is None:
            raise UpstreamUnavailableError("sts", "the token service is away")
        self.asked.append(self.current)
        return self.current


def temporary(server: S3Server, number: int, expires_at: float) -> S3Credentials:
    account = Account(f"ASIA{number}", f"secret-{number}", f"token-{number}")
    server.accounts[account.access_key_id] = account
    return S3Credentials(account.access_key_id, account.secret_access_key, account.session_token, None, expires_at)


@asynccontextmanager
async def read_with(
    server: S3Server, bucket: str, keys: Renewed | StaticS3Credentials, now: float = 0
) -> AsyncIterator[Source]:
    uri = BucketUri("s3", bucket, "")
    endpoint = S3Endpoint(server.url, "us-east-1", keys, None, LOOPBACK)
    async with connect(uri, endpoint, clock=lambda: now) as opened_bucket:
        yield S3Source(uri, opened_bucket, place=("s3", server.url), organisation="acme")


async def test_keys_that_were_renewed_sign_the_next_page_and_the_next_location(server: S3Server) -> None:
    bucket = server.bucket(f"regions-{next(NUMBERS)}")
    bucket.put({f"{number:04}.txt": b"x" for number in range(1001)} | {"large.bin": LARGE})
    first, second = temporary(server, 1, 1000), temporary(server, 2, 5000)
    keys = Renewed(first)
    async with read_with(server, bucket.name, keys) as source:
        files = source.list(await source.resolve())
        found = {file.path: file for file in [await anext(files)]}
        before = await source.locate(found["0000.txt"])
        del server.accounts[first.access_key_id]
        keys.current = second
        found |= {file.path: file async for file in files}
        after = await source.locate(found["0000.txt"])
        assert (await source.locate(found["large.bin"])).checksum is not None
    assert len(found) == 1002
    assert ("ASIA1" in before.url, "ASIA2" in after.url) == (True, True)
    assert (before.expires_at, after.expires_at) == (1000, 3600)


async def test_a_failure_to_renew_keys_comes_out_as_it_is(server: S3Server) -> None:
    bucket = server.bucket(f"regions-{next(NUMBERS)}")
    bucket.put({"a.txt": b"x"})
    keys = Renewed(temporary(server, 3, 1000))
    async with read_with(server, bucket.name, keys) as source:
        file = (await listed(source))["a.txt"]
        keys.current = None
        with pytest.raises(UpstreamUnavailableError, match="the token service is away"):
            await source.locate(file)
        with pytest.raises(UpstreamUnavailableError, match="the token service is away"):
            await listed(source)
