"""Wrong content is kept as evidence, named in the failure, never published, and harms no other source."""

import time
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from tests.doubles.faults import flip_byte
from tests.doubles.hub import Hub
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)

SMALL = b"the right configuration"
LARGE = b"w" * (CHUNK_SIZE + 100)


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 0xFF]) + content[1:]


def quarantined(mirror: MirrorUnderTest) -> list[dict[str, Any]]:
    names = ("id", "created_at", "mirror_id", "source", "path", "size", "expected", "actual", "chunks")
    return [dict(zip(names, row, strict=True)) for row in mirror.rows("quarantined_files")["quarantined_files"]]


@pytest.mark.promise("corruption")
@pytest.mark.parametrize(
    ("path", "where", "content", "chunks"),
    [
        ("config.json", "resolve-cache.*config", SMALL, [flipped(SMALL)]),
        ("model.safetensors", "/repos/", LARGE, [flipped(LARGE[:CHUNK_SIZE]), flipped(LARGE[CHUNK_SIZE:])]),
    ],
    ids=["packed", "in chunks"],
)
async def test_what_came_wrong_is_kept_and_what_is_right_is_published(
    mirror: MirrorUnderTest, hub: Hub, path: str, where: str, content: bytes, chunks: list[bytes]
) -> None:
    hub.repo("org/wrong").commit({path: content, "other.txt": b"right"})
    hub.repo("org/right").commit({"fine.txt": b"fine"})
    hub.fail(flip_byte(), where, times=2 * len(chunks))
    document = await mirror.mirror(source("hf://org/wrong", "/wrong"), source("hf://org/right", "/right"))
    assert [part["status"] for part in document["sources"]] == ["FAILED", "READY"]
    error = document["sources"][0]["error"]
    assert error["code"] == "CHECKSUM_MISMATCH"
    kept, again = quarantined(mirror)
    assert kept["chunks"] == again["chunks"], "it came wrong twice"
    assert (kept["source"], kept["path"], kept["size"]) == ("hf://org/wrong", path, len(content))
    assert kept["mirror_id"] == document["id"]
    for word in (path, kept["expected"], kept["actual"]):
        assert word in error["message"]
    names = [digest_of(chunk) for chunk in chunks]
    assert kept["chunks"] == b"".join(name.to_bytes() for name in names)
    assert {name.fanout for name in names} <= mirror.chunks().keys()
    assert mirror.count("copied_chunks") == 0
    assert b"bdn_mirror_quarantined_files 2.0" in (await mirror.http.get("/metrics")).content

    right = await mirror.ready(source("hf://org/wrong", "/wrong"))
    assert (await mirror.tree(right["sources"][0]["manifest"]))[path] == content


async def test_evicting_everything_leaves_the_evidence_for_thirty_days(
    upstreams: None, hub: Hub, tmp_path: Path
) -> None:
    days = [0]
    hub.repo("org/model").commit({"config.json": SMALL})
    hub.fail(flip_byte(), "resolve-cache.*config.json", times=2)
    clock = lambda: time.time() + days[0] * 86400  # noqa: E731
    async with mirror_under_test(tmp_path, tombstone_seconds=0, collect_seconds=0, clock=clock) as mirror:
        await mirror.failed(source("hf://org/model"))
        hub.repo("org/same").commit({"config.json": flipped(SMALL)})
        await mirror.ready(source("hf://org/same"))
        await mirror.evict(all=True, tier="mirror")
        assert mirror.count("manifests") == 0
        for days[0] in (0, 29):
            await mirror.collect(grace_seconds=0)
            assert list(mirror.chunks()) == [digest_of(flipped(SMALL)).fanout]
        days[0] = 31
        collection = await mirror.collect()
        assert {kind["kind"]: kind["count"] for kind in collection["kinds"] if kind["count"]} == {"evidence": 2}
        assert (mirror.chunks(), mirror.count("quarantined_files")) == ({}, 0)
