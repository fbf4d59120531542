"""Chunks by name over the API: whole, in ranges, as HEAD, and not at all. The data plane's: ``unit/net/test_chunk_server_answers``."""

from contextlib import suppress
from pathlib import Path

import pytest

from bdn.core.chunk import digest_of
from tests.doubles.hub import Hub
from tests.support.content.layouts import pieces
from tests.support.content.noise import MIB, noise
from tests.support.mirror.service import MirrorUnderTest, source, until

pytest_plugins = ("tests.support.mirror.fixtures",)

CONTENT = noise(8 * MIB + 1000)
FIRST, LAST = pieces(CONTENT)
RANGES = [
    ("bytes=10-19", 206, "bytes 10-19/1000", LAST[10:20]),
    ("bytes=-3", 206, "bytes 997-999/1000", LAST[-3:]),
    ("bytes=1000-", 416, "bytes */1000", b""),
    ("bytes=0-1,4-5", 200, None, LAST),
]  # every form of a range: tests/unit/wire/test_http_fields.py


@pytest.fixture
async def filled(mirror: MirrorUnderTest, hub: Hub) -> MirrorUnderTest:
    hub.repo("org/model").commit({"a.bin": CONTENT})
    await mirror.ready(source("hf://org/model"))
    return mirror


def place(content: bytes) -> str:
    return f"/chunks/{digest_of(content)}"


async def test_a_chunk_comes_whole_in_a_range_or_as_its_size_and_leaves_no_file_open(
    filled: MirrorUnderTest, subtests: pytest.Subtests
) -> None:
    for content in (FIRST, LAST):
        answer = await filled.http.get(place(content))
        assert (answer.status_code, answer.content) == (200, content)
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["accept-ranges"] == "bytes"
        assert answer.headers["etag"] == f'"{digest_of(content)}"'
    for header, status, content_range, content in RANGES:
        for method in ("GET", "HEAD"):
            with subtests.test(header, method=method):
                answer = await filled.http.request(method, place(LAST), headers={"Range": header})
                assert answer.status_code == status
                assert answer.headers.get("content-range") == content_range
                assert answer.content == (content if method == "GET" else b"")
                assert int(answer.headers["content-length"]) == len(content)
    await until(lambda: not open_files(filled))


def open_files(mirror: MirrorUnderTest) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(str(link.readlink()))
    return [target for target in found if target.startswith(str(mirror.data_dir / "store"))]
