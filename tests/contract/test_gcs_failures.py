"""Whatever goes wrong at GCS comes out of the source as one of our errors, after exactly one attempt."""

import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidSourceError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.uri import BucketUri
from bdn.sources.opener import open_source
from bdn.sources.sign_in import Secret, SourceContext
from tests.contract.opening import GcsWay, Opened
from tests.contract.source_contract import listed, seen_before
from tests.doubles.faults import Fault, answer, drop, truncate
from tests.doubles.gcs import GcsServer, gcs_error

Answered = TypeVar("Answered")


@pytest.fixture(scope="module")
def filled(shared_gcs_server: GcsServer) -> None:
    for name, public in (("failures", False), ("failures-public", True)):
        shared_gcs_server.bucket(name, public=public).put({f"{number:04}.txt": b"x" for number in range(1500)})


@pytest.fixture
def server(gcs_server: GcsServer, filled: None) -> GcsServer:
    return gcs_server


@pytest.fixture
def opened(server: GcsServer) -> Opened:
    """What everybody may read."""
    return GcsWay(server.url).open("failures-public")


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
    *((fault, UpstreamUnavailableError, "does not look like GCS's") for fault in (
        page("<html>a proxy's page</html>"), page("[1, 2]"), page('{"items": {"name": "a"}}'), page("[" * 100_000),
        item(name=None), item(name=""), item(name=7), item(generation=None), item(generation="1&alt=json"),
        item(size="many"), item(size="-1"), item(crc32c="AAAA"), item(crc32c="!"),
    )),
    (answer(200, {"Content-Encoding": "gzip"}, b"not gzip"), UpstreamUnavailableError, "did not answer"),
    (drop(), UpstreamUnavailableError, "did not answer"),
    (truncate(10), UpstreamUnavailableError, "did not answer"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES)
@pytest.mark.parametrize(("query", "before"), [("", 0), ("pageToken=", 1000)])
async def test_a_failing_page_is_asked_for_once_and_mapped_around_the_iteration(
    server: GcsServer, opened: Opened, fault: Fault, expected: type[BdnError], said: str, query: str, before: int
) -> None:
    server.fail(fault, query, times=None)
    seen = await seen_before(expected, said, opened)
    assert seen == [f"{number:04}.txt" for number in range(before)]
    # aiohttp repeats a request once, without waiting, when the connection closed before an answer.
    assert server.log.count(query) <= (2 if fault == drop() else 1)


@pytest.mark.parametrize(("fault", "expected"), [
    (refused(429, "rateLimitExceeded", {"Retry-After": "12"}), UpstreamRateLimitedError),
    (refused(403, "rateLimitExceeded", {"Retry-After": "12"}), UpstreamRateLimitedError),
    (refused(503, "backendError", {"Retry-After": "12"}), UpstreamUnavailableError),
])  # fmt: skip
async def test_a_refusal_tells_how_long_to_wait_where_gcs_says_so(
    server: GcsServer, opened: Opened, fault: Fault, expected: type[BdnError]
) -> None:
    server.fail(fault)
    async with opened as source:
        with pytest.raises(expected) as raised:
            await listed(source)
    assert raised.value.details()["retry_after_seconds"] == 12


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
    asker, way = TwiceAsker(), GcsWay.of(server)
    context = SourceContext("acme", way.settings, Secret("gcs-key", json.dumps(way.key)), asker=asker)
    async with open_source(BucketUri("gs", "failures", ""), context) as source:
        paths = [file.path async for file in source.list(await source.resolve())]
    assert paths == [f"{number:04}.txt" for number in range(1500)]
    assert asker.asked == [server.token_url, server.url, server.url]  # no token is asked for inside of a page
    assert server.log.count(origin="gcs") == 3


@pytest.mark.parametrize("token", ["7", '{"a": 1}', '"same"'])
async def test_a_listing_that_does_not_tell_where_it_goes_on_is_not_taken_for_complete(
    server: GcsServer, opened: Opened, token: str
) -> None:
    server.fail(page(f'{{"nextPageToken": {token}}}'), times=None)
    async with opened as source:
        with pytest.raises(UpstreamUnavailableError, match="is truncated"):
            await listed(source)


async def test_a_page_without_objects_is_not_the_end(server: GcsServer, opened: Opened) -> None:
    server.fail(page('{"nextPageToken": "MDUwMC50eHQ="}'))  # 0500.txt
    async with opened as source:
        assert len(await listed(source)) == 1500 - 501


async def test_a_token_that_gcs_stops_to_accept_is_named_and_not_shown(server: GcsServer) -> None:
    server.fail(refused(401, "authError"), "pageToken=")
    async with GcsWay.of(server).open("failures") as source:
        with pytest.raises(AuthRequiredError, match="access token is not valid") as raised:
            await listed(source)
    assert "ya29" not in f"{raised.value}{raised.value!r}{raised.value.details()}"
