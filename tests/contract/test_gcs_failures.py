"""Whatever goes wrong at GCS comes out of the source as one of our errors, after exactly one attempt."""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from bdn.core.egress import PUBLIC_INTERNET
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    EgressRefusedError,
    InvalidSourceError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.uri import BucketUri, parse_source
from bdn.sources.gcs.source import open_gcs
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret
from tests.contract.source_contract import listed
from tests.doubles.faults import Fault, answer, drop, truncate
from tests.doubles.gcs import GcsServer, gcs_error
from tests.support.mirror.gcs_sources import Way
from tests.support.network.egress import LOOPBACK

Answered = TypeVar("Answered")


@pytest.fixture(scope="module")
def shared_server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        server.bucket("failures").put({f"{number:04}.txt": b"x" for number in range(1500)})
        server.bucket("failures-public", public=True).put({f"{number:04}.txt": b"x" for number in range(1500)})
        yield server


@pytest.fixture
def server(shared_server: GcsServer) -> GcsServer:
    shared_server.log.clear()
    shared_server.script.clear()
    return shared_server


def refused(status: int, reason: str, headers: dict[str, str] | None = None) -> Fault:
    document = gcs_error(status, reason).content
    assert isinstance(document, bytes)
    return answer(status, headers, document)


def page(text: str) -> Fault:
    return answer(200, {"Content-Type": "application/json"}, text.encode())


def item(**changes: object) -> Fault:
    entry = {"name": "a", "generation": "1", "size": "1", "crc32c": "AAAAAA=="} | changes
    return page(json.dumps({"items": [{name: value for name, value in entry.items() if value is not None}]}))


FAILURES = [
    (refused(401, "authError"), AuthRequiredError, "401 authError: anonymous reading is not allowed"),
    (refused(403, "forbidden"), AuthRequiredError, "403 forbidden: anonymous"),
    (refused(403, "rateLimitExceeded"), UpstreamRateLimitedError, "limits our requests"),
    (refused(429, "rateLimitExceeded"), UpstreamRateLimitedError, "limits our requests"),
    (refused(400, "invalid"), InvalidSourceError, "cannot have a bucket or prefix of this name"),
    (refused(400, "userProjectMissing"), InvalidSourceError, "no project to bill"),
    (refused(404, "notFound"), SourceNotFoundError, "bucket does not exist"),
    (refused(408, "requestTimeout"), UpstreamUnavailableError, "408 requestTimeout"),
    (refused(412, "conditionNotMet"), UpstreamUnavailableError, "412"),
    (refused(500, "backendError"), UpstreamUnavailableError, "500 backendError"),
    (refused(500, "<b>anything</b>"), UpstreamUnavailableError, "GCS answered 500$"),
    (answer(500, body=b'{"error": {"errors": [{"reason": 7}]}}'), UpstreamUnavailableError, "GCS answered 500$"),
    (answer(500, body=b'{"error": "text"}'), UpstreamUnavailableError, "GCS answered 500$"),
    (refused(503, "backendError"), UpstreamUnavailableError, "503 backendError"),
    (answer(502, body=b"<html>a proxy's page</html>"), UpstreamUnavailableError, "GCS answered 502"),
    (answer(204, body=b""), UpstreamUnavailableError, "GCS answered 204"),
    (page("<html>a proxy's page</html>"), UpstreamUnavailableError, "does not look like GCS's"),
    (page("[1, 2]"), UpstreamUnavailableError, "does not look like GCS's"),
    (page('{"items": {"name": "a"}}'), UpstreamUnavailableError, "does not look like GCS's"),
    (page("[" * 100_000), UpstreamUnavailableError, "does not look like GCS's"),
    (item(name=None), UpstreamUnavailableError, "does not look like GCS's"),
    (item(name=""), UpstreamUnavailableError, "does not look like GCS's"),
    (item(name=7), UpstreamUnavailableError, "does not look like GCS's"),
    (item(generation=None), UpstreamUnavailableError, "does not look like GCS's"),
    (item(generation="1&alt=json"), UpstreamUnavailableError, "does not look like GCS's"),
    (item(size="many"), UpstreamUnavailableError, "does not look like GCS's"),
    (item(size="-1"), UpstreamUnavailableError, "does not look like GCS's"),
    (item(crc32c="AAAA"), UpstreamUnavailableError, "does not look like GCS's"),
    (item(crc32c="!"), UpstreamUnavailableError, "does not look like GCS's"),
    (answer(200, {"Content-Encoding": "gzip"}, b"not gzip"), UpstreamUnavailableError, "could not be asked"),
    (drop(), UpstreamUnavailableError, "could not be asked"),
    (truncate(10), UpstreamUnavailableError, "could not be asked"),
]


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES)
async def test_a_failing_first_page_is_asked_for_once_and_mapped(
    server: GcsServer, fault: Fault, expected: type[BdnError], said: str
) -> None:
    server.fail(fault, times=None)
    async with Way(server.url).open("gs://failures-public") as source:
        with pytest.raises(expected, match=said):
            await listed(source)
    # aiohttp repeats a request once, without waiting, when the connection closed before an answer.
    assert server.log.count() <= (2 if fault == drop() else 1)


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES)
async def test_a_failing_later_page_is_mapped_around_the_iteration(
    server: GcsServer, fault: Fault, expected: type[BdnError], said: str
) -> None:
    server.fail(fault, "pageToken=", times=None)
    async with Way(server.url).open("gs://failures-public") as source:
        files = source.list(await source.resolve())
        for number in range(1000):
            assert (await anext(files)).path == f"{number:04}.txt"
        with pytest.raises(expected, match=said):
            await anext(files)
    assert server.log.count("pageToken=") <= (2 if fault == drop() else 1)


@pytest.mark.parametrize("status", [429, 403])
async def test_a_rate_limit_tells_how_long_to_wait_where_gcs_says_so(server: GcsServer, status: int) -> None:
    server.fail(refused(status, "rateLimitExceeded", {"Retry-After": "12"}))
    async with Way(server.url).open("gs://failures-public") as source:
        with pytest.raises(UpstreamRateLimitedError) as raised:
            await listed(source)
    assert raised.value.retry_after_seconds == 12


async def test_an_overloaded_server_tells_how_long_to_wait_too(server: GcsServer) -> None:
    server.fail(refused(503, "backendError", {"Retry-After": "9"}))
    async with Way(server.url).open("gs://failures-public") as source:
        with pytest.raises(UpstreamUnavailableError) as raised:
            await listed(source)
    assert raised.value.retry_after_seconds == 9


class TwiceAsker:
    """Asks again at once where that may help, and knows whom it asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, url: str, request: Callable[[], Awaitable[Answered]]) -> Answered:
        self.asked.append(url)
        try:
            return await request()
        except BdnError as error:
            if not error.transient:
                raise
            return await request()


async def test_a_page_or_a_token_that_failed_is_asked_for_again_and_not_the_whole_listing(server: GcsServer) -> None:
    server.fail(refused(503, "backendError"), "pageToken=")
    server.fail_tokens(answer(500))
    asker = TwiceAsker()
    async with open_gcs(
        BucketUri("gs", "failures", ""),
        sign_in=Secret("gcs-key", json.dumps(server.account.key(server.token_url))),
        organisation="acme",
        ambient_credentials=False,
        settings=UpstreamSettings(gcs_endpoint_url=server.url, google_token_url=server.token_url, egress=LOOPBACK),
        asker=asker,
    ) as source:
        paths = [file.path async for file in source.list(await source.resolve())]
    assert paths == [f"{number:04}.txt" for number in range(1500)]
    assert asker.asked == [server.token_url, server.url, server.url]  # no token is asked for inside of a page
    assert server.log.count(origin="gcs") == 3


@pytest.mark.parametrize("token", ["7", '{"a": 1}', '"same"'])
async def test_a_listing_that_does_not_tell_where_it_goes_on_is_not_taken_for_complete(
    server: GcsServer, token: str
) -> None:
    server.fail(page(f'{{"nextPageToken": {token}}}'), times=None)
    async with Way(server.url).open("gs://failures-public") as source:
        with pytest.raises(UpstreamUnavailableError, match="does not tell where"):
            await listed(source)


async def test_a_page_without_objects_is_not_the_end(server: GcsServer) -> None:
    server.fail(page('{"nextPageToken": "MDUwMC50eHQ="}'))  # 0500.txt
    async with Way(server.url).open("gs://failures-public") as source:
        assert len(await listed(source)) == 1500 - 501


async def test_a_token_that_gcs_stops_to_accept_is_named_and_not_shown(server: GcsServer) -> None:
    server.fail(refused(401, "authError"), "pageToken=")
    key = server.account.key(server.token_url)
    async with Way(server.url, server.token_url, key).open("gs://failures") as source:
        with pytest.raises(AuthRequiredError, match="access token is not valid") as raised:
            await listed(source)
    assert "ya29" not in f"{raised.value}{raised.value!r}{raised.value.details()}"


async def test_a_redirect_to_another_host_carries_no_token_there(server: GcsServer) -> None:
    with GcsServer() as other:
        other.bucket("failures", public=True).put({"elsewhere.txt": b"x"})
        target = f"{other.url}/storage/v1/b/failures/o?fields=items(name,generation,size,crc32c)"
        server.fail(answer(307, {"Location": target}))
        key = server.account.key(server.token_url)
        async with Way(server.url, server.token_url, key).open("gs://failures") as source:
            assert set(await listed(source)) == {"elsewhere.txt"}
        assert [request.headers.get("authorization") for request in other.log.find()] == [None]


async def test_the_egress_guard_stands_before_the_bucket_and_before_every_redirect(server: GcsServer) -> None:
    settings = UpstreamSettings(gcs_endpoint_url=server.url, egress=PUBLIC_INTERNET)
    uri = parse_source("gs://failures-public")
    assert isinstance(uri, BucketUri)
    async with open_gcs(uri, sign_in=None, organisation="acme", ambient_credentials=False, settings=settings) as source:
        with pytest.raises(EgressRefusedError, match="loopback"):
            await listed(source)
    assert server.log.count() == 0
    server.fail(answer(307, {"Location": "http://169.254.169.254/latest"}))
    async with Way(server.url).open("gs://failures-public") as source:
        with pytest.raises(EgressRefusedError):
            await listed(source)
