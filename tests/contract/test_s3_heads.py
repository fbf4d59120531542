"""Locating a large file of S3 asks for its head: every way in which that fails, and what a head is not believed."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import md5
from itertools import count

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.upstream import Source, UpstreamFile
from bdn.sources.settings import UpstreamSettings
from tests.contract.source_contract import listed
from tests.doubles.faults import Fault, answer, drop
from tests.doubles.ranges import read_range
from tests.doubles.s3 import S3Bucket, S3Server
from tests.doubles.sigv4 import Account
from tests.support.mirror.s3_upstreams import S3Like
from tests.support.network.egress import LOOPBACK

LARGE = bytes(CHUNK_SIZE) + b"last"
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
    bucket = server.bucket(f"heads-{next(NUMBERS)}")
    bucket.put({"m/a.bin": LARGE})
    return bucket


@asynccontextmanager
async def opened(server: S3Server, bucket: S3Bucket) -> AsyncIterator[tuple[Source, UpstreamFile]]:
    """The source, and its one file as it was listed."""
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=server.url)
    s3 = S3Like(settings, server.account, Account("", ""), lambda name, public: server.bucket(name, public=public))
    async with s3.open(bucket.name, "m", server.account) as source:
        yield source, (await listed(source))["a.bin"]


FAILURES = [
    (answer(400), AuthRequiredError, r"a\.bin: status 400"),
    (answer(401), AuthRequiredError, "may not read it"),
    (answer(403), AuthRequiredError, "may not read it"),
    (answer(404), SourceChangedError, "it is gone"),
    (answer(405), SourceChangedError, "it is gone"),
    (answer(412), SourceChangedError, "its ETag is another one"),
    (answer(418), SourceNotFoundError, "418"),
    (answer(429, {"Retry-After": "7"}), UpstreamRateLimitedError, "7 s"),
    (answer(503, {"Retry-After": "7"}), UpstreamRateLimitedError, "7 s"),
    (answer(500), UpstreamUnavailableError, "500"),
    (answer(502), UpstreamUnavailableError, "502"),
    (drop(), UpstreamUnavailableError, "could not be asked"),
    (answer(200), UpstreamUnavailableError, "does not look like S3's"),
    (answer(200, {"ETag": '"another"'}), SourceChangedError, "its ETag is another one"),
    (answer(200, {"ETag": f'"{md5(LARGE).hexdigest()}"'}), SourceChangedError, f"its size was {len(LARGE)} and is 16"),
]


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES)
async def test_a_failing_head_is_asked_for_once_and_mapped(
    server: S3Server, bucket: S3Bucket, fault: Fault, expected: type[BdnError], said: str
) -> None:
    async with opened(server, bucket) as (source, file):
        server.script.add(fault, method="HEAD", times=None)
        with pytest.raises(expected, match=said) as raised:
            await source.locate(file)
    assert f"s3://{bucket.name}/m" in str(raised.value)
    # aiohttp repeats a request once, without waiting, when the connection closed before an answer.
    assert server.log.count(method="HEAD") <= (2 if fault == drop() else 1)


async def test_where_versions_may_not_be_read_the_etag_alone_pins_and_that_is_asked_once(
    server: S3Server, bucket: S3Bucket
) -> None:
    bucket.keep_versions()
    bucket.put({"m/a.bin": LARGE})
    async with opened(server, bucket) as (source, file):
        server.script.add(answer(403), "versionId", times=None)
        await source.locate(file)
        location = await source.locate(file)
    assert "versionId" not in location.url
    assert read_range(location, CHUNK_SIZE, len(LARGE)).content == b"last"
    assert server.log.count("versionId") == 1


async def test_an_object_that_was_written_before_versions_were_kept_has_no_version_to_pin(
    server: S3Server, bucket: S3Bucket
) -> None:
    bucket.state("m/a.bin", {"x-amz-version-id": "null"})
    async with opened(server, bucket) as (source, file):
        location = await source.locate(file)
    assert "versionId" not in location.url
    assert server.log.count(method="HEAD") == 1


async def test_a_failure_to_learn_whether_versions_may_be_read_is_a_failure_and_asked_again(
    server: S3Server, bucket: S3Bucket
) -> None:
    bucket.keep_versions()
    bucket.put({"m/a.bin": LARGE})
    async with opened(server, bucket) as (source, file):
        server.script.add(answer(500), "versionId")
        with pytest.raises(UpstreamUnavailableError):
            await source.locate(file)
        assert "&versionId=" in (await source.locate(file)).url
