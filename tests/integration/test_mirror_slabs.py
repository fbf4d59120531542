"""Small files of a mirror rest in slabs, and nobody reads a neighbour's: neither by a layout nor by a chunk's name."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bdn.core.digest import Digest, digest_of
from bdn.core.grant import Grant, GrantedMount
from bdn.core.store import SEAL_SIZE, FileLayout, seal_of
from bdn.mirror.keys import load_signer
from bdn.wire.mirror_schema import LayoutBody
from bdn.wire.weights_schema import MirrorRequestBody
from tests.doubles.hub import Hub
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures",)

TOKEN = "operator-token"
SHARED, SECRET, OTHER = b"the same bytes", b"acme's alone", b"rival's alone"


@pytest.fixture
async def guarded(upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", serve=True, bearer=TOKEN, auth="token", token=TOKEN) as mirror:
        yield mirror


@pytest.fixture(params=["api", "data plane"])
async def reader(guarded: MirrorUnderTest, request: pytest.FixtureRequest) -> AsyncIterator[httpx2.AsyncClient]:
    """Chunks on either plane, without a token of its own."""
    if request.param == "api":
        client = httpx2.AsyncClient(transport=guarded.http._transport, base_url="http://mirror")
    else:
        client = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{guarded.service.data_port}", trust_env=False)
    async with client:
        yield client


async def mirrored(mirror: MirrorUnderTest, organisation: str, repository: str, **fields: Any) -> Digest:
    """The manifest of a private repository, mirrored for an organisation."""
    wanted = source(f"hf://{repository}", **with_secret("hub-token"), **fields)
    sources = MirrorRequestBody.model_validate({"weights": [wanted]}).sources()
    begun = await mirror.service.requests.request(sources, organisation)
    done = await mirror.service.requests.wait(begun.id, organisation, 20)
    assert done.status == "READY", done.error
    return Digest.parse(str(done.sources[0].manifest))


def bearer(mirror: MirrorUnderTest, organisation: str, manifest: Digest) -> dict[str, str]:
    mounts = (GrantedMount("/m", manifest, "hf://org/any"),)
    token = load_signer(mirror.data_dir).sign(Grant(organisation, mounts, time.time() + 60))
    return {"Authorization": f"Bearer {token}"}


async def layouts(mirror: MirrorUnderTest, manifest: Digest, headers: dict[str, str]) -> dict[Digest, FileLayout]:
    answer = await mirror.http.get(f"/manifests/{manifest}/layout", headers=headers)
    assert answer.status_code == 200, answer.text
    return {layout.digest: layout for layout in (file.to_core() for file in LayoutBody(**answer.json()).files)}


async def read(reader: httpx2.AsyncClient, digest: Digest, headers: Json) -> tuple[int, bytes]:
    answer = await reader.get(f"/chunks/{digest}", headers=headers)
    return answer.status_code, answer.content if answer.status_code < 300 else b""


def sealed(organisation: str, files: bytes) -> bytes:
    return files + seal_of(f"organisation:{organisation}")


def slab_of(layout: FileLayout) -> Digest:
    assert layout.slice is not None
    return layout.slice.slab


async def test_small_files_are_read_from_one_slab_and_each_by_its_own_name(
    guarded: MirrorUnderTest, reader: httpx2.AsyncClient, hub: Hub
) -> None:
    files = {f"{number}.txt": f"file number {number}".encode() for number in range(20)}
    hub.repo("org/many", private=True).commit({**files, "empty.txt": b""})
    manifest = await mirrored(guarded, "acme", "org/many")
    headers = bearer(guarded, "acme", manifest)
    found = await layouts(guarded, manifest, headers)
    packed = [layout for layout in found.values() if layout.size]
    (slab,) = {slab_of(layout) for layout in packed}
    assert list(guarded.chunks().values()) == [sum(map(len, files.values())) + SEAL_SIZE]

    status, content = await read(reader, slab, headers)
    assert status == 200
    pieces = [content[one.slice.offset : one.slice.offset + one.size] for one in packed if one.slice]
    assert [digest_of(piece) for piece in pieces] == [one.digest for one in packed]
    for content in files.values():
        assert await read(reader, digest_of(content), headers) == (200, content)
    answer = await reader.get(f"/chunks/{digest_of(files['7.txt'])}", headers=headers | {"Range": "bytes=5-10"})
    assert (answer.status_code, answer.content) == (206, b"number")
    assert answer.headers["content-range"] == f"bytes 5-10/{len(files['7.txt'])}"


async def test_a_slab_is_never_read_through_another_organisation_s_grant(
    guarded: MirrorUnderTest, reader: httpx2.AsyncClient, hub: Hub
) -> None:
    """Both have the very same tree, and therefore one manifest; acme's file lies beside a secret one of acme's."""
    hub.repo("acme/model", private=True).commit({"a-secret.txt": SECRET, "shared.txt": SHARED})
    await mirrored(guarded, "acme", "acme/model")
    manifest = await mirrored(guarded, "acme", "acme/model", allow_patterns=["shared.txt"])
    hub.repo("rival/model", private=True).commit({"shared.txt": SHARED})
    assert await mirrored(guarded, "rival", "rival/model") == manifest
    acme, rival = (bearer(guarded, name, manifest) for name in ("acme", "rival"))
    shared = digest_of(SHARED)

    theirs = slab_of((await layouts(guarded, manifest, acme))[shared])
    own = slab_of((await layouts(guarded, manifest, rival))[shared])

    assert theirs != own
    assert await read(reader, theirs, acme) == (200, sealed("acme", SECRET + SHARED))
    assert await read(reader, theirs, rival) == (404, b"")
    assert await read(reader, digest_of(SECRET), rival) == (404, b"")
    assert await read(reader, own, rival) == (200, sealed("rival", SHARED))
    for headers in (acme, rival):
        assert await read(reader, shared, headers) == (200, SHARED)


async def test_two_organisations_that_pack_the_very_same_files_have_a_slab_each(
    guarded: MirrorUnderTest, reader: httpx2.AsyncClient, hub: Hub
) -> None:
    hub.repo("org/model", private=True).commit({"one.txt": SHARED, "two.txt": OTHER})
    manifests = {name: await mirrored(guarded, name, "org/model") for name in ("acme", "rival")}
    assert len(guarded.chunks()) == 2
    for name, manifest in manifests.items():
        headers = bearer(guarded, name, manifest)
        slab = digest_of(sealed(name, SHARED + OTHER))
        assert {slab_of(layout) for layout in (await layouts(guarded, manifest, headers)).values()} == {slab}
        assert await read(reader, slab, headers) == (200, sealed(name, SHARED + OTHER))
        for other in {*manifests, "stranger"} - {name}:
            assert await read(reader, slab, bearer(guarded, other, manifest)) == (404, b"")


async def test_a_slab_that_came_after_a_grant_was_used_is_read_with_it(
    guarded: MirrorUnderTest, reader: httpx2.AsyncClient, hub: Hub
) -> None:
    """The layout moves a file to the slab that serves most of the manifest, and that may be a newer one."""
    hub.repo("org/one", private=True).commit({"a.txt": SHARED})
    hub.repo("org/two", private=True).commit({"b.txt": OTHER})
    first, second = [await mirrored(guarded, "acme", f"org/{name}") for name in ("one", "two")]
    hub.repo("org/both", private=True).commit({"a.txt": SHARED, "b.txt": OTHER})
    for manifest in (first, second):
        headers = bearer(guarded, "acme", manifest)
        assert (await read(reader, slab_of(*(await layouts(guarded, manifest, headers)).values()), headers))[0] == 200
    await mirrored(guarded, "acme", "org/both")
    both = sealed("acme", SHARED + OTHER)
    assert await read(reader, digest_of(both), bearer(guarded, "acme", first)) == (200, both)


async def test_an_eviction_of_one_organisation_leaves_the_other_s_files_readable(
    guarded: MirrorUnderTest, reader: httpx2.AsyncClient, hub: Hub
) -> None:
    hub.repo("acme/model", private=True).commit({"a-secret.txt": SECRET, "shared.txt": SHARED})
    hub.repo("rival/model", private=True).commit({"other.txt": OTHER, "shared.txt": SHARED})
    gone = await mirrored(guarded, "default", "acme/model")
    stays = await mirrored(guarded, "rival", "rival/model")
    done = await guarded.evict(manifest=str(gone))
    headers = bearer(guarded, "rival", stays)

    # The file itself is still named by the rival's manifest, and default's identity of it must find it in default's slab.
    assert (done["status"], done["bytes_freed"], len(guarded.chunks())) == ("DONE", 0, 2)
    for layout in (await layouts(guarded, stays, headers)).values():
        assert await read(reader, slab_of(layout), headers) == (200, sealed("rival", OTHER + SHARED))
    assert await read(reader, digest_of(SECRET), headers) == (404, b"")


async def test_one_request_that_packs_the_same_files_publicly_and_privately_serves_both(
    guarded: MirrorUnderTest, hub: Hub
) -> None:
    for name in ("open", "closed"):
        hub.repo(f"org/{name}", private=name == "closed").commit({"one.txt": SHARED, "two.txt": OTHER})
    wanted = [source("hf://org/open", "/a"), source("hf://org/closed", "/b", **with_secret("hub-token"))]
    begun = await guarded.service.requests.request(
        MirrorRequestBody.model_validate({"weights": wanted}).sources(), "acme"
    )
    assert (await guarded.service.requests.wait(begun.id, "acme", 20)).status == "READY"
    scopes = {scope for _, scope in guarded.rows("slab_scopes")["slab_scopes"]}
    assert scopes == {"public", "organisation:acme"}
    alone = MirrorRequestBody.model_validate({"weights": wanted[:1]}).sources()
    other = await guarded.service.requests.request(alone, "rival")
    done = await guarded.service.requests.wait(other.id, "rival", 20)
    assert (done.status, done.bytes_transferred) == ("READY", 0)
