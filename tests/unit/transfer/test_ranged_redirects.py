"""Redirects of a ranged read: followed, but never with our credentials to another origin, and never for ever."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from bdn.core.errors import SourceChangedError, UpstreamUnavailableError
from bdn.core.source.upstream import Location
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.ranged import LocationRefusedError, RangedReader
from tests.doubles import faults
from tests.doubles.http_origin import Answer, Request
from tests.support.network.raw_server import RawServer, answering, message
from tests.support.network.upstream import CONTENT, Upstream, read_range, upstream

CREDENTIALS = {
    "Authorization": "Bearer secret",
    "Cookie": "token=secret",
    "Proxy-Authorization": "Basic secret",
    "X-Amz-Security-Token": "secret",
}
HARMLESS = {"If-Match": '"v1"', "x-amz-checksum-mode": "ENABLED"}
UNKNOWN = {"X-Api-Key": "secret", "x-goog-user-project": "secret"}


@pytest.fixture
def source() -> Iterator[Upstream]:
    with upstream() as made:
        yield made


def moved(target: str, status: int = 302) -> Callable[[Request], Answer]:
    return lambda _: Answer(status, {"Location": target}, b"it is over there")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_every_kind_of_redirect_is_followed_with_the_range(source: Upstream, status: int) -> None:
    source.respond["/file"] = moved(f"{source.other.url}/moved", status)
    assert source.read(100, 110) == CONTENT[100:110]
    assert [(request.method, request.headers["range"]) for request in source.heard] == [("GET", "bytes=100-109")] * 2


@pytest.mark.parametrize(
    ("target", "expected"), [("/moved?a=b", "/moved?a=b"), ("moved", "/folder/moved"), ("../x", "/x")]
)
def test_a_relative_redirect_is_relative_to_where_it_came_from(source: Upstream, target: str, expected: str) -> None:
    source.respond["/folder/file"] = moved(target)
    source.read(0, 10, path="/folder/file")
    assert source.heard[-1].target == expected


def test_credentials_go_with_a_redirect_within_the_origin(source: Upstream) -> None:
    source.respond["/file"] = moved(f"{source.origin.url}/moved")
    sent = {**CREDENTIALS, **HARMLESS, **UNKNOWN}
    source.read(0, 10, headers=sent)
    assert {name: source.heard[-1].headers.get(name.lower()) for name in sent} == sent


def test_only_what_is_plainly_harmless_goes_to_another_origin(source: Upstream) -> None:
    """Another port of the same host is another origin."""
    source.respond["/file"] = moved(f"{source.other.url}/moved")
    source.read(0, 10, headers={**CREDENTIALS, **HARMLESS, **UNKNOWN})
    sent = source.heard[-1].headers
    assert "secret" not in " ".join(sent.values())
    assert {name: sent[name.lower()] for name in HARMLESS} == HARMLESS
    assert set(sent) == {"host", "accept-encoding", "range", *(name.lower() for name in HARMLESS)}


def test_credentials_that_were_dropped_do_not_come_back_when_the_way_leads_back(source: Upstream) -> None:
    source.respond["/file"] = moved(f"{source.other.url}/there")
    source.respond["/there"] = moved(f"{source.origin.url}/back")
    source.read(0, 10, headers=CREDENTIALS)
    assert [request.target for request in source.heard] == ["/file", "/there", "/back"]
    assert "authorization" not in source.heard[-1].headers


def test_the_spelling_of_a_header_does_not_save_it(source: Upstream) -> None:
    source.respond["/file"] = moved(f"{source.other.url}/moved")
    source.read(0, 10, headers={"aUTHORIZATION": "Bearer secret"})
    assert "authorization" not in source.heard[-1].headers


def test_five_redirects_are_followed_and_a_sixth_is_not(source: Upstream) -> None:
    for number in range(6):
        source.respond[f"/{number}"] = moved(f"/{number + 1}")
    assert source.read(0, 10, path="/1") == CONTENT[:10]
    with pytest.raises(UpstreamUnavailableError, match="more than 5 redirects"):
        source.read(0, 10, path="/0")


def test_a_redirect_to_nowhere_is_an_error(source: Upstream) -> None:
    source.respond["/file"] = lambda _: Answer(302)
    with pytest.raises(UpstreamUnavailableError):
        source.read(0, 10)


@pytest.mark.parametrize("target", [
    "file:///etc/passwd", "ftp://host/file", "http://[::1", "http://host:port/", "http://host:99999/", "/a b\x0bc",
    "/\xfc",
])  # fmt: skip
def test_a_redirect_that_cannot_be_followed_is_an_error_of_the_upstream(target: str) -> None:
    with closing(ConnectionPool(timeout_seconds=10)) as pool:
        play = answering(message("302 Found", f"Location: {target}", "Content-Length: 0"))
        with RawServer(play) as server, pytest.raises(UpstreamUnavailableError):
            read_range(RangedReader(pool), Location(server.url), 0, 10)


def test_what_is_wrong_after_a_redirect_is_judged_like_any_answer(source: Upstream) -> None:
    source.respond["/file"] = moved(f"{source.other.url}/moved")
    source.script.add(faults.answer(403), origin="other")
    with pytest.raises(LocationRefusedError):
        source.read(0, 10)
    with pytest.raises(SourceChangedError):
        source.read(0, 10, etag='"v2"')


def test_the_connection_of_a_redirect_is_used_again(source: Upstream) -> None:
    with closing(ConnectionPool(timeout_seconds=10)) as pool:
        redirect = message("302 Found", f"Location: {source.other.url}/moved", "Content-Length: 4", body=b"gone")
        with RawServer(answering(redirect, redirect)) as server:
            for _ in range(2):
                assert read_range(RangedReader(pool), Location(server.url), 0, 10) == CONTENT[:10]
            assert server.connections == 1
