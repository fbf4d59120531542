"""The data plane's server: what it answers to GET and HEAD, whole, and in ranges."""

import errno
import json
import os
from collections.abc import Iterator

import pytest

from bdn.core.chunk import EMPTY, digest_of
from bdn.core.errors import (
    BdnError,
    GrantExpiredError,
    GrantInvalidError,
    NotFoundError,
    StoreUnavailableError,
    UnauthenticatedError,
)
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.wire.http_fields import chunk_path, parse_chunk_path
from bdn.wire.shapes import document_of, status_of
from tests.support.content.memory_store import MemoryFile
from tests.support.content.names import named
from tests.support.content.shelves import Client, Shelf, connected, serving
from tests.support.crash.scripted_writes import failing

CONTENT = bytes(range(256)) * 4
SIZE = len(CONTENT)
CHUNK = digest_of(CONTENT)
PATH = f"/chunks/{CHUNK}"


class SlabShelf(Shelf):
    """Each chunk lies in the middle of a larger file, and is served alone."""

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        with super().open_chunk(request).file as file:
            content = file.read()
        self.opened[-1] = MemoryFile(b"<" * 1000 + content + b">" * 1000)
        return OpenChunk(self.opened[-1], 1000, len(content))


@pytest.fixture
def shelf() -> Shelf:
    shelf = SlabShelf()
    shelf.add(CONTENT)
    shelf.add(b"")
    return shelf


@pytest.fixture
def client(shelf: Shelf) -> Iterator[Client]:
    with serving(shelf) as server, connected(server) as client:
        yield client


def test_get_answers_the_chunk_and_what_it_is(client: Client) -> None:
    response, body = client.ask(PATH)
    assert (response.status, body) == (200, CONTENT)
    assert response.getheader("Content-Length") == str(SIZE)
    assert response.getheader("Content-Type") == "application/octet-stream"
    assert response.getheader("ETag") == f'"{CHUNK}"'
    assert response.getheader("Accept-Ranges") == "bytes"
    assert response.getheader("Content-Range") is None
    assert response.getheader("Server") == "bdn"


def test_the_empty_chunk_has_an_empty_body(client: Client) -> None:
    response, body = client.ask(chunk_path(EMPTY))
    assert (response.status, response.getheader("Content-Length"), body) == (200, "0", b"")


def head_of(client: Client, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    response, _ = client.ask(path, method=method, **headers)
    return response.status, {name: value for name, value in response.getheaders() if name != "Date"}


@pytest.mark.parametrize("path", [PATH, chunk_path(EMPTY), chunk_path(named("absent")), "/nothing"])
def test_head_answers_like_get_without_a_body(client: Client, path: str) -> None:
    expected = head_of(client, "GET", path)
    response, body = client.ask(path, method="HEAD")
    assert body == b""
    assert head_of(client, "HEAD", path) == expected
    assert response.status == expected[0]


@pytest.mark.parametrize(
    ("wanted", "start", "stop"), [("bytes=0-0", 0, 1), ("bytes=-24", SIZE - 24, SIZE), ("bytes=1000-5000", 1000, SIZE)]
)
def test_a_range_is_answered_with_its_bytes(client: Client, wanted: str, start: int, stop: int) -> None:
    response, body = client.ask(PATH, Range=wanted)
    assert (response.status, body) == (206, CONTENT[start:stop])
    assert response.getheader("Content-Range") == f"bytes {start}-{stop - 1}/{SIZE}"
    assert response.getheader("Content-Length") == str(stop - start)
    assert response.getheader("ETag") == f'"{CHUNK}"'


def test_a_range_past_the_end_is_refused_with_the_size(client: Client) -> None:
    response, body = client.ask(PATH, Range=f"bytes={SIZE}-")
    assert (response.status, response.getheader("Content-Range"), body) == (416, f"bytes */{SIZE}", b"")
    assert client.ask(PATH)[1] == CONTENT  # the connection goes on


def test_what_is_not_one_range_is_answered_with_the_whole(client: Client) -> None:
    response, body = client.ask(PATH, Range="bytes=0-9,20-29")
    assert (response.status, body) == (200, CONTENT)


def test_what_was_sent_is_counted(shelf: Shelf) -> None:
    sent: list[int] = []
    with serving(shelf, on_sent=sent.append) as server, connected(server) as client:
        client.ask(PATH)
        client.ask(PATH, Range="bytes=0-9")
        client.ask(PATH, method="HEAD")
        client.ask(chunk_path(named("absent")))
        client.ask(chunk_path(EMPTY))  # what was before is over when this is answered
    assert sent == [SIZE, 10]


def refusal_of(body: bytes) -> tuple[str, str]:
    error = json.loads(body)["error"]
    return error["code"], error["message"]


def test_an_absent_chunk_is_an_error_document(client: Client) -> None:
    response, body = client.ask(chunk_path(named("absent")))
    assert (response.status, response.getheader("Content-Type")) == (404, "application/json")
    assert json.loads(body) == document_of(NotFoundError(f"chunk {named('absent')}"))


OTHER_PATHS = [
    "/", "/chunks", "/chunks/", "/chunk/" + str(CHUNK), PATH + "/", PATH + "/x", "/x" + PATH, PATH.upper(), PATH[:-1], PATH + "0",
    f"/chunks/../chunks/{CHUNK}", f"/chunks/./{CHUNK}", "/chunks/../../../../etc/passwd", "/chunks/..%2f..%2fetc%2fpasswd",
    "/chunks/%2e%2e/%2e%2e/etc/passwd", "/../../etc/passwd", f"/chunks/{CHUNK.hex}", f"/chunks/b3:{'z' * 64}", f"/chunks\\{CHUNK}",
    f"/chunks/{CHUNK}%00", f"/chunks/b3:{CHUNK.fanout}", "/healthz",
]  # fmt: skip


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_a_path_that_names_no_chunk_is_not_found(client: Client, shelf: Shelf, path: str) -> None:
    response, body = client.ask(path)
    assert (response.status, refusal_of(body)[0]) == (404, "NOT_FOUND")
    assert shelf.bearers == []  # nobody was even asked


@pytest.mark.parametrize(
    "path", [PATH, f"{PATH}?x=y", f"{PATH}?a=/b/c", PATH.replace(":", "%3A"), PATH.replace(":", "%3a")]
)
def test_a_path_may_be_escaped_and_have_a_query(client: Client, path: str) -> None:
    assert client.ask(path)[1] == CONTENT
    assert parse_chunk_path(path) == CHUNK


@pytest.mark.parametrize("error", [
    UnauthenticatedError(), GrantInvalidError("altered"), GrantExpiredError("2026-11-20T00:00:00+00:00"),
    NotFoundError(f"chunk {CHUNK}"), StoreUnavailableError("the database is away"),
])  # fmt: skip
def test_who_may_not_have_a_chunk_gets_the_error_and_no_bytes(client: Client, shelf: Shelf, error: BdnError) -> None:
    shelf.refusal = error
    response, body = client.ask(PATH)
    assert (response.status, json.loads(body)) == (status_of(error), document_of(error))
    assert shelf.opened == []
    shelf.refusal = None
    assert client.ask(PATH)[1] == CONTENT  # over the same connection


@pytest.mark.parametrize(("header", "bearer"), [
    ("Bearer abc.def", "abc.def"), ("bearer abc.def", "abc.def"), ("Api-Key abc.def", "abc.def"), ("Bearer   abc.def ", "abc.def"),
    ("Basic abc", None), ("abc.def", None),
])  # fmt: skip
def test_the_bearer_is_what_authorizes(client: Client, shelf: Shelf, header: str, bearer: str | None) -> None:
    client.ask(PATH, Authorization=header)
    assert shelf.bearers == [bearer]


def test_every_opened_file_is_closed(client: Client, shelf: Shelf) -> None:
    for method, wanted in (("GET", ""), ("HEAD", ""), ("GET", "bytes=0-9"), ("GET", "bytes=9999-")):
        client.ask(PATH, method=method, Range=wanted)
    client.ask("/nothing")  # whatever was before is over when this is answered
    assert [file.closed for file in shelf.opened] == [True] * 4


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_another_method_is_refused_with_an_error_document(client: Client, method: str) -> None:
    response, body = client.ask(PATH, method=method)
    assert (response.status, response.getheader("Content-Type")) == (501, "application/json")
    assert refusal_of(body)[0] == "INVALID_REQUEST"
    assert client.ask(PATH)[1] == CONTENT  # over a new connection


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_get__sandbox_refuses_sendfile_and_advice__answers_the_same_bytes(
    client: Client, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "sendfile", failing(number))
    monkeypatch.setattr(os, "posix_fadvise", failing(number))

    for _ in range(2):
        response, body = client.ask(PATH)
        assert (response.status, body) == (200, CONTENT)
