"""GcsSource keeps the contracts of a Source, a bucket and access, against a double that is as strict as GCS."""

import gc
import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from itertools import count
from urllib.parse import parse_qs, urlsplit

import pytest

from bdn.core.source.upstream import Checksum, ChecksumKind, Source, UpstreamFile
from bdn.sources.gcs.bucket import GcsObject
from tests.contract.access_contract import SESAME, Access, AccessContract
from tests.contract.bucket_contract import Bucket, BucketContract
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, consumed, listed, listed_within
from tests.doubles.faults import answer
from tests.doubles.gcs import GcsServer
from tests.doubles.gcs_accounts import GoogleAccount
from tests.doubles.gcs_objects import GcsBucket
from tests.doubles.ranges import read_range
from tests.support.mirror.gcs_sources import FolderUpstream, PrefixedBucket, Way

NUMBERS = count()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def server(shared_server: GcsServer) -> GcsServer:
    shared_server.log.clear()
    shared_server.script.clear()
    shared_server.page_limit = 1000
    return shared_server


@pytest.fixture
def bucket(server: GcsServer) -> GcsBucket:
    return server.bucket(f"source-{next(NUMBERS)}")


def way_of(server: GcsServer, account: GoogleAccount | None = None) -> Way:
    account = account or server.account
    return Way(server.url, server.token_url, account.key(server.token_url))


class TestFolderOfAPrivateBucket(SourceContract):
    @pytest.fixture
    def upstream(self, server: GcsServer, bucket: GcsBucket) -> Upstream:
        return FolderUpstream(way_of(server), bucket, "models/a b+c%/")


class TestWholePublicBucketInSmallPages(SourceContract):
    @pytest.fixture
    def upstream(self, server: GcsServer) -> Upstream:
        server.page_limit = 3
        return FolderUpstream(Way(server.url), server.bucket(f"public-{next(NUMBERS)}", public=True))


class TestBucket(BucketContract):
    @pytest.fixture
    def bucket(self, server: GcsServer) -> Bucket:
        return PrefixedBucket(way_of(server), server.bucket(f"bucket-{next(NUMBERS)}"))


class GcsAccess:
    def __init__(self, server: GcsServer) -> None:
        self._server = server
        self._names = {public: f"access-{next(NUMBERS)}" for public in (True, False)}
        for public, name in self._names.items():
            server.bucket(name, public=public).put({"a.txt": b"x"})

    def public(self) -> AbstractAsyncContextManager[Source]:
        return Way(self._server.url).open(f"gs://{self._names[True]}")

    def private(self) -> AbstractAsyncContextManager[Source]:
        return way_of(self._server).open(f"gs://{self._names[False]}")

    def anonymous(self) -> AbstractAsyncContextManager[Source]:
        return Way(self._server.url).open(f"gs://{self._names[False]}")

    def wrong_key(self) -> AbstractAsyncContextManager[Source]:
        key = {**self._server.account.key(self._server.token_url), "private_key": GoogleAccount(SESAME).pem}
        way = Way(self._server.url, self._server.token_url, {**key, "private_key_id": SESAME})
        return way.open(f"gs://{self._names[False]}")

    def denied(self) -> AbstractAsyncContextManager[Source]:
        return way_of(self._server, self._server.stranger).open(f"gs://{self._names[False]}")

    def missing(self) -> AbstractAsyncContextManager[Source]:
        return way_of(self._server).open("gs://no-such-bucket/x")


class TestAccess(AccessContract):
    @pytest.fixture
    def access(self, server: GcsServer) -> Access:
        return GcsAccess(server)


async def test_two_thousand_and_one_objects_cost_three_requests_of_a_thousand(
    server: GcsServer, bucket: GcsBucket
) -> None:
    bucket.put({f"m/a b+%{number:04}.txt": b"x" for number in range(2001)})
    async with way_of(server).open(f"gs://{bucket.name}/m/") as source:
        assert len(await listed(source)) == 2001
    pages = [parse_qs(urlsplit(request.target).query) for request in server.log.find(origin="gcs")]
    assert [page["maxResults"] for page in pages] == [["1000"]] * 3


async def test_a_listing_asks_for_no_more_pages_than_are_consumed(server: GcsServer, bucket: GcsBucket) -> None:
    bucket.put({f"{number:04}.txt": b"x" for number in range(1001)})
    async with way_of(server).open(f"gs://{bucket.name}") as source:
        resolution = await source.resolve()
        await anext(source.list(resolution))
        assert server.log.count(origin="gcs") == 1
        assert await consumed(source.list(resolution)) == 1001


async def test_a_narrowed_listing_costs_only_the_pages_of_its_part(server: GcsServer, bucket: GcsBucket) -> None:
    bucket.put({f"m/{folder}/{number:04}.txt": b"x" for folder in "abc" for number in range(1001)})
    async with way_of(server).open(f"gs://{bucket.name}/m/") as source:
        assert len(await listed_within(source, "b/")) == 1001
    assert server.log.count(origin="gcs") == 2


async def test_only_what_is_used_is_asked_for(server: GcsServer, bucket: GcsBucket) -> None:
    bucket.put({f"{number:03}.txt": b"x" for number in range(100)})
    async with way_of(server).open(f"gs://{bucket.name}") as source:
        await listed(source)
    assert server.log.bytes_served(origin="gcs") < 100 * 150  # a full description takes 500 bytes


async def test_resolving_and_locating_cost_no_request_but_the_first_token(server: GcsServer, bucket: GcsBucket) -> None:
    bucket.put({"a.bin": CONTENT})
    async with way_of(server).open(f"gs://{bucket.name}") as source:
        assert (await source.resolve()).revision is None
        assert server.log.count() == 0
        file = (await listed(source))["a.bin"]
        await source.locate(file)
    assert [request.origin for request in server.log.find()] == ["oauth", "gcs"]


async def test_content_belongs_to_the_organisation_also_where_everybody_may_read(server: GcsServer) -> None:
    bucket = server.bucket(f"public-{next(NUMBERS)}", public=True)
    bucket.put({"a.bin": b"x"})
    scopes = set()
    for organisation in ("acme", "other"):
        async with Way(server.url).open(f"gs://{bucket.name}", organisation) as source:
            scopes.add((await listed(source))["a.bin"].identity.scope)
    assert scopes == {"organisation:acme", "organisation:other"}


@pytest.mark.parametrize("composite", [False, True])
async def test_the_checksum_is_the_crc32c_also_of_composite_objects(
    server: GcsServer, bucket: GcsBucket, composite: bool
) -> None:
    # RFC 3720, appendix B.4: of 32 bytes of zeroes.
    bucket.put({"a.bin": bytes(32)}, composite=composite)
    async with way_of(server).open(f"gs://{bucket.name}") as source:
        assert (await listed(source))["a.bin"].checksum == Checksum(ChecksumKind.CRC32C, "8a9136aa")


@pytest.mark.parametrize(("hashes", "checksum"), [
    ({"crc32c": "ipE2qg==", "md5Hash": "cLw8Wd7k+dF3ZNCKAOr3GA=="}, Checksum(ChecksumKind.CRC32C, "8a9136aa")),
    ({"md5Hash": "1B2M2Y8AsgTpgAmY7PhCfg=="}, Checksum(ChecksumKind.MD5, "d41d8cd98f00b204e9800998ecf8427e")),
    ({}, None),
])  # fmt: skip
async def test_a_server_without_crc32c_may_state_an_md5_or_nothing(
    server: GcsServer, hashes: dict[str, str], checksum: Checksum | None
) -> None:
    bucket = server.bucket(f"public-{next(NUMBERS)}", public=True)
    document = {"items": [{"name": "a.bin", "generation": "1", "size": "32", **hashes}]}
    server.fail(answer(200, {"Content-Type": "application/json"}, json.dumps(document).encode()))
    async with Way(server.url).open(f"gs://{bucket.name}") as source:
        assert (await listed(source))["a.bin"].checksum == checksum


def alive() -> int:
    return sum(isinstance(value, GcsObject | UpstreamFile) for value in gc.get_objects())


async def test_a_long_listing_takes_the_memory_of_one_page(server: GcsServer, bucket: GcsBucket) -> None:
    bucket.put({f"{number:05}.bin": b"x" for number in range(5000)})
    gc.collect()
    before = alive()
    held = []
    async with way_of(server).open(f"gs://{bucket.name}") as source:
        async for file in source.list(await source.resolve()):
            if file.path.endswith("500.bin"):
                held.append(alive() - before)
    assert len(held) == 5
    assert max(held) <= 1001


async def test_a_generation_that_was_replaced_or_deleted_is_gone(server: GcsServer, bucket: GcsBucket) -> None:
    bucket.put({"a.bin": b"before", "b.bin": b"before"})
    async with way_of(server).open(f"gs://{bucket.name}") as source:
        files = await listed(source)
        bucket.put({"a.bin": b"after!"})
        bucket.delete("b.bin")
        for file in files.values():
            assert f"&generation={file.version}" in (await source.locate(file)).url
            assert read_range(await source.locate(file), 0, 6).status == 404


async def test_the_same_bytes_written_again_are_another_identity(server: GcsServer, bucket: GcsBucket) -> None:
    identities = set()
    for _ in range(2):
        bucket.put({"a.bin": b"same"})
        async with way_of(server).open(f"gs://{bucket.name}") as source:
            identities.add((await listed(source))["a.bin"].identity.key)
    assert len(identities) == 2


async def test_the_token_travels_in_a_header_and_is_in_no_repr(server: GcsServer, bucket: GcsBucket) -> None:
    bucket.put({"a.bin": CONTENT})
    async with way_of(server).open(f"gs://{bucket.name}") as source:
        location = await source.locate((await listed(source))["a.bin"])
    token = dict(location.headers)["Authorization"].removeprefix("Bearer ")
    assert server.tokens.owner_of(token) == server.account.email
    assert token not in location.url
    assert token not in repr(location) + repr(source)
    assert location.expires_at is not None


async def test_anonymous_reading_sends_no_token_and_its_locations_do_not_end(server: GcsServer) -> None:
    bucket = server.bucket(f"public-{next(NUMBERS)}", public=True)
    bucket.put({"a.bin": CONTENT})
    async with Way(server.url).open(f"gs://{bucket.name}") as source:
        location = await source.locate((await listed(source))["a.bin"])
    assert location.expires_at is None
    assert [request.headers.get("authorization") for request in server.log.find()] == [None]
    assert dict(location.headers).keys() == {"Accept-Encoding"}
