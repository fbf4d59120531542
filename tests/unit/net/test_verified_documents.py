"""No manifest and no layout is believed before it was checked against its name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from bdn.core.errors import InternalError
from bdn.core.manifest import FileEntry, Manifest
from bdn.core.store.layout import FileLayout
from bdn.net.client.mirror_client import MirrorClient
from bdn.wire.errors import WrongDocumentError
from bdn.wire.layout_form import Layout
from tests.support.content.names import named
from tests.support.network.scripted import Scripted
from tests.support.network.service import listening

pytestmark = pytest.mark.asyncio(loop_scope="module")
LARGE = FileLayout.of(CHUNK_SIZE + 1, (named("first"), named("second")))
SMALL = FileLayout.of(5, (digest_of(b"small"),))
MANIFEST = Manifest.of(
    [FileEntry("model.safetensors", LARGE.size, LARGE.digest), FileEntry("config.json", SMALL.size, SMALL.digest)]
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Scripted]:
    scripted = Scripted()
    async with listening(scripted.app()) as scripted.url:
        yield scripted


@pytest.fixture
def service(shared: Scripted) -> Scripted:
    shared.answers.clear()
    shared.asked.clear()
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def client(service: Scripted) -> AsyncIterator[MirrorClient]:
    async with MirrorClient(service.url, "token") as client:
        yield client


async def test_a_grant_goes_instead_of_the_token(service: Scripted, client: MirrorClient) -> None:
    service.say(f"/manifests/{MANIFEST.digest}", MANIFEST.canonical)
    await client.manifest(MANIFEST.digest, "grant")
    assert service.asked[0][1]["authorization"] == "Bearer grant"


async def test_a_manifest_is_believed_when_its_bytes_have_its_name(service: Scripted, client: MirrorClient) -> None:
    service.say(f"/manifests/{MANIFEST.digest}", MANIFEST.canonical)
    assert await client.manifest(MANIFEST.digest, None) == MANIFEST


async def test_a_manifest_with_another_name_is_refused(service: Scripted, client: MirrorClient) -> None:
    other = Manifest.of([FileEntry("evil.bin", 5, SMALL.digest)])
    service.say(f"/manifests/{MANIFEST.digest}", other.canonical)
    with pytest.raises(WrongDocumentError, match=f"{MANIFEST.digest} .*{client.address}.*{other.digest}"):
        await client.manifest(MANIFEST.digest, None)


@pytest.mark.parametrize("content", [MANIFEST.canonical + b"\n", MANIFEST.canonical[:-1], b""])
async def test_a_manifest_of_which_a_byte_is_wrong_is_refused(
    service: Scripted, client: MirrorClient, content: bytes
) -> None:
    service.say(f"/manifests/{MANIFEST.digest}", content)
    with pytest.raises(WrongDocumentError):
        await client.manifest(MANIFEST.digest, None)


@pytest.mark.parametrize("content", [b"{}", b"no json", json.dumps(json.loads(MANIFEST.canonical), indent=1).encode()])
async def test_bytes_with_the_right_name_that_are_no_manifest_are_refused(
    service: Scripted, client: MirrorClient, content: bytes
) -> None:
    service.say(f"/manifests/{digest_of(content)}", content)
    with pytest.raises(InternalError, match="not a manifest"):
        await client.manifest(digest_of(content), None)


def layout_of(*files: FileLayout) -> dict[str, Any]:
    described = [
        {"digest": str(file.digest), "size": file.size, "chunks": [str(chunk) for chunk in file.chunks]}
        for file in files
    ]
    return {"manifest": str(MANIFEST.digest), "data_port": 8461, "files": described}


async def read_layout(service: Scripted, client: MirrorClient, content: object) -> Layout:
    service.say(f"/manifests/{MANIFEST.digest}/layout", content)
    return await client.layout(MANIFEST.digest, "grant")


async def test_a_layout_that_adds_up_is_believed(service: Scripted, client: MirrorClient) -> None:
    layout = await read_layout(service, client, layout_of(LARGE, SMALL))
    assert layout == Layout(MANIFEST.digest, 8461, {LARGE.digest: LARGE, SMALL.digest: SMALL})


WRONG: dict[str, dict[str, Any]] = {
    "another chunk": {"chunks": [str(named("first")), str(named("third"))]},
    "chunks in another order": {"chunks": [str(named("second")), str(named("first"))]},
    "a chunk too few": {"chunks": [str(named("first"))]},
    "a chunk too many": {"chunks": [str(named("first")), str(named("second")), str(named("third"))]},
    "another size": {"size": LARGE.size + 1},
    "a size that needs fewer chunks": {"size": CHUNK_SIZE},
    "a negative size": {"size": -1},
    "another file": {"digest": str(named("other"))},
    "no digest": {"digest": "b3:0"},
    "a chunk that is no digest": {"chunks": ["../../etc/passwd", str(named("second"))]},
    "something else": {"size": "large"},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
async def test_a_layout_that_does_not_add_up_is_refused(
    service: Scripted, client: MirrorClient, change: dict[str, Any]
) -> None:
    content = layout_of(LARGE, SMALL)
    content["files"][0] |= change
    with pytest.raises(WrongDocumentError, match=f"the layout of {MANIFEST.digest} is wrong"):
        await read_layout(service, client, content)


async def test_the_layout_of_another_manifest_is_refused(service: Scripted, client: MirrorClient) -> None:
    with pytest.raises(WrongDocumentError, match=f"it is that of {SMALL.digest}"):
        await read_layout(service, client, layout_of(LARGE, SMALL) | {"manifest": str(SMALL.digest)})
