"""Manifests over the API: the root, with what the mirror says beside it, and pages and slabs as chunks."""

import asyncio
from pathlib import Path

import pytest

from bdn.core.chunk import Digest
from bdn.core.manifest import Root
from tests.doubles.hub import Hub
from tests.support.crash.rot import rot
from tests.support.mirror.service import (
    LONGEST_SECONDS,
    MirrorUnderTest,
    mirror_under_test,
    refusal,
    source,
    statements_of,
)

pytest_plugins = ("tests.support.mirror.fixtures",)
FILES = {f"{number}.bin": bytes([number]) * 5 for number in range(50)}


@pytest.fixture
async def manifest(mirror: MirrorUnderTest, hub: Hub) -> str:
    hub.repo("org/model").commit(FILES)
    return await mirror.manifest(source("hf://org/model"))


async def test_a_manifest_is_its_root__whose_name_is_the_etag(mirror: MirrorUnderTest, manifest: str) -> None:
    path = f"/manifests/{manifest}"
    answer = await mirror.http.get(path)
    root = Root.parse(answer.content)
    assert (str(root.digest), root.files_total, root.bytes_total) == (manifest, 50, 250)
    assert (answer.headers["content-type"], answer.headers["etag"]) == ("application/json", f'"{manifest}"')
    assert (await mirror.http.get(f"/chunks/{manifest}")).content == answer.content
    again = await mirror.http.get(path, headers={"If-None-Match": f'"other", "{manifest}"'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", f'"{manifest}"')
    assert (await mirror.http.get(path, headers={"If-None-Match": '"other"'})).content == answer.content
    assert await mirror.tree(manifest) == FILES


async def test_a_manifest_says_where_its_chunks_are_served(
    upstreams: None, mirror: MirrorUnderTest, manifest: str, tmp_path: Path
) -> None:
    assert not {"bdn-data-port", "bdn-delivery"} & (await mirror.http.get(f"/manifests/{manifest}")).headers.keys()
    async with mirror_under_test(tmp_path / "served", serve=True) as served:
        path = f"/manifests/{await served.manifest(source('hf://org/model'))}"
        for headers in ({}, {"If-None-Match": f'"{manifest}"'}):
            answer = await served.http.get(path, headers=headers)
            assert answer.headers["bdn-data-port"] == str(served.service.data_port)


async def test_who_reads_a_manifest_again_writes_nothing(mirror: MirrorUnderTest, manifest: str) -> None:
    path = f"/manifests/{manifest}"
    first = await mirror.http.get(path)
    with statements_of(mirror) as seen:
        again = await mirror.http.get(path)
    assert (first.status_code, again.content) == (200, first.content)
    assert [one for one in seen if "manifest" in one and not one.startswith("SELECT")] == []


async def test_a_damaged_root_is_refused_until_it_is_repaired(mirror: MirrorUnderTest, manifest: str) -> None:
    path = f"/manifests/{manifest}"
    root = (await mirror.http.get(path)).content
    with mirror.behind.chunk(Digest.parse(manifest)) as stored:
        rot(stored, "flipped")
    answer = await mirror.http.get(path)
    assert refusal(answer) == (503, "STORE_UNAVAILABLE")
    async with asyncio.timeout(LONGEST_SECONDS):
        while answer.status_code == 503:
            answer = await mirror.http.get(path)
        assert (answer.status_code, answer.content) == (200, root)
        kinds: list[str] = []
        while kinds != ["repaired", "damaged"]:  # it is put, and then marked
            kinds = [one["kind"] for one in (await mirror.get("/events", digest=manifest))["items"]]
