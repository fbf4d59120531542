"""Credentials are sent to the configured origin alone, whatever hosts a listing or its next page names."""

import json
from collections.abc import Iterator

import pytest

from bdn.core.errors import BdnError
from bdn.core.source.uri import parse_source
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from tests.contract.opening import GcsWay, keys_of
from tests.contract.source_contract import listed
from tests.doubles.faults import answer
from tests.doubles.gcs import GcsServer
from tests.doubles.http_origin import Answer, Origin
from tests.doubles.ranges import read_range
from tests.doubles.s3 import S3Server
from tests.support.network.egress import LOOPBACK


@pytest.fixture
def other() -> Iterator[Origin]:
    """Another host, which would take anything."""
    with Origin("other", lambda _: Answer(200, content=b"{}")) as origin:
        yield origin


@pytest.fixture(scope="module")
def filled(shared_s3_server: S3Server, shared_gcs_server: GcsServer) -> None:
    shared_s3_server.bucket("pages").put({"a.txt": b"x"})
    shared_s3_server.bucket("pages-r2", region="auto").put({"a.txt": b"x"})
    shared_gcs_server.bucket("pages").put({"a.txt": b"x", "b.txt": b"y"})


async def test_links_in_a_page_of_gcs_are_requested_from_nobody(
    gcs_server: GcsServer, filled: None, other: Origin
) -> None:
    links = dict.fromkeys(("mediaLink", "selfLink", "id"), f"{other.url}/b/pages/o/a.txt?alt=media")
    async with GcsWay.of(gcs_server).open("pages") as source:
        generation = (await listed(source))["a.txt"].version
        item = {"name": "a.txt", "generation": generation, "size": "1", "crc32c": "AAAAAA==", **links}
        following = f"{other.url}/storage/v1/b/pages/o?pageToken=2"
        page = {"items": [item], "nextPageToken": following, "nextLink": following, **links}
        gcs_server.fail(answer(200, {"Content-Type": "application/json"}, json.dumps(page).encode()))
        gcs_server.fail(answer(200, {"Content-Type": "application/json"}, b'{"items": []}'), "pageToken=")
        file = (await listed(source))["a.txt"]
        assert read_range(await source.locate(file), 0, 1).content == b"x"
    assert other.log.count() == 0
    assert gcs_server.log.count(r"pageToken=http") == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_credentials_of_gcs_do_not_come_back_from_a_redirect_to_another_host(
    gcs_server: GcsServer, filled: None, status: int
) -> None:
    def back(_: object) -> Answer:
        return Answer(307, {"Location": f"{gcs_server.url}/storage/v1/b/pages/o?back=1"})

    with Origin("other", back) as other:
        gcs_server.fail(answer(status, {"Location": f"{other.url}/storage/v1/b/pages/o"}))
        async with GcsWay.of(gcs_server).open("pages") as source:
            with pytest.raises(BdnError):
                await listed(source)
        sent = [*other.log.find(), *gcs_server.log.find("back=1")]
    assert len(sent) == 2
    assert [request.headers.get("authorization") for request in sent] == [None, None]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("uri", ["s3://pages/", "r2://4cc0.pages-r2/"])
async def test_a_redirect_of_s3_or_r2_is_followed_to_no_other_host(
    s3_server: S3Server, filled: None, other: Origin, uri: str, status: int
) -> None:
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=s3_server.url, r2_endpoint_url=s3_server.url)
    secret = Secret("keys", keys_of(s3_server.account))
    s3_server.fail(answer(status, {"Location": f"{other.url}/pages"}), times=None)
    async with open_source(parse_source(uri), SourceContext("acme", settings, secret)) as source:
        with pytest.raises(BdnError, match=r"another region|(30\d)"):
            await listed(source)
    assert other.log.count() == 0
