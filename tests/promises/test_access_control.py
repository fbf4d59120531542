"""Every other route of the mirror: who may call it, and that another organisation's things are answered like nothing at all."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from bdn.mirror.upstream.secrets import Keyring, SecretTable, new_key
from tests.doubles.hub import Hub
from tests.support.crash.rotting import rot
from tests.support.mirror.access_world import UNKNOWN, World, access_world
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import LONGEST_SECONDS, Json, source
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.promise("access")

KEY: Final = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
OLDER_KEY: Final = new_key()
PUBLIC: Final = {"/healthz", "/readyz", "/metrics", "/.well-known/openid-configuration", "/.well-known/jwks.json"}
READ_WITH_GRANTS: Final = {"/manifests/{digest}", "/manifests/{digest}/layout", "/chunks/{digest}"}  # see the matrix
OPERATORS: Final = {"/tokens", "/tokens/{token_id}", "/collections", "/collections/{collection_id}"}
AGENTS: Final = {"/agents/heartbeat"}
# All others are for controllers, also those that are not written yet: who adds a route for others writes it down here.

STRANGERS: Final = [
    "none", "malformed", "unknown token", "revoked token", "expired token", "grant a shared", "grant of a for all", "grant alg none",
    "identity token", "grant expired", "controller b for a",
]  # fmt: skip
BODIES: Final[dict[str, Json]] = {
    "/mirror": {"weights": [{"source": "hf://org/shared", "mount_location": "/m"}]},
    "/evictions": {"source": "hf://org/none", "tier": "mirror"},
    "/prefetches": {"source": "hf://org/none", "cluster": "c"},
    "/verifications": {"source": "hf://org/none", "tier": "mirror"},
    "/secrets/{name}": {"value": "x"},
    "/tokens": {"name": "n", "organisation": "a", "role": "agent"},
    "/agents/heartbeat": {"node": "n", "cluster": "c", "boot_id": "b", "roles": [], "advertise": None, "version": "1"}
    | {"tiers": {}, "holdings": None},
}


@pytest.fixture
async def world(upstreams: None, hub: Hub, tmp_path: Path) -> AsyncIterator[World]:
    async with access_world(tmp_path / "mirror", hub, secrets_key=f"{KEY},{OLDER_KEY}") as world:
        yield world


def place(path: str) -> str:
    """A path of the OpenAPI document with names of nothing in it."""
    for name, value in (
        ("mirror_id", "mir_"), ("eviction_id", "evi_"), ("prefetch_id", "pre_"), ("verification_id", "ver_"), ("token_id", "tok_"),
        ("collection_id", "col_"),
    ):  # fmt: skip
        path = path.replace(f"{{{name}}}", value + "0" * 24)
    return path.replace("{name}", "none").replace("{digest}", str(UNKNOWN))


async def test_every_route_is_closed_to_whoever_has_not_its_role(world: World, tally: Tally) -> None:
    paths = (await world.mirror.http.get("/openapi.json")).json()["paths"]
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    assert len(routes) >= 24
    for method, path in routes:
        if path in PUBLIC | READ_WITH_GRANTS:
            continue
        others = ["agent"] if path not in AGENTS else ["controller a"]
        others += ["controller a"] if path in OPERATORS else []
        for bearer in (*STRANGERS, *others):
            if path in AGENTS and bearer == "controller b for a":
                continue  # refused as a controller
            answer = await world.ask(bearer, method, place(path), json=BODIES.get(path))
            assert answer.status_code == 401, (method, path, bearer, answer.text)
            assert answer.json()["error"]["code"] == "UNAUTHENTICATED"
            tally.add(scenarios=1, refused=1)
        role = "operator" if path in OPERATORS else "agent" if path in AGENTS else "controller a"
        allowed = await world.ask(role, method, place(path), json=BODIES.get(path))
        assert allowed.status_code not in (401, 403), (method, path, allowed.text)
        tally.add(scenarios=1)


async def test_whoever_is_no_operator_rotates_its_own_secrets_and_hears_of_no_others(
    world: World, tally: Tally
) -> None:
    older = SecretTable(world.mirror.service.requests.database, Keyring.parse(OLDER_KEY))
    for organisation in ("a", "b"):
        await older.set(organisation, "team", "x")
    await SecretTable(older.database, Keyring.parse(new_key())).set("b", "lost", "x")
    before = await older.rows("b")
    for bearer in ("controller a", "operator for a"):
        answer = await world.ask(bearer, "POST", "/secrets/rotate")
        assert (answer.status_code, answer.json()["others_left"]) == (200, None)
        assert [(item["name"], item["sealed_with"]) for item in answer.json()["items"]] == [("team", "first key")]
        tally.add(scenarios=1)
    assert [row.ciphertext for row in await older.rows("b")] == [row.ciphertext for row in before]
    assert (await world.ask("operator", "POST", "/secrets/rotate")).json()["others_left"] == 1
    theirs = (await world.ask("controller b", "GET", "/secrets")).json()["items"]
    assert [(item["name"], item["sealed_with"]) for item in theirs] == [("lost", "unknown key"), ("team", "first key")]


async def test_what_another_organisation_has_is_answered_like_nothing(world: World, tally: Tally) -> None:
    await FakeAgent(world.mirror, "n1").beat_as(world.bearers["agent"])
    await world.ask("controller a", "PUT", "/secrets/of-a", json={"value": "x"})
    made = {
        "eviction": ("/evictions", {"manifest": str(world.manifests["a-public"]), "tier": "mirror", "dry_run": True})
    }
    made["prefetch"] = ("/prefetches", {"manifest": str(world.manifests["a-public"]), "cluster": "c"})
    made["verification"] = ("/verifications", {"manifest": str(world.manifests["a-public"]), "tier": "mirror"})
    ids: dict[str, str] = {"mirror": world.mirrors["a", "a-private"]["id"]}
    for name, (path, body) in made.items():
        answer = await world.ask("controller a", "POST", path, json=body)
        assert answer.status_code == 202, answer.text
        ids[name] = answer.json()["id"]
    manifest, hidden = str(world.manifests["a-private"]), "hf://org/a-private"
    nothing = {"mirror": "mir_" + "0" * 24, "eviction": "evi_" + "0" * 24, "prefetch": "pre_" + "0" * 24}
    nothing |= {"verification": "ver_" + "0" * 24}
    cases: list[tuple[str, str, Json | None, str, str]] = [
        ("GET", "/mirror/{}", None, ids["mirror"], nothing["mirror"]),
        ("GET", "/mirror/{}?wait=5", None, ids["mirror"], nothing["mirror"]),
        ("GET", "/mirror/{}/events", None, ids["mirror"], nothing["mirror"]),
        ("POST", "/mirror/{}/cancel", None, ids["mirror"], nothing["mirror"]),
        ("GET", "/evictions/{}", None, ids["eviction"], nothing["eviction"]),
        ("GET", "/prefetches/{}", None, ids["prefetch"], nothing["prefetch"]),
        ("GET", "/verifications/{}", None, ids["verification"], nothing["verification"]),
        ("GET", "/mirror?source={}", None, hidden, "hf://org/nothing"),
        ("POST", "/evictions", {"source": "{}", "tier": "mirror"}, hidden, "hf://org/nothing"),
        ("POST", "/prefetches", {"mirror_id": "{}", "cluster": "c"}, ids["mirror"], nothing["mirror"]),
        ("POST", "/prefetches", {"manifest": "{}", "cluster": "c"}, manifest, str(UNKNOWN)),
        ("POST", "/prefetches", {"source": "{}", "cluster": "c"}, hidden, "hf://org/nothing"),
        ("POST", "/verifications", {"manifest": "{}", "tier": "mirror"}, manifest, str(UNKNOWN)),
        ("POST", "/verifications", {"source": "{}", "tier": "mirror"}, hidden, "hf://org/nothing"),
        ("DELETE", "/secrets/{}", None, "of-a", "of-b"),
        ("POST", "/restorations", {"manifest": "{}"}, str(world.manifests["gone"]), str(UNKNOWN)),
        ("POST", "/restorations", {"source": "{}"}, "hf://org/gone", "hf://org/nothing"),
        ("GET", "/events?manifest={}", None, manifest, str(UNKNOWN)),
        ("GET", "/names?of={}", None, manifest, str(UNKNOWN)),
        ("GET", "/names?of={}", None, str(world.chunks["a-private y"]), str(UNKNOWN)),
        ("GET", "/names?of={}", None, hidden, "hf://org/nothing"),
    ]
    before = (await world.ask("controller a", "GET", "/mirror")).json()["items"]
    for method, path, template, theirs, absent in cases:
        answers, costs = [], []
        for name in (theirs, absent):
            filled = template and {key: name if value == "{}" else value for key, value in template.items()}
            await world.ask("controller b", method, path.format(name), json=filled)
            with world.statements() as statements:
                answer = await world.ask("controller b", method, path.format(name), json=filled)
            headers = {key: value for key, value in answer.headers.items() if key != "content-length"}
            answers.append((answer.status_code, headers, answer.text.replace(name, "X")))
            costs.append(statements)
        assert answers[0] == answers[1], (method, path, template)
        assert costs[0] == costs[1], (method, path, template)
        assert answers[0][0] == (200 if "?source" in path or "?manifest" in path else 404), (method, path, answers[0])
        tally.add(scenarios=2, refused=1)
    after = (await world.ask("controller a", "GET", "/mirror")).json()["items"]
    assert [item["status"] for item in after] == [item["status"] for item in before]
    assert [item["name"] for item in (await world.ask("controller a", "GET", "/secrets")).json()["items"]] == ["of-a"]


async def test_an_eviction_of_another_s_manifest_takes_nothing_and_says_nothing(world: World, tally: Tally) -> None:
    shapes = []
    for digest in (str(world.manifests["a-private"]), str(UNKNOWN)):
        body = {"manifest": digest, "tier": "mirror"}
        answer = await world.ask("controller b", "POST", "/evictions", json=body, params={"wait": 20})
        document = answer.json()
        shapes.append((answer.status_code, document.get("status"), document.get("items"), document.get("bytes_freed")))
        tally.add(scenarios=1, refused=1)
    assert shapes[0] == shapes[1]
    path = f"/manifests/{world.manifests['a-private']}"
    assert (await world.ask("controller a", "GET", path)).status_code == 200


async def test_a_verification_neither_reads_nor_tells_of_another_s_private_slab(
    upstreams: None, hub: Hub, tmp_path: Path, tally: Tally
) -> None:
    """Both organisations have the file x, each in a slab of its own."""
    async with access_world(tmp_path / "mirror", hub, scrub_seconds=0) as world:

        async def verified(bearer: str, **what: object) -> tuple[set[str], int]:
            body = {"tier": "mirror", "repair": False, **what}
            waiting = {"wait": LONGEST_SECONDS}
            document = (await world.ask(bearer, "POST", "/verifications", json=body, params=waiting)).json()
            assert document["status"] in ("DONE", "DAMAGED"), document
            return {item["chunk"] for item in document["items"]}, document["chunks_read"]

        slabs = {name: world.chunks[f"{name}-private slab"] for name in "ab"}
        rot(world.mirror.data_dir / "store/chunks" / slabs["a"].fanout, "flipped")
        everything, _ = await verified("operator", all=True)
        assert everything == {str(slabs["a"])}
        for bearer, name, expected in (
            ("controller a", "a", {str(slabs["a"])}),
            ("operator for a", "a", {str(slabs["a"])}),
            ("controller b", "b", set()),
        ):
            for what in ({"manifest": str(world.manifests[f"{name}-private"])}, {"source": f"hf://org/{name}-private"}):
                assert await verified(bearer, **what) == (expected, 1), (bearer, what)
                tally.add(scenarios=1, refused=not expected)


async def test_lists_hold_one_s_own_and_the_metrics_name_nobody(world: World, tally: Tally) -> None:
    await world.done("a", {"weights": [source("hf://org/a-public", "/again")]})
    a, b = [(await world.ask(f"controller {name}", "GET", "/mirror")).json()["items"] for name in ("a", "b")]
    assert not {item["id"] for item in a} & {item["id"] for item in b}
    assert (len(a), len(b)) == (5, 2)
    for name, own in (("a", {"shared", "a-public", "a-private"}), ("b", {"shared", "b-private"})):
        held = (await world.ask(f"controller {name}", "GET", "/manifests")).json()["items"]
        assert {item["manifest"] for item in held} == {str(world.manifests[manifest]) for manifest in own}
        tally.add(scenarios=len(held))
    page = (await world.mirror.http.get("/metrics")).text
    names = [digest.hex for digest in (*world.manifests.values(), *world.chunks.values())]
    names += ["org/", 'organisation="', *world.tokens.values()]
    assert [name for name in names if name in page] == []
    tally.add(scenarios=1)
