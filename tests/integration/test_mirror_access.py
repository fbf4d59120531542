"""Grants, keys and organisations of a mirror. Who may read what is in ``promises/test_access_matrix.py``."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import InvalidRequestError
from bdn.wire.grants import GrantVerifier
from tests.doubles.hub import Hub
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, statements_of, with_secret

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.promise("access")

TOKEN = "operator-token"


@pytest.fixture(autouse=True)
def models(hub: Hub) -> None:
    for name in ("one", "two", "private"):
        hub.repo(f"org/{name}", private=name == "private").commit({f"{name}.txt": name.encode(), "empty.txt": b""})


async def test_a_grant_is_verified_with_the_public_key_alone(mirror: MirrorUnderTest) -> None:
    document = await mirror.ready(source("hf://org/one", "/a"), source("hf://org/two", "/b"))
    keys = (await FakeAgent(mirror, "n1").beat())["public_keys"]
    assert "d" not in keys[0]  # the private half of an OKP key, RFC 8037
    grant = GrantVerifier(json.loads(json.dumps(keys))).verify(document["grant"], now=time.time())
    assert grant.organisation == "default"
    assert [(mount.mount_location, str(mount.manifest), mount.source) for mount in grant.mounts] == [
        ("/a", document["sources"][0]["manifest"], "hf://org/one"),
        ("/b", document["sources"][1]["manifest"], "hf://org/two"),
    ]
    assert 24 * 3600 - 60 < grant.expires_at - time.time() <= 24 * 3600


async def test_there_is_no_grant_for_what_was_evicted(mirror: MirrorUnderTest) -> None:
    document = await mirror.ready(source("hf://org/one", "/a"), source("hf://org/two", "/b"))
    await mirror.evict(manifest=document["sources"][1]["manifest"])
    after = await mirror.ended(document["id"])
    assert (after["status"], after["grant"]) == ("READY", None)
    assert (await mirror.http.get("/mirror")).json()["items"][0]["grant"] is None
    again = await mirror.ready(source("hf://org/one", "/a"), source("hf://org/two", "/b"))
    assert (again["bytes_transferred"], again["bytes_reused"]) == (0, 6)
    assert (await mirror.ended(document["id"]))["grant"]


async def test_chunks_of_more_manifests_than_are_kept_cost_one_look_each(
    upstreams: None, hub: Hub, database_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.access.access._OBJECTS_KEPT", 6)
    monkeypatch.setattr("bdn.mirror.access.access._STANDING_SECONDS", 3600.0)
    content = {name: name.encode() * (2 * CHUNK_SIZE + 5) for name in "ab"}
    for name, model in content.items():
        hub.repo(f"org/{name}").commit({"model.bin": model})
    async with mirror_under_test(tmp_path, bearer=TOKEN, auth="token", token=TOKEN, **database_options) as mirror:
        grants = {name: (await mirror.ready(source(f"hf://org/{name}")))["grant"] for name in content}

        async def looks(reader: str, name: str, place: int, status: int = 200) -> int:
            """Into the sets of chunks, for one chunk."""
            part = content[name][place * CHUNK_SIZE :][:CHUNK_SIZE]
            with statements_of(mirror) as statements:
                headers = {"Authorization": f"Bearer {grants[reader]}"}
                answer = await mirror.http.get(f"/chunks/{digest_of(part)}", headers=headers)
            assert (answer.status_code, answer.content if status == 200 else part) == (status, part)
            return sum("set_chunks" in statement for statement in statements)

        await looks("a", "a", 0)
        assert [await looks(name, name, place) for place in (0, 2) for name in "abab"] == [0, 1] * 4
        assert await looks("b", "a", 0, status=404) == 1


async def test_a_grant_reads_all_of_its_manifests_when_the_mirror_forgets_which_of_them_stand(
    upstreams: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.access.access._STANDING_KEPT", 0)
    monkeypatch.setattr("bdn.mirror.access.access._STANDING_SECONDS", 3600.0)
    one, two = source("hf://org/one", "/a"), source("hf://org/two", "/b")
    async with mirror_under_test(tmp_path, bearer=TOKEN, auth="token", token=TOKEN) as mirror:
        for sources in ((one,), (one, two)):
            grant = (await mirror.ready(*sources))["grant"]
            headers = {"Authorization": f"Bearer {grant}"}
            assert (await mirror.http.get(f"/chunks/{digest_of(b'one')}", headers=headers)).content == b"one"


async def test_private_content_is_never_found_by_another_organisation(mirror: MirrorUnderTest, hub: Hub) -> None:
    private = source("hf://org/private", **with_secret("hub-token"))
    acme = await mirror.ready_for("acme", private)
    hub.log.clear()
    rival = await mirror.ready_for("rival", private)  # read again with the rival's own secret; stored once all the same
    assert acme.bytes_transferred == rival.bytes_transferred == 7
    assert acme.sources[0].manifest == rival.sources[0].manifest
    assert [request for request in hub.log.find("/resolve", method="GET") if request.bytes_served]
    assert (await mirror.ready_for("acme", {**private, "mount_location": "/x"})).bytes_transferred == 0
    assert mirror.count("chunks") == 7  # a slab; page and root of the manifest, and of each organisation's listing


async def test_public_content_of_the_hub_is_shared_between_organisations(mirror: MirrorUnderTest) -> None:
    assert (await mirror.ready_for("acme", source("hf://org/one"))).bytes_transferred == 3
    assert (await mirror.ready_for("rival", source("hf://org/one"))).bytes_transferred == 0


REFUSED: list[tuple[Json, str]] = [
    ({"host": "0.0.0.0"}, "not loopback"),
    ({"host": "10.0.0.1"}, "set BDN_AUTH=token"),
    ({"auth": "token"}, "needs BDN_TOKEN"),
    ({"auth": "token", "token": ""}, "needs BDN_TOKEN"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED, ids=["any address", "an address", "no token", "empty token"])
async def test_a_mirror_that_would_be_open_to_others_does_not_start(tmp_path: Path, settings: Json, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        async with mirror_under_test(tmp_path / "new", **settings):
            pytest.fail("it started")


@pytest.mark.parametrize(("settings", "is_told"), [({"host": "0.0.0.0"}, True), ({"host": "127.0.0.1"}, False)])
async def test_a_mirror_that_others_reach_without_tls_says_so(
    tmp_path: Path, settings: Json, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with mirror_under_test(tmp_path / "new", serve=True, auth="token", token="secret", **settings):
        assert ("in the clear: set BDN_TLS_CERT and BDN_TLS_KEY" in caplog.text) is is_told


async def test_with_authentication_the_process_s_own_credentials_are_nobody_s(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    async with mirror_under_test(tmp_path / "off") as mirror:
        await mirror.ready(source("hf://org/private"))
    async with mirror_under_test(tmp_path / "on", bearer=TOKEN, auth="token", token=TOKEN) as mirror:
        assert (await mirror.failed(source("hf://org/private")))["code"] == "AUTH_REQUIRED"
