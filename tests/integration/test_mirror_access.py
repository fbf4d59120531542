"""Who may see and read what: grants, the service's token, and organisations."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bdn.core.digest import Digest
from bdn.core.errors import GrantInvalidError, InvalidRequestError, NotFoundError
from bdn.core.grant import Grant, GrantedMount
from bdn.mirror.keys import load_signer
from bdn.wire.grants import GrantSigner, GrantVerifier, new_signing_key
from bdn.wire.weights_schema import MirrorRequestBody
from tests.doubles.hub import Hub
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.promise("access")

TOKEN = "operator-token"
OPEN = ("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json")
# Public by design, for clouds; 404 where the operator named no address for them.
FOR_CLOUDS = ("/.well-known/openid-configuration", "/.well-known/jwks.json")


@pytest.fixture(autouse=True)
def models(hub: Hub) -> None:
    for name in ("one", "two", "private"):
        hub.repo(f"org/{name}", private=name == "private").commit({f"{name}.txt": name.encode(), "empty.txt": b""})


@pytest.fixture
async def guarded(upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    """A mirror with authentication; its client is the operator."""
    async with mirror_under_test(tmp_path / "mirror", serve=True, bearer=TOKEN, auth="token", token=TOKEN) as mirror:
        yield mirror


def heartbeat(node: str = "n1") -> Json:
    return {"node": node, "cluster": "c", "boot_id": "b", "roles": ["node"], "advertise": None, "version": "1"} | {
        "tiers": {},
        "holdings": [],
    }


async def read_as(mirror: MirrorUnderTest, path: str, bearer: str | None, **headers: str) -> httpx2.Response:
    return await mirror.http.get(path, headers=headers | ({"Authorization": f"Bearer {bearer}"} if bearer else {}))


async def test_a_grant_is_verified_with_the_public_key_alone(mirror: MirrorUnderTest) -> None:
    document = await mirror.ready(source("hf://org/one", "/a"), source("hf://org/two", "/b"))
    keys = (await mirror.http.post("/agents/heartbeat", json=heartbeat())).json()["public_keys"]
    assert "d" not in keys[0]  # the private half of an OKP key, RFC 8037
    verifier = GrantVerifier(json.loads(json.dumps(keys)))
    grant = verifier.verify(document["grant"], now=time.time())
    assert grant.organisation == "default"
    assert [(mount.mount_location, str(mount.manifest), mount.source) for mount in grant.mounts] == [
        ("/a", document["sources"][0]["manifest"], "hf://org/one"),
        ("/b", document["sources"][1]["manifest"], "hf://org/two"),
    ]
    assert 24 * 3600 - 60 < grant.expires_at - time.time() <= 24 * 3600
    head, claims, signature = document["grant"].split(".")
    with pytest.raises(GrantInvalidError):
        verifier.verify(f"{head}.{claims[:-2]}AA.{signature}", now=time.time())


async def test_the_signing_key_survives_a_restart_and_is_readable_by_its_owner_alone(
    upstreams: None, tmp_path: Path
) -> None:
    async with mirror_under_test(tmp_path) as mirror:
        grant = (await mirror.ready(source("hf://org/one")))["grant"]
    async with mirror_under_test(tmp_path) as mirror:
        keys = (await mirror.http.post("/agents/heartbeat", json=heartbeat())).json()["public_keys"]
    GrantVerifier(keys).verify(grant, now=time.time())
    assert modes_of(tmp_path, "grant") == {"grant-key.pem": 0o600}


def modes_of(folder: Path, word: str) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir() if word in path.name}


async def test_there_is_no_grant_for_what_was_evicted(mirror: MirrorUnderTest) -> None:
    document = await mirror.ready(source("hf://org/one", "/a"), source("hf://org/two", "/b"))
    await mirror.evict(manifest=document["sources"][1]["manifest"])
    after = await mirror.ended(document["id"])
    assert (after["status"], after["grant"]) == ("READY", None)
    assert (await mirror.http.get("/mirror")).json()["items"][0]["grant"] is None
    again = await mirror.ready(source("hf://org/one", "/a"), source("hf://org/two", "/b"))
    assert (again["bytes_transferred"], again["bytes_reused"]) == (0, 6)
    assert (await mirror.ended(document["id"]))["grant"]


async def test_every_route_refuses_who_has_no_token(guarded: MirrorUnderTest, subtests: pytest.Subtests) -> None:
    document = await guarded.ready(source("hf://org/one"))
    digest = (await guarded.http.get(f"/manifests/{document['sources'][0]['manifest']}/layout")).json()["files"][0]
    values = {
        "mirror_id": document["id"],
        "digest": document["sources"][0]["manifest"],
        "eviction_id": "evi_" + "0" * 24,
        "collection_id": "col_" + "0" * 24,
        "verification_id": "ver_" + "0" * 24,
        "prefetch_id": "pre_" + "0" * 24,
        "name": "hf-token",
        "token_id": "tok_" + "0" * 24,
    }
    paths: dict[str, dict[str, Any]] = (await guarded.http.get("/openapi.json")).json()["paths"]
    assert len(paths) >= 14
    bodies = {
        "/agents/heartbeat": heartbeat(),
        "/evictions": {"all": True},
        "/collections": {},
        "/restorations": {"source": "hf://org/one"},
        "/verifications": {"all": True},
        "/prefetches": {"source": "hf://org/one", "cluster": "c"},
        "/secrets/{name}": {"value": "x"},
        "/tokens": {"name": "n", "organisation": "acme", "role": "operator"},
    }
    async with httpx2.AsyncClient(transport=guarded.http._transport, base_url="http://mirror") as stranger:
        for path, methods in paths.items():
            for method in methods:
                place = path.format(**values | ({"digest": digest["digest"]} if "chunks" in path else {}))
                body = bodies.get(path, {"weights": [source("hf://org/one")]}) if method in ("post", "put") else None
                with subtests.test(f"{method} {place}"):
                    answer = await stranger.request(method, place, json=body)
                    if path in OPEN + FOR_CLOUDS:
                        assert answer.status_code == (200 if path in OPEN else 404)
                        continue
                    assert answer.status_code == 401
                    assert answer.headers["www-authenticate"] == "Bearer"
                    if method != "head":
                        assert answer.json()["error"]["code"] == "UNAUTHENTICATED"
                    wrong = await stranger.request(method, place, json=body, headers={"Authorization": "Bearer wrong"})
                    reading = "{digest}" in path
                    assert wrong.status_code == (403 if reading else 401)  # a bearer of contents may be a bad grant
    assert guarded.count("mirrors") == 1
    assert (
        guarded.count("operations")
        == guarded.count("agents")
        == guarded.count("secrets")
        == guarded.count("tokens")
        == 0
    )


async def test_a_grant_reads_exactly_what_it_names_on_the_api_and_on_the_data_plane(guarded: MirrorUnderTest) -> None:
    one, two = await guarded.ready(source("hf://org/one")), await guarded.ready(source("hf://org/two"))
    names = [document["sources"][0]["manifest"] for document in (one, two)]
    assert await guarded.tree(names[0], one["grant"]) == {"one.txt": b"one", "empty.txt": b""}
    layouts = [(await guarded.http.get(f"/manifests/{name}/layout")).json() for name in names]
    (own, other) = [next(file["chunks"][0] for file in layout["files"] if file["size"]) for layout in layouts]
    absent = f"b3:{'0' * 64}"
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{layouts[0]['data_port']}", trust_env=False) as plane:
        bearer = {"Authorization": f"Bearer {one['grant']}"}
        assert (await plane.get(f"/chunks/{own}", headers=bearer)).content == b"one"
        assert (await plane.get(f"/chunks/{own}", headers={"Authorization": f"Bearer {TOKEN}"})).content == b"one"
        assert (await plane.get(f"/chunks/{own}")).status_code == 401
        forbidden = await plane.get(f"/chunks/{other}", headers=bearer)
        nothing = await plane.get(f"/chunks/{absent}", headers=bearer)
        assert (forbidden.status_code, forbidden.text.replace(other, "X")) == (404, nothing.text.replace(absent, "X"))
    for path in (f"/manifests/{names[1]}", f"/manifests/{names[1]}/layout", f"/chunks/{other}"):
        theirs = other if "chunks" in path else names[1]
        forbidden = await read_as(guarded, path, one["grant"])
        nothing = await read_as(guarded, path.replace(theirs, absent), one["grant"])
        assert (forbidden.status_code, forbidden.text.replace(theirs, "X")) == (404, nothing.text.replace(absent, "X"))
    for path in ("/mirror", "/manifests", "/agents", f"/mirror/{one['id']}"):
        assert (await read_as(guarded, path, one["grant"])).status_code == 401


async def test_an_expired_or_foreign_grant_is_refused_by_name(guarded: MirrorUnderTest) -> None:
    document = await guarded.ready(source("hf://org/one"))
    manifest = document["sources"][0]["manifest"]
    mounts = (GrantedMount("/m", Digest.parse(manifest), "hf://org/one"),)
    expired = load_signer(guarded.data_dir).sign(Grant("default", mounts, time.time() - 1))
    rival = load_signer(guarded.data_dir).sign(Grant("rival", mounts, time.time() + 60))
    forged = GrantSigner(new_signing_key()).sign(Grant("default", mounts, time.time() + 60))
    for bearer, status, code in (
        (expired, 403, "GRANT_EXPIRED"),
        (forged, 403, "GRANT_INVALID"),
        (rival, 404, "NOT_FOUND"),  # of an organisation for which it was never published
    ):
        answer = await read_as(guarded, f"/manifests/{manifest}", bearer)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def as_organisation(mirror: MirrorUnderTest, organisation: str, wanted: Json) -> tuple[str, int, str]:
    """Id, bytes transferred and manifest of a mirror for an organisation, as if tokens of several existed."""
    requests = mirror.service.requests
    sources = MirrorRequestBody.model_validate({"weights": [wanted]}).sources()
    begun = await requests.request(sources, organisation)
    done = await requests.wait(begun.id, organisation, 20)
    assert done.status == "READY", done.error
    return done.id, done.bytes_transferred, str(done.sources[0].manifest)


async def test_private_content_is_never_found_through_another_organisation_s_identity(
    mirror: MirrorUnderTest, hub: Hub
) -> None:
    private = source("hf://org/private", **with_secret("hub-token"))
    acme, moved, manifest = await as_organisation(mirror, "acme", private)
    assert moved == 7
    hub.log.clear()
    rival, moved, same = await as_organisation(mirror, "rival", private)
    assert (moved, same) == (7, manifest)  # read again with the rival's own secret; stored once all the same
    assert [request for request in hub.log.find("/resolve", method="GET") if request.bytes_served]
    assert (await as_organisation(mirror, "acme", {**private, "mount_location": "/x"}))[1] == 0
    assert mirror.count("contents") == 2
    assert mirror.count("identities") == 4
    with pytest.raises(NotFoundError):
        await mirror.service.requests.get(acme, "rival")
    with pytest.raises(NotFoundError):
        await mirror.service.requests.cancel(rival, "acme")
    items, _ = await mirror.service.requests.page("rival", None, None, None, 10)
    assert [item.id for item in items] == [rival]


async def test_public_content_of_the_hub_is_shared_between_organisations(mirror: MirrorUnderTest) -> None:
    assert (await as_organisation(mirror, "acme", source("hf://org/one")))[1] == 3
    assert (await as_organisation(mirror, "rival", source("hf://org/one")))[1] == 0


async def test_the_same_request_of_two_organisations_is_two_mirrors(idle: MirrorUnderTest) -> None:
    sources = MirrorRequestBody.model_validate({"weights": [source("hf://org/one")]}).sources()
    acme, rival = [await idle.service.requests.request(sources, name) for name in ("acme", "rival")]
    assert acme.id != rival.id


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


async def test_with_authentication_the_process_s_own_credentials_are_nobody_s(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    async with mirror_under_test(tmp_path / "off") as mirror:
        await mirror.ready(source("hf://org/private"))
    async with mirror_under_test(tmp_path / "on", bearer=TOKEN, auth="token", token=TOKEN) as mirror:
        assert (await mirror.failed(source("hf://org/private")))["code"] == "AUTH_REQUIRED"
