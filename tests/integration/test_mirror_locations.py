"""Where agents read chunks by themselves: who is told, what is not told, and what a mirror says that delivers all of it itself."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.core.source.upstream import Location
from bdn.store.directory import DirectoryStore
from tests.doubles.hub import Hub
from tests.support.content.names import named
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)

TOKEN = "operator-token"
BIG = bytes(CHUNK_SIZE) + b"tail"
CHUNKS = [digest_of(BIG[:CHUNK_SIZE]), digest_of(BIG[CHUNK_SIZE:])]


class LocatableDirectory(DirectoryStore):
    """A directory that says of its chunks that they can be read elsewhere."""

    is_away = False
    is_ahead_seconds = 0

    def locate(self, digests: Sequence[Digest]) -> list[Location]:
        if self.is_away:
            raise StoreUnavailableError("its keys have ended")
        headers = (("x-amz-checksum-mode", "ENABLED"),)
        return [
            Location(
                f"http://bucket/{one.hex}?X-Amz-Signature=5igned",
                headers,
                expires_at=time.time() + self.is_ahead_seconds + 300,
            )
            for one in digests
        ]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LocatableDirectory:
    """That of the mirrors of the test."""
    made = LocatableDirectory(tmp_path / "store")
    monkeypatch.setattr("bdn.mirror.chunks.opening.open_store", lambda *_, **__: made)
    return made


async def ask(mirror: MirrorUnderTest, ready: Json, *digests: Digest, bearer: str | None = None) -> Any:
    body = {"manifest": ready["sources"][0]["manifest"], "digests": [str(one) for one in digests]}
    headers = {"Authorization": f"Bearer {bearer or ready['grant']}"}
    return await mirror.http.post("/chunks/locations", json=body, headers=headers)


@pytest.fixture
def model(hub: Hub) -> str:
    hub.repo("org/model").commit({"big.bin": BIG, "one": b"1", "two": b"22"})
    hub.repo("org/other").commit({"other.bin": b"other" * 2_000_000})
    return "hf://org/model"


async def test_a_grant_is_told_where_its_chunks_and_slabs_are(
    upstreams: None, model: str, store: LocatableDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store.is_ahead_seconds = 3600  # as the mirror's clock, and as no agent's
    settings: dict[str, Any] = {"auth": "token", "token": TOKEN, "bearer": TOKEN}
    async with mirror_under_test(tmp_path / "mirror", clock=lambda: time.time() + 3600, **settings) as mirror:
        ready, other = await mirror.ready(source(model)), await mirror.ready(source("hf://org/other"))
        manifest = ready["sources"][0]["manifest"]
        assert (await mirror.http.get(f"/manifests/{manifest}")).headers["bdn-delivery"] == "direct"
        (page,) = await mirror.pages(manifest)
        slab = (await mirror.files(manifest))["one"].layout.fetched[0]
        answer = await ask(mirror, ready, *CHUNKS, slab, page.digest, CHUNKS[0])
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-store"
        found = answer.json()
        assert found["delivery"] == "direct"
        assert [item["digest"] for item in found["items"]] == [str(one) for one in (*CHUNKS, slab, page.digest)]
        for item in found["items"]:
            assert item["url"] == f"http://bucket/{item['digest'].removeprefix('b3:')}?X-Amz-Signature=5igned"
            assert item["headers"] == {"x-amz-checksum-mode": "ENABLED"}
            assert 290 < item["expires_in_seconds"] <= 300
        assert await mirror.metric("bdn_mirror_located_chunks_total") == 4

        for digests, bearer in (
            ([*CHUNKS, named("unknown")], ready["grant"]),
            (CHUNKS, other["grant"]),
            ([digest_of(b"22")], ready["grant"]),
        ):
            refused = await ask(mirror, ready, *digests, bearer=bearer)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "NOT_FOUND")
        assert (await ask(mirror, ready, *[named(str(number)) for number in range(1001)])).status_code == 422

        store.is_away = True
        away = await ask(mirror, ready, *CHUNKS)
        assert (away.status_code, away.json()["error"]["code"]) == (503, "STORE_UNAVAILABLE")
    assert "5igned" not in caplog.text


async def test_a_damaged_chunk_is_not_located_until_it_is_repaired(
    upstreams: None, model: str, store: LocatableDirectory, tmp_path: Path
) -> None:
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        ready = await mirror.ready(source(model))
        (tmp_path / "store/chunks" / CHUNKS[0].fanout).unlink()
        await mirror.verify(source=model, repair=False)
        found = (await ask(mirror, ready, *CHUNKS)).json()
        assert [item["digest"] for item in found["items"]] == [str(CHUNKS[1])]
        await mirror.verify(source=model)
        found = (await ask(mirror, ready, *CHUNKS)).json()
        assert [item["digest"] for item in found["items"]] == list(map(str, CHUNKS))


async def test_a_mirror_that_delivers_itself_says_so(
    upstreams: None, model: str, tmp_path: Path, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, locatable in enumerate((False, True)):
        with subtests.test(locatable=locatable), monkeypatch.context() as patch:
            settings: dict[str, Any] = {}
            if locatable:
                made = LocatableDirectory(tmp_path / "locatable")
                patch.setattr("bdn.mirror.chunks.opening.open_store", lambda *_, made=made, **__: made)
                settings["store_delivery"] = "proxy"
            async with mirror_under_test(tmp_path / f"mirror-{number}", **settings) as mirror:
                ready = await mirror.ready(source(model))
                root = await mirror.http.get(f"/manifests/{ready['sources'][0]['manifest']}")
                assert "bdn-delivery" not in root.headers
                assert (await ask(mirror, ready, *CHUNKS)).json() == {"delivery": "proxy", "items": []}
