"""Organisation x manifest x chunk x verb x what is shown, against tables that were written by hand: who may read what.

Not yours and not there are one answer: status, headers and body to the byte, but for the digest that was asked for, and the same
number of database statements.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx2
import pytest

from bdn.core.digest import Digest, digest_of
from tests.doubles.hub import Hub
from tests.support.mirror.access_world import UNKNOWN, World, access_world, tampered
from tests.support.promises.tally import Scale, Tally

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.promise("access")

STATUS: Final = {"NOT_FOUND": 404, "UNAUTHENTICATED": 401, "GRANT_INVALID": 403, "GRANT_EXPIRED": 403}
A, B = {"shared", "a-public", "a-private"}, {"shared", "b-private"}

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
}
# Of tokens the operator's alone reads chunks; it reads whatever the store holds.
NO_CHUNKS: Final = {"controller a", "controller b", "controller b for a"}
ALL_CHUNKS: Final = {"operator", "operator token", "operator for a"}
IN_THE_STORE: Final = {"big 0", "big 1", "x"} | {
    f"{name} {part}"
    for name, parts in {
        "shared": ("s1", "s2", "slab"),
        "a-public": ("p1", "p2", "slab"),
        "a-private": ("y", "slab"),
        "b-private": ("y", "slab"),
    }.items()
    for part in parts
}
# Which manifests open a chunk. The slab of a's private files holds x, which b has as well: it is not b's for that.
OPENED_BY: Final[dict[str, set[str]]] = {
    "big 0": {"shared", "a-public"},
    "big 1": {"shared", "a-public"},
    "shared s1": {"shared"},
    "shared s2": {"shared"},
    "shared slab": {"shared"},
    "a-public p1": {"a-public"},
    "a-public p2": {"a-public"},
    "a-public slab": {"a-public"},
    "x": {"a-private", "b-private"},
    "a-private y": {"a-private"},
    "a-private slab": {"a-private"},
    "b-private y": {"b-private"},
    "b-private slab": {"b-private"},
    "gone g1": set(),
    "gone g2": set(),
    "gone slab": set(),
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
        return "OK" if chunk in IN_THE_STORE or chunk.startswith("gone") else "NOT_FOUND"
    return "OK" if OPENED_BY[chunk] & reads else "NOT_FOUND"


VERBS: Final[list[tuple[str, dict[str, str]]]] = [("GET", {}), ("HEAD", {}), ("GET", {"Range": "bytes=1-3"})]
NO_DIGESTS: Final = (
    "b3:", "b3:zz", "b3:" + "0" * 63, "b3:" + "0" * 65, "B3:" + "0" * 64, "sha256:" + "0" * 64, "..%2f..%2fmirror.sqlite",
)  # fmt: skip

# --- the matrix -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def world(upstreams: None, hub: Hub, tmp_path: Path) -> AsyncIterator[World]:
    async with access_world(tmp_path / "mirror", hub) as world:
        assert world.chunks.keys() == OPENED_BY.keys()
        assert len(set(world.chunks.values())) == len(world.chunks)
        assert world.bearers.keys() == READS.keys()
        yield world


def shape(answer: httpx2.Response, asked: Digest) -> tuple[object, ...]:
    """The whole answer, but for the name that was asked for."""
    headers = {name: value for name, value in answer.headers.items() if name != "date"}
    return answer.status_code, headers, answer.content.replace(asked.hex.encode(), b"X" * 64)


def check(answer: httpx2.Response, expected: str, asked: Digest, chunk: str = "") -> None:
    where = f"{answer.request.method} {answer.request.url} as expected {expected}: {answer.status_code}"
    if expected != "OK":
        assert answer.status_code == STATUS[expected], where
        if answer.request.method != "HEAD":
            assert answer.json()["error"]["code"] == expected, where
        return
    assert answer.status_code in (200, 206), where
    if answer.status_code == 200 and answer.request.method == "GET" and not answer.request.url.path.endswith("/layout"):
        assert digest_of(answer.content) == asked, f"{where} {chunk}"


async def test_who_may_read_which_manifest(world: World, tally: Tally) -> None:
    for bearer in READS:
        for tail in ("", "/layout"):
            nothing = shape(await world.ask(bearer, "GET", f"/manifests/{UNKNOWN}{tail}"), UNKNOWN)
            for name, digest in world.manifests.items():
                expected = may_read(bearer, name)
                answer = await world.ask(bearer, "GET", f"/manifests/{digest}{tail}")
                check(answer, expected, digest)
                assert expected == "OK" or shape(answer, digest) == nothing, (bearer, name)
                tally.add(scenarios=1, refused=expected != "OK")

    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{world.data_port}", trust_env=False) as plane:
        for bearer in ("none", "controller a", "operator", "grant a shared", "grant alg none"):
            for path in NO_DIGESTS:
                answers = {
                    (await world.ask(bearer, "GET", f"/{kind}/{path}")).status_code for kind in ("manifests", "chunks")
                }
                assert answers <= {404, 422}, path
                assert (await plane.get(f"/chunks/{path}", headers=world.bearers[bearer])).status_code == 404, path
                tally.add(scenarios=3, refused=3)


async def test_who_may_read_which_chunk_on_the_api_and_on_the_data_plane(
    world: World, scale: Scale, tally: Tally
) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{world.data_port}", trust_env=False) as plane:
        for position, bearer in enumerate(READS):
            for verb, ranged in VERBS[: 3 if position % scale.of(9, 1) == 0 else 1]:
                for on_plane in (False, True):
                    nothing: tuple[object, ...] = ()
                    for name in sorted(world.chunks, key=lambda one: one != "unknown"):
                        digest, expected = world.chunks[name], may_fetch(bearer, name)
                        path = f"/chunks/{digest}"
                        if on_plane:
                            answer = await plane.request(verb, path, headers=world.bearers[bearer] | ranged)
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


async def test_no_other_verb_tells_what_exists_or_does_anything(world: World, scale: Scale, tally: Tally) -> None:
    bearers = list(READS)[:: scale.of(6, 1)]
    before = world.mirror.rows("mirrors", "manifests", "contents", "operations"), world.mirror.chunks()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{world.data_port}", trust_env=False) as plane:
        for bearer in bearers:
            for verb in ("POST", "PUT", "DELETE", "PATCH"):
                answers = {
                    shape(await world.ask(bearer, verb, f"/{kind}/{digest}{tail}"), digest)[::2]
                    for kind, tail, names in (
                        ("manifests", "", world.manifests),
                        ("manifests", "/layout", world.manifests),
                        ("chunks", "", world.chunks),
                    )
                    for digest in names.values()
                }
                assert {status for status, _ in answers} == {405}
                assert len(answers) == 3  # one for each kind of path
                refused = {
                    shape(await plane.request(verb, f"/chunks/{digest}", headers=world.bearers[bearer]), digest)[::2]
                    for digest in world.chunks.values()
                }
                assert [status for status, _ in refused] == [501]
                tally.add(scenarios=2 * len(world.chunks) + 2 * len(world.manifests))
    assert (world.mirror.rows("mirrors", "manifests", "contents", "operations"), world.mirror.chunks()) == before


async def test_a_grant_with_one_sign_changed_is_worth_nothing(world: World, scale: Scale, tally: Tally) -> None:
    good = world.bearers["grant a a-private"]["Authorization"].removeprefix("Bearer ")
    path = f"/chunks/{world.chunks['a-private y']}"
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{world.data_port}", trust_env=False) as plane:
        assert (await plane.get(path, headers={"Authorization": f"Bearer {good}"})).status_code == 200
        for number, token in enumerate(tampered(good, scale.of(7, 1))):
            headers = {"Authorization": f"Bearer {token}"}
            answer = await (
                plane.get(path, headers=headers) if number % 2 else world.mirror.http.get(path, headers=headers)
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "GRANT_INVALID"), token
            tally.add(scenarios=1, refused=1)


async def test_what_is_not_yours_costs_what_costs_nothing(
    world: World, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bdn.mirror.access.access._STANDING_SECONDS", 3600.0
    )  # what is kept for a second is kept for this test
    for bearer, reads in READS.items():
        if isinstance(reads, str) or bearer in ALL_CHUNKS | NO_CHUNKS:
            continue
        for kind, names, may in (("manifests", world.manifests, may_read), ("chunks", world.chunks, may_fetch)):
            costs: dict[str, list[str]] = {}
            others = [name for name in names if may(bearer, name) == "NOT_FOUND" and bearer != f"grant a {name}"]
            for name in others:
                await world.ask(bearer, "GET", f"/{kind}/{names[name]}")  # what is kept, is kept now
                with world.statements() as costs[name]:
                    await world.ask(bearer, "GET", f"/{kind}/{names[name]}")
                assert costs[name] == costs.get("unknown", []), (bearer, kind, name)
                tally.add(scenarios=1)
            assert "unknown" in costs
