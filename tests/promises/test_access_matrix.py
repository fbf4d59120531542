"""Who may read what: organisation x manifest x chunk x verb, against tables written by hand, and every other route of the mirror."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx2
import pytest
from fastapi.routing import APIRoute

from bdn.core.chunk import Digest, digest_of
from bdn.mirror.db.secrets import Keyring, SecretTable, new_key
from bdn.mirror.page.app import ROUTERS
from bdn.store.bucket_store import BucketStore
from bdn.wire.cache_schema import pack
from tests.doubles.hub import Hub
from tests.support.crash.rot import rot
from tests.support.mirror.access_world import CLUSTER, STATUS, UNKNOWN, World, access_world, shape
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import LONGEST_SECONDS, Json, source, statements_of, with_secret
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [pytest.mark.promise("access"), pytest.mark.usefixtures("backend")]
KEY: Final = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
OLDER_KEY: Final = new_key()
A, B = {"shared", "a-public", "a-private"}, {"shared", "b-private"}


PODS: Final = ("pod of a", "pod of another namespace of a", "pod of b")
FALSE_PODS: Final = (
    "pod of no organisation", "pod expired", "pod for another audience", "pod of another key under this name", "pod of another issuer",
)  # fmt: skip


# --- the oracle -------------------------------------------------------------------------------------------------------
# What each bearer may read: a set of manifests, or how it is refused whatever it asks for.
READS: Final[dict[str, set[str] | str]] = {
    "none": "UNAUTHENTICATED",
    "malformed": "GRANT_INVALID",
    "unknown token": "UNAUTHENTICATED",
    "revoked token": "UNAUTHENTICATED",
    "expired token": "UNAUTHENTICATED",
    "agent": "UNAUTHENTICATED",
    "controller a": A,
    "controller b": B,
    "controller b for a": "UNAUTHENTICATED",
    "team Default of a": set(),  # what whoever has no team mirrored is no team's
    "team research of a": set(),
    "team research of b": set(),
    "operator": set(),  # of the organisation default, which has nothing
    "operator token": set(),
    "operator for a": A,
    "grant a shared": {"shared"},
    "grant b shared": {"shared"},
    "grant a a-public": {"a-public"},
    "grant a a-private": {"a-private"},
    "grant b b-private": {"b-private"},
    "grant a gone": set(),  # issued before the eviction
    "grant of a for all": A,
    "grant of b for all": B,
    "grant of nobody for all": set(),
    "grant expired": "GRANT_EXPIRED",
    "grant of another key": "GRANT_INVALID",
    "grant of another key under this name": "GRANT_INVALID",
    "grant alg none": "GRANT_INVALID",
    "grant signed with the public key": "GRANT_INVALID",
    "grant signed as RS256": "GRANT_INVALID",
    "grant without an expiry": "GRANT_INVALID",
    "grant for another audience": "GRANT_INVALID",
    "grant of another issuer": "GRANT_INVALID",
    "identity token": "GRANT_INVALID",
    # A service-account token reads nothing, whoever it is of: its pod's mirror has a grant.
    **dict.fromkeys((*PODS, *FALSE_PODS, "agent of Kubernetes"), "GRANT_INVALID"),
}


# Of tokens the operator's alone reads chunks; it reads whatever the store holds.
TEAMS: Final = ("team Default of a", "team research of a", "team research of b")
NO_CHUNKS: Final = {"controller a", "controller b", "controller b for a", *TEAMS}
ALL_CHUNKS: Final = {"operator", "operator token", "operator for a"}
PARTS: Final = ("root", "page", "slab")


# Which manifests open a chunk: those whose sets refer to it. A small file has no chunk of its own.
OPENED_BY: Final[dict[str, set[str]]] = {
    "big 0": {"shared", "a-public"},
    "big 1": {"shared", "a-public"},
    **{f"{name} {part}": {name} for name in sorted(A | B) for part in PARTS},
    **{f"gone {part}": set() for part in PARTS},
    "a small file": set(),
    "unknown": set(),
}


def may_read(bearer: str, manifest: str) -> str:
    reads = READS[bearer]
    if isinstance(reads, str):
        return reads
    return "OK" if manifest in reads else "NOT_FOUND"


def may_fetch(bearer: str, chunk: str) -> str:
    reads = READS[bearer]
    if bearer in NO_CHUNKS or isinstance(reads, str):
        return "UNAUTHENTICATED" if bearer in NO_CHUNKS else str(reads)
    if bearer in ALL_CHUNKS:
        return "NOT_FOUND" if chunk in ("a small file", "unknown") else "OK"
    return "OK" if OPENED_BY[chunk] & reads else "NOT_FOUND"


VERBS: Final[list[tuple[str, dict[str, str]]]] = [("GET", {}), ("HEAD", {}), ("GET", {"Range": "bytes=1-3"})]
NO_DIGESTS: Final = (
    "b3:", "b3:zz", "b3:" + "0" * 63, "b3:" + "0" * 65, "B3:" + "0" * 64, "sha256:" + "0" * 64, "..%2f..%2fmirror.sqlite",
)  # fmt: skip


# --- the matrix -------------------------------------------------------------------------------------------------------
@pytest.fixture
async def world(upstreams: None, hub: Hub, tmp_path: Path) -> AsyncIterator[World]:
    async with access_world(tmp_path / "mirror", hub, secrets_key=f"{KEY},{OLDER_KEY}") as world:
        assert world.chunks.keys() == OPENED_BY.keys()
        assert len(set(world.chunks.values())) == len(world.chunks)
        assert world.bearers.keys() == READS.keys()
        yield world


def check(answer: httpx2.Response, expected: str, asked: Digest, chunk: str = "") -> None:
    where = f"{answer.request.method} {answer.request.url} as expected {expected}: {answer.status_code}"
    if expected != "OK":
        assert answer.status_code == STATUS[expected], where
        if answer.request.method != "HEAD":
            assert answer.json()["error"]["code"] == expected, where
        return
    assert answer.status_code in (200, 206), where
    if answer.status_code == 200 and answer.request.method == "GET":
        assert digest_of(answer.content) == asked, f"{where} {chunk}"


async def test_who_may_read_which_manifest(world: World, tally: Tally) -> None:
    for bearer in READS:
        nothing = shape(await world.ask(bearer, "GET", f"/manifests/{UNKNOWN}"), UNKNOWN)
        for name, digest in world.manifests.items():
            expected = may_read(bearer, name)
            answer = await world.ask(bearer, "GET", f"/manifests/{digest}")
            check(answer, expected, digest)
            assert expected == "OK" or shape(answer, digest) == nothing, (bearer, name)
            tally.add(scenarios=1, refused=expected != "OK")

    for bearer in ("none", "controller a", "operator", "grant a shared", "grant alg none"):
        for path in NO_DIGESTS:
            answers = {
                (await world.ask(bearer, "GET", f"/{kind}/{path}")).status_code for kind in ("manifests", "chunks")
            }
            assert answers <= {404, 422}, path
            assert (await world.plane.get(f"/chunks/{path}", headers=world.bearers[bearer])).status_code == 404, path
            tally.add(scenarios=3, refused=3)


async def test_who_may_read_which_chunk_on_either_plane(world: World, tally: Tally) -> None:
    for position, bearer in enumerate(READS):
        for verb, ranged in VERBS[: 3 if position % at_scale(9, 1) == 0 else 1]:
            for on_plane in (False, True):
                nothing: tuple[object, ...] = ()
                for name in sorted(world.chunks, key=lambda one: one != "unknown"):
                    digest, expected = world.chunks[name], may_fetch(bearer, name)
                    path = f"/chunks/{digest}"
                    if on_plane:
                        answer = await world.plane.request(verb, path, headers=world.bearers[bearer] | ranged)
                    else:
                        answer = await world.ask(bearer, verb, path, headers=ranged)
                    if name.startswith("gone") and bearer in ALL_CHUNKS:
                        continue  # the operator may read what is about to be collected, or has been
                    check(answer, expected, digest, name)
                    if expected == "OK":
                        assert not ranged or (answer.status_code, len(answer.content)) == (206, 3)
                    nothing = nothing or shape(answer, digest)
                    assert expected == "OK" or shape(answer, digest) == nothing, (bearer, name, on_plane)
                    tally.add(scenarios=1, refused=expected != "OK")


async def test_who_is_told_where_which_chunk_can_be_read(world: World, tally: Tally) -> None:
    """Whoever may read it from the data plane, by a grant for this manifest. A mirror with a directory then says that it delivers itself."""
    is_direct = world.mirror.behind.store_type is BucketStore
    for position, bearer in enumerate(READS):
        if position % at_scale(3, 1) and not bearer.startswith(("grant a", "malformed")):
            continue
        for name, digest in world.chunks.items():
            for manifest in {"a-private", "unknown", *OPENED_BY[name]}:
                expected, reads = may_fetch(bearer, name), READS[bearer]
                if bearer in ALL_CHUNKS:
                    expected = "OK"  # what the store does not hold is not found where it is read
                elif expected in ("OK", "NOT_FOUND"):
                    is_opened = manifest in reads and manifest in OPENED_BY[name]
                    expected = "OK" if is_opened else "NOT_FOUND"
                body = {"manifest": str(world.manifests[manifest]), "digests": [str(digest)]}
                answer = await world.ask(bearer, "POST", "/chunks/locations", json=body)
                assert answer.status_code == STATUS[expected], (bearer, name, manifest, answer.text)
                if expected == "OK":
                    told = answer.json()
                    assert told["delivery"] == ("direct" if is_direct else "proxy")
                    assert [one["digest"] for one in told["items"]] == [str(digest)] * is_direct
                tally.add(scenarios=1, refused=expected != "OK")


async def test_no_other_verb_tells_what_exists_or_does_anything(world: World, tally: Tally) -> None:
    bearers = list(READS)[:: at_scale(6, 1)]
    before = world.mirror.rows("mirrors", "manifests", "operations"), world.mirror.chunks()
    for bearer in bearers:
        for verb in ("POST", "PUT", "DELETE", "PATCH"):
            answers = {
                shape(await world.ask(bearer, verb, f"/{kind}/{digest}"), digest)[::2]
                for kind, names in (("manifests", world.manifests), ("chunks", world.chunks))
                for digest in names.values()
            }
            assert {status for status, _ in answers} == {405}
            assert len(answers) == 2  # one for each kind of path
            refused = {
                shape(await world.plane.request(verb, f"/chunks/{digest}", headers=world.bearers[bearer]), digest)[::2]
                for digest in world.chunks.values()
            }
            assert [status for status, _ in refused] == [501]
            tally.add(scenarios=2 * len(world.chunks) + len(world.manifests))
    assert (world.mirror.rows("mirrors", "manifests", "operations"), world.mirror.chunks()) == before


async def test_what_is_not_yours_costs_nothing(world: World, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = f"/chunks/{world.chunks['gone root']}"
    async with asyncio.timeout(LONGEST_SECONDS):
        while (await world.ask("grant a gone", "GET", gone)).status_code != 404:  # noqa: ASYNC110 - until a second is over
            await asyncio.sleep(0.05)
    # What is kept for a second is kept for this test.
    monkeypatch.setattr("bdn.mirror.access.access._STANDING_SECONDS", 3600.0)
    for bearer, reads in READS.items():
        if isinstance(reads, str) or bearer in ALL_CHUNKS | NO_CHUNKS:
            continue
        for kind, names, may in (("manifests", world.manifests, may_read), ("chunks", world.chunks, may_fetch)):
            costs: dict[str, list[str]] = {}
            others = [name for name in names if may(bearer, name) == "NOT_FOUND" and bearer != f"grant a {name}"]
            for name in others:
                await world.ask(bearer, "GET", f"/{kind}/{names[name]}")  # what is kept, is kept now
                with statements_of(world.mirror) as costs[name]:
                    await world.ask(bearer, "GET", f"/{kind}/{names[name]}")
                assert costs[name] == costs.get("unknown", []), (bearer, kind, name)
                tally.add(scenarios=1)
            assert "unknown" in costs


# --- Every other route of the mirror: who may call it, and that another organisation's things are answered like nothing at all ---
PUBLIC: Final = {"/healthz", "/readyz", "/metrics", "/.well-known/openid-configuration", "/.well-known/jwks.json"}
READ_WITH_GRANTS: Final = {  # see the matrix
    "/manifests/{digest}", "/chunks/{digest}", "/chunks/locations", "/files/{digest}/{path}", "/trees",
}  # fmt: skip
PUSHES: Final[dict[str, Json | None]] = {
    "/pushes": {"source": "bt://llama@job1/checkpoint-1"},
    "/pushes/{push_id}/missing": {"chunks": []},
    "/pushes/{push_id}/commit": {"files": [{"path": "x", "size": 0, "chunks": []}]},
    "/pushes/{push_id}": None,
}
OPERATORS: Final = {
    "delete /agents",
    "/tokens",
    "/tokens/{token_id}",
    "patch /caches/{project}",
    "delete /caches/{project}/{cluster}",
    "/collections",
    "/collections/{collection_id}",
}
AGENTS: Final = {
    "/agents/heartbeat", "/caches/{project}/{cluster}/summary", "/caches/{project}/uses", "/runs/{run}/{rank}", "/runs/{run}/{rank}/logs", "/hub",
}  # fmt: skip
FOR_PODS: Final = {  # of runs, what the pod itself is
    "post /mirror", "get /mirror/{mirror_id}", "post /mirror/{mirror_id}/cancel", "get /runs/{run}/{rank}", "post /runs/{run}/{rank}/logs",
}  # fmt: skip
FOR_TEAMS: Final = {  # also to a token of a team
    "post /mirror", "get /mirror", "get /mirror/{mirror_id}", "get /mirror/{mirror_id}/events", "post /mirror/{mirror_id}/cancel",
    "get /stages", "get /trees", "post /manifests/{digest}/addresses", "post /pushes/grants", "get /checkpoints", "delete /checkpoints/{checkpoint_id}",
    "get /projects", "delete /projects/{project}", "get /teams", "post /caches", "get /caches", "get /caches/{project}/summary",
    "post /v1/training_projects", "post /v1/teams/{team_id}/training_projects", "get /v1/training_projects",
    "get /v1/training_projects/{project_id}", "delete /v1/training_projects/{project_id}",
    "get /v1/training_projects/{project_id}/cache/summary", "get /v1/training_projects/{project_id}/jobs/{job_id}/checkpoints",
    "get /v1/training_projects/{project_id}/jobs/{job_id}/checkpoint_files", "get /v1/training_projects/{project_id}/jobs/{job_id}/metrics",
    "post /v1/training_projects/{project_id}/jobs/{job_id}/metrics", "get /v1/training_projects/{project_id}/jobs/{job_id}/auth_codes",
    "get /v1/training_projects/{project_id}/jobs/{job_id}/download",
    "get /v1/teams", "get /v1/secrets", "get /v1/teams/{team_id}/secrets", "get /v1/training/capacity", "post /graphql/",
    *(f"{method} /v1/training_projects/{{project_id}}/jobs" for method in ("post", "get")), "post /v1/training_jobs/search",
    *(f"{method} /v1/training_projects/{{project_id}}/jobs/{{job_id}}" for method in ("get", "patch", "delete")),
    *(f"post /v1/training_projects/{{project_id}}/jobs/{{job_id}}/{call}" for call in ("stop", "recreate", "logs")),
    "get /v1/training_projects/{project_id}/jobs/{job_id}/logs",
    "get /v1/blobs/credentials/train",
}  # fmt: skip


# All others are for controllers, also those that are not written yet: who adds a route for others writes it down here.
STRANGERS: Final = [
    "none", "malformed", "unknown token", "revoked token", "expired token", "grant a shared", "grant of a for all", "grant alg none",
    "identity token", "grant expired", "controller b for a", *FALSE_PODS,
]  # fmt: skip
BODIES: Final[dict[str, Json]] = {
    "/mirror": {"weights": [{"source": "hf://org/shared", "mount_location": "/m"}]},
    "/evictions": {"source": "hf://org/none", "tier": "mirror"},
    "/prefetches": {"source": "hf://org/none", "cluster": "c"},
    "/verifications": {"source": "hf://org/none", "tier": "mirror"},
    "/secrets/{name}": {"value": "x"},
    "/tokens": {"name": "n", "organisation": "a", "role": "agent"},
    "/manifests/{digest}/addresses": {"paths": ["x"]},
    "/pushes/grants": {"job": "bt://llama@job1"},
    "/teams": {"name": "research"},
    "/caches": {"project": "llama", "cluster": "c", "volume_id": "0" * 32},
    "/caches/{project}": {"limit_bytes": 1},
    "/caches/{project}/{cluster}/summary": {"volume_id": "0" * 32, "timestamp": "2026-11-25T10:00:00Z", "size_bytes": 0}
    | {"files": 0, "packed": pack([])},
    "/v1/training_projects": {"training_project": {"name": "x"}},
    "/v1/teams/{team_id}/training_projects": {"training_project": {"name": "x"}},
    "/v1/training_projects/{project_id}/jobs/{job_id}/metrics": {},
    "/v1/secrets": {"name": "none", "value": "x"},
    "/v1/teams/{team_id}/secrets": {"name": "none", "value": "x"},
    "/graphql/": {"query": "{ teams { id } }"},
    "/v1/training_projects/{project_id}/jobs": {"training_job": {"runtime": {"start_commands": ["true"]}}},
    "/v1/training_jobs/search": {},
    "/v1/training_projects/{project_id}/jobs/{job_id}": {},
    "/v1/training_projects/{project_id}/jobs/{job_id}/logs": {},
    "/runs/{run}/{rank}/logs": {"seq": 0, "lines": []},
    "/hub": {"method": "GET", "target": "/api/whoami-v2"},
    "/agents/heartbeat": {"node": "n", "cluster": "c", "boot_id": "b", "roles": [], "advertise": None, "version": "1"}
    | {"tiers": {}},
}


def place(path: str) -> str:
    """A path of the OpenAPI document with names of nothing in it."""
    path = re.sub(r"{(\w{3})\w*_id}", lambda found: f"{found[1]}_{'0' * 24}", path)
    path = path.replace("{name}", "none").replace("{project}", "none").replace("{cluster}", CLUSTER)
    return path.replace("{digest}", str(UNKNOWN))


async def test_every_route_is_closed_to_whoever_has_not_its_role(world: World, tally: Tally) -> None:
    paths = (await world.mirror.http.get("/openapi.json")).json()["paths"]
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    assert len(routes) >= 24
    for method, path in routes:
        if path in PUBLIC | READ_WITH_GRANTS | PUSHES.keys():
            continue
        others = ["agent", "agent of Kubernetes"] if path not in AGENTS else ["controller a"]
        others += PODS if f"{method} {path}" not in FOR_PODS else []
        others += ["controller a"] if {path, f"{method} {path}"} & OPERATORS else []
        others += TEAMS if f"{method} {path}" not in FOR_TEAMS else []
        for bearer in (*STRANGERS, *others):
            if path in AGENTS and bearer == "controller b for a":
                continue  # refused as a controller
            answer = await world.ask(bearer, method, place(path), json=BODIES.get(path))
            assert answer.status_code == 401, (method, path, bearer, answer.text)
            assert answer.json()["error"]["code"] == "UNAUTHENTICATED"
            tally.add(scenarios=1, refused=1)
        role = "operator" if {path, f"{method} {path}"} & OPERATORS else "agent" if path in AGENTS else "controller a"
        allowing = [
            *(TEAMS if f"{method} {path}" in FOR_TEAMS else ()),
            *(PODS if f"{method} {path}" in FOR_PODS else ()),
        ]
        allowing += ["agent of Kubernetes"] if path in AGENTS else []
        for allowed in (role, *allowing):
            answer = await world.ask(allowed, method, place(path), json=BODIES.get(path))
            assert answer.status_code not in (401, 403), (method, path, allowed, answer.text)
            tally.add(scenarios=1)


# --- The operator's page: the same roles, by a session ---
PAGES_FOR_ALL: Final = {"/ui/login", "/ui/logout", "/ui/assets/{name}"}
PAGES_FOR_TEAMS: Final = {  # all others are for controllers
    "/ui", "/ui/live/now", "/ui/search",
    *(f"/ui/{live}{view}" for live in ("", "live/") for view in ("mirrors", "mirror", "jobs", "job")),
}  # fmt: skip
OURS: Final = {"Sec-Fetch-Site": "same-origin"}


async def session_of(world: World, bearer: str) -> tuple[int, str]:
    """The status of a log-in with the bearer's token, and the cookie."""
    form = {"token": world.bearers[bearer].get("Authorization", "").removeprefix("Bearer ")}
    transport = httpx2.ASGITransport(app=world.mirror.service.api)
    async with httpx2.AsyncClient(transport=transport, base_url="http://mirror") as client:
        answer = await client.post("/ui/login", data=form, headers=OURS)
        return answer.status_code, answer.headers.get("set-cookie", "").partition(";")[0]


async def test_every_route_of_the_page_is_closed_without_a_session_of_its_role(world: World, tally: Tally) -> None:
    routes = [
        (method, route.path)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.path not in PAGES_FOR_ALL
        for method in route.methods or ()
    ]
    assert len(routes) >= 7
    own = {"controller b for a"}  # without BDN-Organisation, a token of its own organisation
    for bearer in (*(one for one in STRANGERS if one not in own), *PODS, "agent", "agent of Kubernetes"):
        assert await session_of(world, bearer) in ((401, ""), (403, "")), bearer
        tally.add(scenarios=1, refused=1)
    cookies = {bearer: (await session_of(world, bearer))[1] for bearer in ("controller a", "operator", *TEAMS)}
    for method, path in routes:

        async def answer(cookie: str, method: str = method, path: str = path) -> httpx2.Response:
            headers = {**OURS, "Cookie": cookie, "Authorization": ""}
            form = None if method == "GET" else {"x": ""}
            return await world.mirror.http.request(method, path, headers=headers, data=form)

        for cookie in ("", "bdn_session=", "bdn_session=" + "x" * 43):
            refused = await answer(cookie)
            is_led = method == "GET" and not path.startswith("/ui/live/")
            assert refused.status_code == (303 if is_led else 401), (method, path)
            assert not is_led or refused.headers["location"].startswith("/ui/login?")
            tally.add(scenarios=1, refused=1)
        for team in TEAMS if path not in PAGES_FOR_TEAMS else ():
            assert (await answer(cookies[team])).status_code == 403, (method, path, team)
            tally.add(scenarios=1, refused=1)
        if not path.startswith("/ui/live/"):  # which does not end
            for allowed in ("controller a", "operator", *(TEAMS if path in PAGES_FOR_TEAMS else ())):
                assert (await answer(cookies[allowed])).status_code not in (303, 401, 403), (method, path, allowed)
                tally.add(scenarios=1)


async def test_grant_of_one_mount__of_a_mirror_with_several__reads_its_manifest_alone(
    world: World, tally: Tally
) -> None:
    names = ("shared", "a-private")
    weights = [source(f"hf://org/{name}", f"/{name}", **with_secret("hub-token")) for name in names]
    mirror = (await world.done("a", {"weights": weights}))["id"]
    for bearer in ("controller a", "operator for a"):
        for name in names:
            document = (await world.ask(bearer, "GET", f"/mirror/{mirror}", params={"mount": f"/{name}"})).json()
            world.bearers["of one mount"] = {"Authorization": f"Bearer {document['grant']}"}
            for other in names:
                answer = await world.ask("of one mount", "GET", f"/manifests/{world.manifests[other]}")
                check(answer, "OK" if other == name else "NOT_FOUND", world.manifests[other])
                tally.add(scenarios=1, refused=other != name)


async def test_a_commit_is_listed_for_its_mirrors_organisation_and_for_its_grants(world: World, tally: Tally) -> None:
    """A grant lists what it names; of another commit it says what it says of none."""
    commit = f"hf://org/a-private@{world.mirrors['a', 'a-private']['sources'][0]['resolved_revision']}"
    answers = {"controller a": 200, "grant a a-private": 200, "operator for a": 200}
    refused = [bearer for bearer in world.bearers if bearer not in answers]
    assert len(refused) > len(STRANGERS)
    for bearer in (*answers, *refused):
        answer = await world.ask(bearer, "GET", "/trees", params={"source": commit})
        assert (answer.status_code == 200) == (bearer in answers), (bearer, answer.text)
        tally.add(scenarios=1, refused=bearer not in answers)
    none = await world.ask("grant a a-private", "GET", "/trees", params={"source": f"hf://org/a-private@{'0' * 40}"})
    other = await world.ask("grant a a-public", "GET", "/trees", params={"source": commit})
    assert (none.status_code, other.status_code) == (404, 404)
    assert (await world.ask("none", "GET", "/trees")).status_code == 401  # before the query is looked at


async def test_pushes_are_for_controllers_and_for_grants_to_push(world: World, tally: Tally) -> None:
    """A grant to push is for one rank of one job; it reads nothing, and what reads does not push."""
    asked = {"job": "bt://llama@job1#rank-1"}
    made = await world.ask("controller a", "POST", "/pushes/grants", json=asked)
    world.bearers["push grant"] = {"Authorization": f"Bearer {made.json()['grant']}"}
    own = "bt://llama@job1/checkpoint-1#rank-1"
    begun = await world.ask("push grant", "POST", "/pushes", json={"source": own})
    assert begun.status_code == 201, begun.text
    push = begun.json()["push_id"]
    for path, body in PUSHES.items():
        method = "DELETE" if body is None else "POST"
        place = path.replace("{push_id}", push)
        for bearer in (*STRANGERS, *PODS, "agent", "agent of Kubernetes", "controller b", "team research of a"):
            answer = await world.ask(bearer, method, place, json=body)
            is_theirs = bearer in ("controller b", "team research of a")  # with projects of their own
            expected = {401, 403} if not is_theirs else {201} if path == "/pushes" else {404}
            assert answer.status_code in expected, (path, bearer, answer.text)
            tally.add(scenarios=1, refused=1)
    chunk = f"/pushes/{push}/chunks/{digest_of(b'x')}"
    for bearer in (*STRANGERS, *PODS, "agent", "agent of Kubernetes", "controller b", "team research of a"):
        # BDN-Organisation is the API's
        is_theirs = bearer in ("controller b", "controller b for a", "team research of a")
        answer = await world.plane.put(chunk, content=b"x", headers=world.bearers[bearer])
        assert answer.status_code in ({404} if is_theirs else {401, 403}), (bearer, answer.text)
        tally.add(scenarios=1, refused=1)
    for other in ("bt://llama@job1/checkpoint-1", "bt://llama@job2/checkpoint-1#rank-1", "bt://other@job1/x#rank-1"):
        assert (await world.ask("push grant", "POST", "/pushes", json={"source": other})).status_code == 401
        theirs = (await world.ask("controller a", "POST", "/pushes", json={"source": other})).json()["push_id"]
        for path, body in PUSHES.items():
            if path != "/pushes":
                method = "DELETE" if body is None else "POST"
                answer = await world.ask("push grant", method, path.replace("{push_id}", theirs), json=body)
                assert answer.status_code == 404, (path, other, answer.text)
        tally.add(scenarios=1, refused=1)
    for method, path in [
        ("GET", "/checkpoints"),
        ("GET", "/mirror"),
        ("GET", f"/manifests/{world.manifests['shared']}"),
    ]:
        assert (await world.ask("push grant", method, path)).status_code in (401, 403), path
    assert (await world.plane.put(chunk, content=b"x", headers=world.bearers["push grant"])).status_code == 204
    slab = str(digest_of(b"x"))
    files = {"files": [{"path": "x", "size": 1, "digest": slab, "slab": slab, "offset": 0}]}
    done = await world.ask("push grant", "POST", f"/pushes/{push}/commit", json=files)
    assert (done.status_code, done.json()["status"]) == (200, "READY")
    tally.add(scenarios=3)


async def test_whoever_is_no_operator_rotates_its_own_secrets_alone(world: World, tally: Tally) -> None:
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
    hidden_stage = stage_of("train", world.mirrors["a", "a-private"]["id"])
    await FakeAgent(world.mirror, "n1", stages=[hidden_stage]).beat_as(world.bearers["agent"])
    await world.ask("controller a", "PUT", "/secrets/of-a", json={"value": "x"})
    ids: dict[str, str] = {"mirror": world.mirrors["a", "a-private"]["id"]}
    for name, more in (
        ("eviction", {"tier": "mirror", "dry_run": True}), ("prefetch", {"cluster": "c"}), ("verification", {"tier": "mirror"}),
    ):  # fmt: skip
        path, body = f"/{name}{'es' if name == 'prefetch' else 's'}", {"manifest": str(world.manifests["a-public"])}
        answer = await world.ask("controller a", "POST", path, json=body | more)
        assert answer.status_code == 202, answer.text
        ids[name] = answer.json()["id"]
    begun = await world.ask("controller a", "POST", "/pushes", json={"source": "bt://llama@job1/checkpoint-1"})
    ids["push"] = begun.json()["push_id"]
    manifest, hidden = str(world.manifests["a-private"]), "hf://org/a-private"
    commit = f"{hidden}@{world.mirrors['a', 'a-private']['sources'][0]['resolved_revision']}"
    assert (await world.ask("controller a", "GET", "/trees", params={"source": commit})).status_code == 200
    made = await world.ask("controller a", "POST", "/caches", json=BODIES["/caches"])
    cache = made.json()["project_id"]
    nothing = {name: f"{name[:3]}_{'0' * 24}" for name in ids} | {"push": f"mir_{'0' * 24}"}
    cases: list[tuple[str, str, Json | None, str, str]] = [
        ("GET", "/mirror/{}", None, ids["mirror"], nothing["mirror"]),
        ("GET", "/mirror/{}?wait=5", None, ids["mirror"], nothing["mirror"]),
        ("GET", "/mirror/{}?mount=/models/m", None, ids["mirror"], nothing["mirror"]),
        ("GET", "/mirror/{}/events", None, ids["mirror"], nothing["mirror"]),
        ("POST", "/mirror/{}/cancel", None, ids["mirror"], nothing["mirror"]),
        ("POST", "/pushes/{}/missing", {"chunks": []}, ids["push"], nothing["push"]),
        ("POST", "/pushes/{}/commit", PUSHES["/pushes/{push_id}/commit"], ids["push"], nothing["push"]),
        ("DELETE", "/pushes/{}", None, ids["push"], nothing["push"]),
        ("GET", "/caches/{}/summary", None, cache, "0" * 10),
        ("GET", "/caches/{}/summary", None, "llama", "mistral"),
        ("GET", "/evictions/{}", None, ids["eviction"], nothing["eviction"]),
        ("GET", "/prefetches/{}", None, ids["prefetch"], nothing["prefetch"]),
        ("GET", "/verifications/{}", None, ids["verification"], nothing["verification"]),
        ("GET", "/mirror?source={}", None, hidden, "hf://org/nothing"),
        ("GET", "/trees?source={}", None, commit, f"hf://org/nothing@{'0' * 40}"),
        ("POST", "/evictions", {"source": "{}", "tier": "mirror"}, hidden, "hf://org/nothing"),
        ("POST", "/evictions", {"manifest": "{}", "tier": "mirror"}, manifest, str(UNKNOWN)),
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
        *(("GET", "/names?of={}", None, str(world.chunks[f"a-private {part}"]), str(UNKNOWN)) for part in PARTS),
        ("GET", "/names?of={}", None, hidden, "hf://org/nothing"),
        ("GET", "/stages?job={}", None, "train", "none"),
    ]
    before = (await world.ask("controller a", "GET", "/mirror")).json()["items"]
    for method, path, template, theirs, absent in cases:
        answers, costs = [], []
        for name in (theirs, absent):
            filled = template and {key: name if value == "{}" else value for key, value in template.items()}
            await world.ask("controller b", method, path.format(name), json=filled)
            with statements_of(world.mirror) as statements:
                answer = await world.ask("controller b", method, path.format(name), json=filled)
            headers = {key: value for key, value in answer.headers.items() if key != "content-length"}
            answers.append((answer.status_code, headers, answer.text.replace(name, "X")))
            costs.append(statements)
        assert answers[0] == answers[1], (method, path, template)
        assert costs[0] == costs[1], (method, path, template)
        assert answers[0][0] == (200 if path.startswith(("/mirror?", "/events?", "/stages?")) else 404), (
            method,
            path,
            answers[0],
        )
        tally.add(scenarios=2, refused=1)
    assert (await world.ask("controller a", "GET", f"/manifests/{manifest}")).status_code == 200
    after = (await world.ask("controller a", "GET", "/mirror")).json()["items"]
    assert [item["status"] for item in after] == [item["status"] for item in before]
    secrets = (await world.ask("controller a", "GET", "/secrets")).json()["items"]
    assert [item["name"] for item in secrets] == ["of-a"]


async def test_a_pod_finds_the_mirrors_of_its_namespace_and_no_others(world: World, tally: Tally) -> None:
    """Others' mirrors, of its own organisation too, are answered like those that do not exist, at the same cost."""
    body = {"weights": [source("hf://org/a-public", "/m")]}
    made = {pod: (await world.ask(pod, "POST", "/mirror", json=body)).json()["id"] for pod in PODS}
    assert len(set(made.values())) == len(PODS)
    others = [world.mirrors["a", "a-public"]["id"], world.mirrors["b", "b-private"]["id"]]
    nothing = f"mir_{'0' * 24}"
    for pod, own in made.items():
        ended = await world.ask(pod, "GET", f"/mirror/{own}", params={"wait": LONGEST_SECONDS})
        assert (ended.json()["status"], bool(ended.json()["grant"])) == ("READY", True), ended.text
        reads = [("GET", f"/mirror/{{}}{query}") for query in ("", "?wait=5", "?mount=/models/m")]
        for method, path in (*reads, ("POST", "/mirror/{}/cancel")):
            costs, answers = [], []
            for name in (nothing, *others, *(id_ for id_ in made.values() if id_ != own)):
                with statements_of(world.mirror) as statements:
                    answer = await world.ask(pod, method, path.format(name))
                costs.append(statements)
                answers.append((answer.status_code, answer.text.replace(name, "X")))
                tally.add(scenarios=1, refused=1)
            assert answers == [answers[0]] * len(answers)
            assert answers[0][0] == 404
            assert costs == [costs[0]] * len(costs)
        assert (await world.ask(pod, "POST", f"/mirror/{own}/cancel")).json()["status"] == "READY"
        tally.add(scenarios=2)
    seen = {item["id"] for item in (await world.ask("controller a", "GET", "/mirror")).json()["items"]}
    assert seen >= {made["pod of a"], made["pod of another namespace of a"]}
    assert made["pod of b"] not in seen
    acting = await world.mirror.http.post(
        "/mirror", json=body, headers=world.bearers["pod of a"] | {"BDN-Organisation": "b"}
    )
    assert acting.status_code == 401
    tally.add(scenarios=2, refused=1)


async def test_an_agent_of_kubernetes_is_one_of_its_cluster_alone(world: World, tally: Tally) -> None:
    own = await FakeAgent(world.mirror, "n9", CLUSTER).beat_as(world.bearers["agent of Kubernetes"])
    assert own["members"]
    for bearer, cluster in (("agent of Kubernetes", "other"), ("pod of a", CLUSTER), ("pod expired", CLUSTER)):
        state = FakeAgent(world.mirror, "n9", cluster).state
        answer = await world.ask(
            bearer, "POST", "/agents/heartbeat", json={k: v for k, v in state.items() if k != "holdings"}
        )
        assert answer.status_code == 401, (bearer, answer.text)
        tally.add(scenarios=1, refused=1)


@pytest.mark.production
async def test_a_verification_tells_nothing_of_others(upstreams: None, hub: Hub, tmp_path: Path, tally: Tally) -> None:
    """Both organisations have the file x, each in a slab of its own. A manifest is verified as its root, page and slab."""
    async with access_world(tmp_path / "mirror", hub, scrub_seconds=0) as world:

        async def verified(bearer: str, **what: object) -> tuple[set[str], int]:
            body = {"tier": "mirror", "repair": False, **what}
            waiting = {"wait": LONGEST_SECONDS}
            document = (await world.ask(bearer, "POST", "/verifications", json=body, params=waiting)).json()
            assert document["status"] in ("DONE", "DAMAGED"), document
            return {item["chunk"] for item in document["items"]}, document["chunks_read"]

        slabs = {name: world.chunks[f"{name}-private slab"] for name in "ab"}
        with world.mirror.behind.chunk(slabs["a"]) as stored:
            rot(stored, "flipped")
        everything, _ = await verified("operator", all=True)
        assert everything == {str(slabs["a"])}
        for bearer, name, expected in (
            ("controller a", "a", {str(slabs["a"])}),
            ("operator for a", "a", {str(slabs["a"])}),
            ("controller b", "b", set()),
        ):
            for what in ({"manifest": str(world.manifests[f"{name}-private"])}, {"source": f"hf://org/{name}-private"}):
                assert await verified(bearer, **what) == (expected, 3), (bearer, what)
                tally.add(scenarios=1, refused=not expected)


def stage_of(job: str, mirror_id: str | None) -> Json:
    """A stage as an agent reports it."""
    return {
        "id": f"stg_{mirror_id}", "job": job, "mirror_id": mirror_id, "manifests": [], "state": "STAGING", "bytes_done": 0,
        "bytes_total": None, "bytes_per_second": None, "since": 0, "error": None,
    }  # fmt: skip


async def test_stages_of_a_shared_node_are_seen_by_those_who_see_their_mirrors(world: World, tally: Tally) -> None:
    """Jobs of one name: of both organisations and a team, of a mirror that is unknown, and of none."""
    team = "team research of a"
    weights = {"weights": [source("hf://org/a-public", "/team")]}
    of_team = (await world.ask(team, "POST", "/mirror", json=weights)).json()["id"]
    of_a, of_b = (world.mirrors[name, f"{name}-private"]["id"] for name in "ab")
    unsure = [f"mir_{'0' * 24}", None]
    stages = [stage_of("train", mirror) for mirror in (of_a, of_b, of_team, *unsure)]
    await FakeAgent(world.mirror, "n1", stages=stages).beat_as(world.bearers["agent"])
    everything = {of_a, of_b, of_team, *unsure}
    expected: dict[str, set[str | None]] = {
        "controller a": {of_a, of_team},
        "controller b": {of_b},
        team: {of_team},
        "team Default of a": set(),
        "team research of b": set(),
        "operator": everything,
        "operator token": everything,
        "operator for a": everything,
    }
    for bearer in world.bearers:
        answer = await world.ask(bearer, "GET", "/stages", params={"job": "train"})
        if bearer in expected:
            assert {one["mirror_id"] for one in answer.json()["items"]} == expected[bearer], bearer
            owners = {one["organisation"] for one in answer.json()["items"] if one["mirror_id"] in unsure}
            assert owners <= {None}
        else:
            assert answer.status_code in (401, 403), bearer
        tally.add(scenarios=1, refused=bearer not in expected)


async def test_lists_hold_one_s_own_and_the_metrics_name_nobody(world: World, tally: Tally) -> None:
    await world.done("a", {"weights": [source("hf://org/a-public", "/again")]})
    a, b = [(await world.ask(f"controller {name}", "GET", "/mirror")).json()["items"] for name in ("a", "b")]
    assert not {item["id"] for item in a} & {item["id"] for item in b}
    assert (len(a), len(b)) == (5, 2)
    for name, own in (("a", A | {"gone"}), ("b", B)):  # gone was evicted, and its organisation can restore it
        held = (await world.ask(f"controller {name}", "GET", "/manifests")).json()["items"]
        assert {item["manifest"] for item in held} == {str(world.manifests[manifest]) for manifest in own}
        tally.add(scenarios=len(held))
    page = (await world.mirror.http.get("/metrics")).text
    names = [digest.hex for digest in (*world.manifests.values(), *world.chunks.values())]
    names += ["org/", 'organisation="', *world.tokens.values()]
    assert [name for name in names if name in page] == []
    tally.add(scenarios=1)
