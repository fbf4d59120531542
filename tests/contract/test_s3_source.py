"""S3Source keeps the contract of a Source, against moto behind real signatures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from itertools import count
from urllib.parse import parse_qs, urlsplit

import pytest

from bdn.core.errors import InvalidSourceError, SourceNotFoundError
from bdn.core.ports import Source
from bdn.core.source_uri import parse_source
from bdn.sources.credentials import Secret
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, consumed, listed
from tests.doubles.ranges import read_range
from tests.doubles.s3 import S3Bucket, S3Server

NUMBERS = count()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(shared_server: S3Server) -> S3Server:
    shared_server.log.clear()
    shared_server.script.clear()
    return shared_server


@pytest.fixture
def bucket(server: S3Server) -> S3Bucket:
    return server.bucket(f"source-{next(NUMBERS)}")


def opened(
    server: S3Server, uri: str, *, anonymous: bool = False, organisation: str = "acme"
) -> AbstractAsyncContextManager[Source]:
    account = server.account
    keys = {"aws_access_key_id": account.access_key_id, "aws_secret_access_key": account.secret_access_key}
    return open_source(
        parse_source(uri),
        secret=None if anonymous else Secret("s3", json.dumps(keys)),
        organisation=organisation,
        ambient_credentials=False,
        settings=UpstreamSettings(s3_endpoint_url=server.url),
    )


class BucketUpstream:
    def __init__(self, server: S3Server, bucket: S3Bucket, prefix: str, *, anonymous: bool = False) -> None:
        self._server = server
        self._bucket = bucket
        self._prefix = prefix
        self._anonymous = anonymous

    def fill(self, files: Mapping[str, bytes]) -> None:
        self._bucket.put({f"{self._prefix}{path}": content for path, content in files.items()})

    def open(self, organisation: str = "acme") -> AbstractAsyncContextManager[Source]:
        uri = f"s3://{self._bucket.name}/{self._prefix}" if self._prefix else f"s3://{self._bucket.name}"
        return opened(self._server, uri, anonymous=self._anonymous, organisation=organisation)


class TestFolderOfAPrivateBucket(SourceContract):
    @pytest.fixture
    def upstream(self, server: S3Server, bucket: S3Bucket) -> Upstream:
        return BucketUpstream(server, bucket, "models/a b+c%/")


class TestWholePublicBucket(SourceContract):
    @pytest.fixture
    def upstream(self, server: S3Server) -> Upstream:
        bucket = server.bucket(f"public-{next(NUMBERS)}", public=True)
        return BucketUpstream(server, bucket, "", anonymous=True)


async def test_a_prefix_without_a_slash_is_a_folder_and_not_the_beginning_of_a_name(
    server: S3Server, bucket: S3Bucket
) -> None:
    bucket.put({"model/a.bin": b"x", "model-2/b.bin": b"x", "model.txt": b"x"})
    async with opened(server, f"s3://{bucket.name}/model") as source:
        assert set(await listed(source)) == {"a.bin"}


@pytest.mark.parametrize("key", ["model.safetensors", "deep/folder/model.safetensors", "deep/a b+c%.bin"])
async def test_a_prefix_may_be_exactly_one_object(server: S3Server, bucket: S3Bucket, key: str) -> None:
    bucket.put({key: CONTENT, f"{key}.sha256": b"x", "other": b"x"})
    async with opened(server, f"s3://{bucket.name}/{key}") as source:
        files = await listed(source)
        assert set(files) == {key.rpartition("/")[2]}
        location = await source.locate(files[key.rpartition("/")[2]])
    assert read_range(location, 3, 9).content == CONTENT[3:9]
    assert server.log.count("list-type=2") == 2


@pytest.mark.parametrize("marker", [{}, {"model/": b""}])
async def test_a_prefix_that_is_both_object_and_folder_asks_for_a_slash(
    server: S3Server, bucket: S3Bucket, marker: dict[str, bytes]
) -> None:
    bucket.put({"model": b"object", "model/a.bin": b"x", **marker})
    async with opened(server, f"s3://{bucket.name}/model") as source:
        with pytest.raises(InvalidSourceError, match=f"add a slash for the folder: s3://{bucket.name}/model/"):
            await listed(source)
    async with opened(server, f"s3://{bucket.name}/model/") as source:
        assert set(await listed(source)) == {"a.bin"}


async def test_an_object_beside_an_empty_folder_of_its_name_is_the_object(server: S3Server, bucket: S3Bucket) -> None:
    bucket.put({"model": b"object", "model/": b""})
    async with opened(server, f"s3://{bucket.name}/model") as source:
        assert set(await listed(source)) == {"model"}


async def test_folder_markers_are_not_files(server: S3Server, bucket: S3Bucket) -> None:
    bucket.put({"m/": b"", "m/sub/": b"", "m/sub/marked with content/": b"x", "m/sub/a.bin": b"x"})
    async with opened(server, f"s3://{bucket.name}/m/") as source:
        assert set(await listed(source)) == {"sub/a.bin"}


@pytest.mark.parametrize("prefix", ["", "/none", "/none/"])
async def test_nothing_below_a_prefix_is_an_empty_listing_and_no_error(
    server: S3Server, bucket: S3Bucket, prefix: str
) -> None:
    async with opened(server, f"s3://{bucket.name}{prefix}") as source:
        assert await listed(source) == {}


async def test_a_missing_bucket_is_not_found(server: S3Server) -> None:
    for anonymous in (False, True):
        async with opened(server, "s3://no-such-bucket/x", anonymous=anonymous) as source:
            with pytest.raises(SourceNotFoundError, match="bucket does not exist"):
                await listed(source)


async def test_keys_with_empty_and_dot_segments_are_listed_normalised_and_can_be_read(
    server: S3Server, bucket: S3Bucket
) -> None:
    bucket.put({"m/a//b.txt": b"empty", "m/c/./d.txt": b"a dot"})
    async with opened(server, f"s3://{bucket.name}/m") as source:
        files = await listed(source)
        assert set(files) == {"a/b.txt", "c/d.txt"}
        for path, content in (("a/b.txt", b"empty"), ("c/d.txt", b"a dot")):
            assert read_range(await source.locate(files[path]), 0, 5).content == content


async def test_a_key_that_would_be_absolute_below_its_prefix_is_refused(server: S3Server, bucket: S3Bucket) -> None:
    bucket.put({"m//etc/passwd": b"x"})
    async with opened(server, f"s3://{bucket.name}/m") as source:
        with pytest.raises(InvalidSourceError, match="absolute"):
            await listed(source)


async def test_two_thousand_and_one_keys_cost_three_requests_and_none_is_lost(
    server: S3Server, bucket: S3Bucket
) -> None:
    bucket.put({f"m/a b+%{number:04}.txt": b"x" for number in range(2001)})
    async with opened(server, f"s3://{bucket.name}/m/") as source:
        assert len(await listed(source)) == 2001
    assert server.log.count() == 3


async def test_a_listing_asks_for_no_more_pages_than_are_consumed(server: S3Server, bucket: S3Bucket) -> None:
    bucket.put({f"{number:04}.txt": b"x" for number in range(1001)})
    async with opened(server, f"s3://{bucket.name}") as source:
        resolution = await source.resolve()
        await anext(source.list(resolution))
        assert server.log.count() == 1
        assert await consumed(source.list(resolution)) == 1001


async def test_resolving_and_locating_cost_no_request(server: S3Server, bucket: S3Bucket) -> None:
    bucket.put({"a.bin": CONTENT})
    async with opened(server, f"s3://{bucket.name}") as source:
        assert (await source.resolve()).revision is None
        file = (await listed(source))["a.bin"]
        await source.locate(file)
    assert server.log.count() == 1


async def test_content_belongs_to_the_organisation_also_where_everybody_may_read(server: S3Server) -> None:
    bucket = server.bucket(f"public-{next(NUMBERS)}", public=True)
    bucket.put({"a.bin": b"x"})
    scopes = set()
    for organisation in ("acme", "other"):
        async with opened(server, f"s3://{bucket.name}", anonymous=True, organisation=organisation) as source:
            scopes.add((await listed(source))["a.bin"].identity.scope)
    assert scopes == {"organisation:acme", "organisation:other"}


async def test_an_etag_is_the_version_and_never_a_checksum(server: S3Server, bucket: S3Bucket) -> None:
    bucket.put({"a.bin": CONTENT})
    async with opened(server, f"s3://{bucket.name}") as source:
        file = (await listed(source))["a.bin"]
        location = await source.locate(file)
    answer = read_range(location, 0, 1)
    assert file.checksum is None
    assert file.version == location.etag == answer.headers["etag"]


async def test_an_object_that_was_replaced_is_not_read_with_its_old_location(
    server: S3Server, bucket: S3Bucket
) -> None:
    bucket.put({"a.bin": b"before"})
    async with opened(server, f"s3://{bucket.name}") as source:
        location = await source.locate((await listed(source))["a.bin"])
    bucket.put({"a.bin": b"after!"})
    assert read_range(location, 0, 6).status == 412


async def test_a_location_is_signed_for_an_hour_and_does_not_hold_the_secret_key(
    server: S3Server, bucket: S3Bucket
) -> None:
    bucket.put({"a.bin": b"x"})
    async with opened(server, f"s3://{bucket.name}") as source:
        location = await source.locate((await listed(source))["a.bin"])
    query = parse_qs(urlsplit(location.url).query)
    assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
    assert query["X-Amz-Expires"] == ["3600"]
    assert server.account.secret_access_key not in location.url


async def test_an_anonymous_location_is_a_plain_address(server: S3Server) -> None:
    bucket = server.bucket(f"public-{next(NUMBERS)}", public=True)
    bucket.put({"a b.bin": b"x"})
    async with opened(server, f"s3://{bucket.name}", anonymous=True) as source:
        location = await source.locate((await listed(source))["a b.bin"])
    assert location.url == f"{server.url}/{bucket.name}/a%20b.bin"
