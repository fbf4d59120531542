"""A large source of S3 that has not changed is decided by its listing alone."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from urllib.parse import parse_qs

import pytest

from bdn.core.chunk import digest_of
from bdn.core.source.upstream import diff
from bdn.sources.settings import UpstreamSettings
from tests.doubles.faults import Script
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.request_log import RequestLog
from tests.doubles.sigv4 import Account
from tests.support.mirror.s3_upstreams import S3Like
from tests.support.network.egress import LOOPBACK

FILES = 50_000


def page(request: Request) -> Answer:
    """The listing of ``model/`` with its files, 1000 on a page; nothing else is there."""
    query = {name: values[0] for name, values in parse_qs(request.url.query).items()}
    if request.method != "GET" or query.get("list-type") != "2":
        return Answer(500)
    first = int(query.get("continuation-token", "0"))
    names: Sequence[int] = (
        () if query["prefix"] != "model/" else range(first, min(first + int(query["max-keys"]), FILES))
    )
    following = first + len(names)
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{following}</NextContinuationToken>"
    end = more if names and following < FILES else "<IsTruncated>false</IsTruncated>"
    return Answer(200, {}, f"<ListBucketResult>{end}{entries(names)}</ListBucketResult>".encode())


@cache
def entries(names: Sequence[int]) -> str:
    return "".join(
        f"<Contents><Key>model/{number // 1000:03}/{number:06}.json</Key><ETag>&quot;{number:032x}&quot;</ETag>"
        f"<Size>32768</Size></Contents>"
        for number in names
    )


@pytest.fixture
def log() -> RequestLog:
    return RequestLog()


@pytest.fixture
def s3(log: RequestLog) -> Iterator[S3Like]:
    with Origin("s3", page, log=log, script=Script()) as origin:
        settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=origin.url)
        yield S3Like(settings, Account("AKIA", "secret"), Account("", ""), lambda *_: pytest.fail("it has no buckets"))


async def test_an_unchanged_source_of_50000_files_is_decided_in_under_60_requests_and_nothing_is_read(
    s3: S3Like, log: RequestLog
) -> None:
    async with s3.open("weights", "model", s3.account) as source:
        files = [file async for file in source.list(await source.resolve())]
        known = {file.identity.key: digest_of(b"") for file in files}
    async with s3.open("weights", "model", s3.account) as source:
        log.clear()
        again = [file async for file in source.list(await source.resolve())]
    assert len(again) == len(known) == FILES
    assert diff(again, known).missing == ()
    assert log.count() < 60
    assert all(re.search("list-type=2", request.target) for request in log.find())
