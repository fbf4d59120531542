"""One file of a manifest by its signed address: for clients that know nothing of chunks."""

import asyncio
from contextlib import suppress
from pathlib import Path
from threading import Event, Semaphore
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.manifest import PageEntry, read_page
from bdn.wire.grants import FileGrant
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.crash.rot import rot
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, refusal, source, until

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.usefixtures("upstreams")
LARGE = noise(17 * MIB + 3, 1)
TREE = {
    "model.safetensors": LARGE,
    "a b/\u00fcn?#.txt": b"in a slab",
    "x%2Fy.txt": b"percent",
    "config.json": b"{}",
    "empty": b"",
}


@pytest.fixture
async def manifest(mirror: MirrorUnderTest, hub: Hub) -> str:
    hub.repo("org/model").commit(TREE)
    return await mirror.manifest(source("hf://org/model"))


async def address(mirror: MirrorUnderTest, manifest: str, path: str) -> str:
    answer = await mirror.http.post(f"/manifests/{manifest}/addresses", json={"paths": [path]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    (item,) = answer.json()["items"]
    assert (item["path"], item["size_bytes"]) == (path, len(TREE[path]))
    return str(item["url"])


async def read(mirror: MirrorUnderTest, url: str, method: str = "GET", **headers: str) -> httpx2.Response:
    return await mirror.http.request(
        method, url, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


@pytest.mark.parametrize("path", TREE)
async def test_whoever_knows_the_address_reads_the_file(mirror: MirrorUnderTest, manifest: str, path: str) -> None:
    url = await address(mirror, manifest, path)
    answer, head = await read(mirror, url), await read(mirror, url, "HEAD")
    assert (answer.status_code, answer.content) == (200, TREE[path])
    assert (head.status_code, head.content) == (200, b"")
    assert answer.headers["content-length"] == head.headers["content-length"] == str(len(TREE[path]))
    assert answer.headers["content-type"] == "application/octet-stream"
    again = await read(mirror, url, if_none_match=answer.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(("asked", "start", "stop"), [
    ("bytes=0-7", 0, 8), ("bytes=8-", 8, None), ("bytes=-5", -5, None),
    (f"bytes={CHUNK_SIZE - 3}-{CHUNK_SIZE + 2}", CHUNK_SIZE - 3, CHUNK_SIZE + 3),
    (f"bytes={2 * CHUNK_SIZE}-", 2 * CHUNK_SIZE, None),
])  # fmt: skip
async def test_a_range_may_cross_chunks(
    mirror: MirrorUnderTest, manifest: str, asked: str, start: int, stop: int | None
) -> None:
    content = TREE["model.safetensors"]
    answer = await read(mirror, await address(mirror, manifest, "model.safetensors"), range=asked)
    assert (answer.status_code, answer.content) == (206, content[start:stop])
    first = start % len(content)
    assert answer.headers["content-range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(content)}"


async def test_a_range_of_what_has_changed_is_the_whole_and_one_past_the_end_is_refused(
    mirror: MirrorUnderTest, manifest: str
) -> None:
    url = await address(mirror, manifest, "config.json")
    assert (await read(mirror, url, range="bytes=0-0", if_range='"other"')).status_code == 200
    beyond = await read(mirror, url, range="bytes=2-")
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, "bytes */2")


async def test_an_address_is_good_for_its_file_alone(mirror: MirrorUnderTest, manifest: str) -> None:
    url = await address(mirror, manifest, "config.json")
    signature = urlsplit(url).query
    other = str(digest_of(b"other"))
    assert refusal(await read(mirror, f"/files/{manifest}/empty?{signature}")) == (404, "NOT_FOUND")
    assert refusal(await read(mirror, f"/files/{other}/config.json?{signature}")) == (404, "NOT_FOUND")
    assert refusal(await read(mirror, f"/files/{manifest}/config.json?sig=x")) == (403, "GRANT_INVALID")
    assert (await read(mirror, f"/files/{manifest}/config.json")).status_code == 422
    grant = (await mirror.http.get("/mirror")).json()["items"][0]["grant"]
    assert refusal(await read(mirror, f"/files/{manifest}/config.json?sig={grant}")) == (403, "GRANT_INVALID")
    unknown = await mirror.http.post(f"/manifests/{manifest}/addresses", json={"paths": ["config.json", "nothing"]})
    assert refusal(unknown) == (404, "NOT_FOUND")


async def test_an_address_ends_with_its_time_and_with_the_manifest(mirror: MirrorUnderTest, manifest: str) -> None:
    signer = mirror.service.requests.signer
    digest = digest_of((await mirror.http.get(f"/manifests/{manifest}")).content)
    over = signer.sign(FileGrant("default", digest, "config.json", 1.0))
    assert refusal(await read(mirror, f"/files/{manifest}/config.json?sig={over}")) == (403, "GRANT_EXPIRED")
    others = signer.sign(FileGrant("other", digest, "config.json", 4e9))
    assert refusal(await read(mirror, f"/files/{manifest}/config.json?sig={others}")) == (404, "NOT_FOUND")
    url = await address(mirror, manifest, "config.json")
    await mirror.evict(source="hf://org/model", tier="mirror")
    assert refusal(await read(mirror, url)) == (404, "NOT_FOUND")


async def test_file__that_goes_on_in_further_pages__is_read_whole(
    mirror: MirrorUnderTest, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.core.manifest._PART_CHUNKS", 1)
    monkeypatch.setattr("bdn.core.manifest._CUT_BYTES", 1)  # each part of a file is a page
    hub.repo("org/model").commit(TREE)
    manifest = await mirror.manifest(source("hf://org/model"))
    assert len(await mirror.pages(manifest)) == len(TREE) + 2
    for path, content in TREE.items():
        assert (await read(mirror, await address(mirror, manifest, path))).content == content
    unknown = await mirror.http.post(f"/manifests/{manifest}/addresses", json={"paths": ["model.safetensors.index"]})
    assert refusal(unknown) == (404, "NOT_FOUND")


async def test_page__is_parsed_once_for_all_requests_that_wait_for_it(
    mirror: MirrorUnderTest, manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = Digest.parse(manifest)
    signature = mirror.service.requests.signer.sign(FileGrant("default", digest, "config.json", 4e9))
    parsed: list[bytes] = []

    def counted(content: bytes) -> list[PageEntry]:
        parsed.append(content)
        return read_page(content)

    monkeypatch.setattr("bdn.mirror.serving.served_files.read_page", counted)
    url = f"/files/{manifest}/config.json?sig={signature}"
    answers = await asyncio.gather(*(read(mirror, url) for _ in range(6)))
    assert [answer.content for answer in answers] == [b"{}"] * 6
    assert len(parsed) == 1


async def test_pages__requested_at_once__are_parsed_one_at_a_time(
    mirror: MirrorUnderTest, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        hub.repo(f"org/{number}").commit({"a": str(number).encode()})
    manifests = [await mirror.manifest(source(f"hf://org/{number}")) for number in range(4)]
    sign, begun, going = mirror.service.requests.signer.sign, Event(), Semaphore(1)
    overlaps: list[bool] = []

    def slow(content: bytes) -> list[PageEntry]:
        overlaps.append(not going.acquire(blocking=False))
        begun.wait()
        going.release()
        return read_page(content)

    monkeypatch.setattr("bdn.mirror.serving.served_files.read_page", slow)
    urls = [f"/files/{one}/a?sig={sign(FileGrant('default', Digest.parse(one), 'a', 4e9))}" for one in manifests]
    answers = asyncio.gather(*(read(mirror, url) for url in urls))
    await until(lambda: overlaps)
    for _ in range(4):  # the other requests are read meanwhile
        await mirror.get(f"/manifests/{manifests[0]}")
    begun.set()
    assert [answer.content for answer in await answers] == [b"0", b"1", b"2", b"3"]
    assert overlaps == [False] * 4


@pytest.mark.parametrize("index", [0, 1])
async def test_wrong_bytes_are_never_sent(mirror: MirrorUnderTest, manifest: str, index: int) -> None:
    """A wrong first chunk is an error; a wrong later chunk cuts the answer short."""
    content = TREE["model.safetensors"]
    chunk = digest_of(content[index * CHUNK_SIZE : (index + 1) * CHUNK_SIZE])
    url = await address(mirror, manifest, "model.safetensors")
    with mirror.behind.chunk(chunk) as stored:
        rot(stored, "flipped")
    if index == 0:
        assert refusal(await read(mirror, url)) == (503, "STORE_UNAVAILABLE")
        return
    came = b""
    with suppress(httpx2.HTTPError):  # a client behind a real server is told that it is incomplete
        async with mirror.http.stream("GET", url) as answer:
            assert int(answer.headers["content-length"]) == len(content)
            async for piece in answer.aiter_raw():
                came += piece
    assert came == content[:CHUNK_SIZE]


async def test_an_address_is_in_no_log(hub: Hub, tmp_path: Path, caplog: Any) -> None:
    hub.repo("org/model").commit(TREE)
    with caplog.at_level("DEBUG"):
        async with mirror_under_test(tmp_path / "mirror") as mirror:
            manifest = await mirror.manifest(source("hf://org/model"))
            url = await address(mirror, manifest, "config.json")
            assert (await read(mirror, url)).status_code == 200
            await read(mirror, url.replace("config.json", "nothing"))
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("bdn", "uvicorn"))]
    assert not [line for line in ours if urlsplit(url).query in line]
