"""Chunks by name, over the API and over the data plane: whole, in ranges, as HEAD, and not at all."""

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.support.mirror.service import MirrorUnderTest, source, until

pytest_plugins = ("tests.support.mirror.fixtures",)

CONTENT = GeneratedContent(CHUNK_SIZE + 1000, seed=3).read(0, CHUNK_SIZE + 1000)
FIRST, LAST = CONTENT[:CHUNK_SIZE], CONTENT[CHUNK_SIZE:]
RANGES = [
    ("bytes=0-0", 206, "bytes 0-0/1000", LAST[:1]),
    ("bytes=10-19", 206, "bytes 10-19/1000", LAST[10:20]),
    ("bytes=990-5000", 206, "bytes 990-999/1000", LAST[990:]),
    ("bytes=7-", 206, "bytes 7-999/1000", LAST[7:]),
    ("bytes=-3", 206, "bytes 997-999/1000", LAST[-3:]),
    ("bytes=-5000", 206, "bytes 0-999/1000", LAST),
    ("bytes=1000-", 416, "bytes */1000", b""),
    ("bytes=-0", 416, "bytes */1000", b""),
    ("bytes=5-2", 200, None, LAST),
    ("bytes=0-1,4-5", 200, None, LAST),
    ("lines=1-2", 200, None, LAST),
]


@pytest.fixture(params=["api", "data plane"])
async def reader(
    mirror_with_data_plane: MirrorUnderTest, hub: Hub, request: pytest.FixtureRequest
) -> AsyncIterator[httpx2.AsyncClient]:
    mirror = mirror_with_data_plane
    hub.repo("org/model").commit({"a.bin": CONTENT})
    await mirror.ready(source("hf://org/model"))
    if request.param == "api":
        yield mirror.http
        return
    plane = f"http://127.0.0.1:{mirror.service.data_port}"
    async with httpx2.AsyncClient(base_url=plane, trust_env=False) as client:
        yield client


def place(content: bytes) -> str:
    return f"/chunks/{digest_of(content)}"


async def test_a_chunk_comes_whole_in_a_range_or_as_its_size(
    reader: httpx2.AsyncClient, subtests: pytest.Subtests
) -> None:
    for content in (FIRST, LAST):
        answer = await reader.get(place(content))
        assert (answer.status_code, answer.content) == (200, content)
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["accept-ranges"] == "bytes"
        assert answer.headers["etag"] == f'"{digest_of(content)}"'
    for header, status, content_range, content in RANGES:
        for method in ("GET", "HEAD"):
            with subtests.test(header, method=method):
                answer = await reader.request(method, place(LAST), headers={"Range": header})
                assert answer.status_code == status
                assert answer.headers.get("content-range") == content_range
                assert answer.content == (content if method == "GET" else b"")
                assert int(answer.headers["content-length"]) == len(content)


async def test_a_chunk_that_is_not_held_is_not_found(reader: httpx2.AsyncClient) -> None:
    for method in ("GET", "HEAD"):
        answer = await reader.request(method, place(b"never"))
        assert answer.status_code == 404
        assert method == "HEAD" or answer.json()["error"]["code"] == "NOT_FOUND"
    assert (await reader.get(f"/chunks/{digest_of(LAST)}".replace(":", "%3A"))).content == LAST


async def test_reading_chunks_leaves_no_file_open(
    reader: httpx2.AsyncClient, mirror_with_data_plane: MirrorUnderTest
) -> None:
    for headers in ({}, {"Range": "bytes=5000-"}, {"Range": "bytes=1-2"}):
        for method in ("GET", "HEAD"):
            await reader.request(method, place(LAST), headers=headers)
    await until(lambda: not open_files(mirror_with_data_plane))


def open_files(mirror: MirrorUnderTest) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(str(link.readlink()))
    return [target for target in found if target.startswith(str(mirror.data_dir / "store"))]
