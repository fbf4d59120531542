"""What a client that has the chunk, or a part of it, is answered (RFC 9110, section 13)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bdn.core.digest import digest_of
from bdn.wire.http_fields import chunk_path
from tests.support.content.names import named
from tests.support.content.shelves import Client, Shelf, connected, serving

CONTENT = bytes(range(256))
TAG = f'"{digest_of(CONTENT)}"'
OTHER = f'"{named("other")}"'
PATH = chunk_path(digest_of(CONTENT))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    shelf = Shelf()
    shelf.add(CONTENT)
    with serving(shelf) as server, connected(server) as client:
        yield client


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("known", [TAG, "*", f"W/{TAG}", f"{OTHER}, {TAG}", f"{OTHER},W/{TAG} "])
def test_who_has_the_chunk_is_told_so_without_its_bytes(client: Client, method: str, known: str) -> None:
    response, body = client.ask(PATH, method=method, If_None_Match=known)
    assert (response.status, response.getheader("ETag"), body) == (304, TAG, b"")
    assert client.ask(PATH)[1] == CONTENT  # over the same connection: a 304 has no body


@pytest.mark.parametrize("known", [OTHER, "", "nonsense", TAG[1:-1], TAG[:-1]])
def test_who_has_something_else_gets_the_chunk(client: Client, known: str) -> None:
    response, body = client.ask(PATH, If_None_Match=known)
    assert (response.status, body) == (200, CONTENT)


@pytest.mark.parametrize("wanted", [OTHER, f"W/{TAG}", "", "nonsense"])
def test_who_insists_on_something_else_is_refused(client: Client, wanted: str) -> None:
    response, body = client.ask(PATH, If_Match=wanted, If_None_Match=TAG)
    assert (response.status, body) == (412, b"")
    assert client.ask(PATH)[1] == CONTENT


@pytest.mark.parametrize("wanted", [TAG, "*", f"{OTHER}, {TAG}"])
def test_who_insists_on_this_chunk_gets_it(client: Client, wanted: str) -> None:
    assert client.ask(PATH, If_Match=wanted, Range="bytes=1-2")[1] == CONTENT[1:3]


@pytest.mark.parametrize(
    ("tag", "status"), [(TAG, 206), (OTHER, 200), (f"W/{TAG}", 200), ("Sat, 21 Nov 2026 12:00:00 GMT", 200)]
)
def test_a_part_is_gone_on_with_only_when_it_is_of_this_chunk(client: Client, tag: str, status: int) -> None:
    response, body = client.ask(PATH, If_Range=tag, Range="bytes=10-")
    assert (response.status, body) == (status, CONTENT[10:] if status == 206 else CONTENT)


def test_head_tells_what_a_range_would_be(client: Client) -> None:
    response, _ = client.ask(PATH, method="HEAD", Range="bytes=0-9")
    assert (response.status, response.getheader("Content-Length")) == (206, "10")
