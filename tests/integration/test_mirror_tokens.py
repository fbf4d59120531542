"""Tokens: made, shown once, looked up at each call, revoked; what each role may; whom an operator acts for."""

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.doubles.hub import Hub
from tests.fakes.clock import Clock
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.promise("access")

OPERATOR = "the-operator-of-the-settings"
GUARDED: Json = {"bearer": OPERATOR, "auth": "token", "token": OPERATOR}
ONE_KIND = pytest.mark.parametrize("database_options", ["sqlite"], indirect=True)  # no statement about tokens


@pytest.fixture
def time() -> Clock:
    return Clock(1_800_000_000.0)


@pytest.fixture
async def guarded(
    database_options: dict[str, Any], upstreams: None, tmp_path: Path, time: Clock
) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", **GUARDED, clock=time, **database_options) as mirror:
        yield mirror


async def made(mirror: MirrorUnderTest, role: str, organisation: str = "acme", **more: object) -> Json:
    body = {"name": f"{role} of {organisation}", "organisation": organisation, "role": role, **more}
    answer = await mirror.http.post("/tokens", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def ask(mirror: MirrorUnderTest, token: str, method: str, path: str, body: Json | None = None) -> httpx2.Response:
    return await mirror.http.request(method, path, json=body, headers={"Authorization": f"Bearer {token}"})


async def test_a_token_is_shown_once_and_kept_as_its_digest(guarded: MirrorUnderTest, tmp_path: Path) -> None:
    made_one = await made(guarded, "controller")
    token = made_one.pop("token")
    assert token.startswith("bdn_")
    assert len(token) == 47
    assert (await guarded.http.get("/tokens")).json()["items"] == [made_one]
    assert (await ask(guarded, token, "GET", "/mirror")).json()["items"] == []
    if (tmp_path / "mirror/mirror.sqlite").exists():
        content = b"".join(path.read_bytes() for path in (tmp_path / "mirror").glob("mirror.sqlite*"))
        assert token.encode() not in content
        assert sha256(token.encode()).hexdigest().encode() in content


async def test_what_is_revoked_or_expired_is_refused_like_what_never_was(guarded: MirrorUnderTest, time: Clock) -> None:
    """With PostgreSQL time is that of its own clock, which nobody here can move: there a second has to pass."""
    short, long = await made(guarded, "controller", expires_seconds=3600), await made(guarded, "controller")
    brief = await made(guarded, "controller", expires_seconds=1)
    nobody = "bdn_" + "x" * 43
    refused = (await ask(guarded, nobody, "GET", "/mirror")).content
    for token in (short, long):
        assert (await ask(guarded, token["token"], "GET", "/mirror")).status_code == 200
    time.now += 1
    async with asyncio.timeout(120):
        while (await ask(guarded, brief["token"], "GET", "/mirror")).content != refused:  # noqa: ASYNC110 - time tells nobody
            await asyncio.sleep(0.05)
    assert (await ask(guarded, short["token"], "GET", "/mirror")).status_code == 200
    revoked = (await guarded.http.delete(f"/tokens/{long['id']}")).json()
    assert (await ask(guarded, long["token"], "GET", "/mirror")).content == refused
    assert (await guarded.http.delete(f"/tokens/{long['id']}")).json() == revoked  # once is enough
    assert (await guarded.http.delete(f"/tokens/tok_{'0' * 24}")).status_code == 404


@ONE_KIND
async def test_an_operator_s_token_makes_others(guarded: MirrorUnderTest) -> None:
    operator = await made(guarded, "operator", "default")
    body = {"name": "n", "organisation": "acme", "role": "operator"}
    assert (await ask(guarded, operator["token"], "POST", "/tokens", body)).status_code == 201


@ONE_KIND
async def test_a_request_that_makes_no_sense_makes_no_token(guarded: MirrorUnderTest) -> None:
    right = {"name": "n", "organisation": "a", "role": "agent"}
    assert (await guarded.http.post("/tokens", json=right)).status_code == 201
    for wrong in (
        {"name": ""},
        {"organisation": "a:b"},
        {"role": "king"},
        {"role": "controller", "cluster": "gpu"},
        {"expires_seconds": 0},
        {"name": "n\nm"},
        {"name": "\ud800"},
        {"more": 1},
    ):
        body = json.dumps(right | wrong)
        answer = await guarded.http.post("/tokens", content=body, headers={"Content-Type": "application/json"})
        assert answer.json()["error"]["code"] == "INVALID_REQUEST", wrong
    assert len((await guarded.http.get("/tokens")).json()["items"]) == 1
    assert (await guarded.http.get("/mirror", headers={"BDN-Organisation": "a*"})).status_code == 422


@ONE_KIND
async def test_an_agent_s_token_beats_for_its_cluster_alone(guarded: MirrorUnderTest) -> None:
    token = (await made(guarded, "agent", "default", cluster="c"))["token"]
    agent = FakeAgent(guarded, "n1")
    await agent.beat_as({"Authorization": f"Bearer {token}"})
    for cluster, status in (("c", 200), ("other", 401)):
        beat = agent.state | {"cluster": cluster}
        assert (await ask(guarded, token, "POST", "/agents/heartbeat", beat)).status_code == status


@ONE_KIND
async def test_what_a_controller_evicts_is_its_organisations_alone(guarded: MirrorUnderTest, hub: Hub) -> None:
    hub.repo("org/one").commit({"a.txt": b"1"})
    await guarded.ready(source("hf://org/one"))
    agent = FakeAgent(guarded, "n1")
    await agent.beat()
    token = (await made(guarded, "controller", "default"))["token"]
    for body in ({"all": True}, {"all": True, "tier": "node"}, {"all": True, "tier": "mirror", "force": True}):
        assert (await ask(guarded, token, "POST", "/evictions", body)).status_code == 401, body
    assert (await agent.beat())["pending"] == []
    done = await ask(guarded, token, "POST", "/evictions?wait=20", {"all": True, "tier": "mirror"})
    assert (done.json()["status"], len(done.json()["items"])) == ("DONE", 1)


@ONE_KIND
async def test_jobs_that_hold_the_same_content_are_shown_to_operators_alone(guarded: MirrorUnderTest, hub: Hub) -> None:
    hub.repo("org/one").commit({"a.txt": b"1"})
    manifest = (await guarded.ready(source("hf://org/one")))["sources"][0]["manifest"]
    holding = {"manifest": manifest, "bytes": 1, "held_by": ["secret-job-of-a-rival"]}
    await FakeAgent(guarded, "n1", holdings=[holding]).beat()
    token = (await made(guarded, "controller", "default"))["token"]
    assert "secret-job" in (await guarded.http.get("/manifests")).text
    shown = await ask(guarded, token, "GET", "/manifests")
    assert (shown.status_code, "secret-job" in shown.text) == (200, False)
    assert shown.json()["items"][0]["nodes"]["c/n1"]["bytes"] == 1
    plan = {"all": True, "tier": "mirror", "dry_run": True}
    assert "secret-job" in (await guarded.http.post("/evictions", json=plan)).text
    planned = await ask(guarded, token, "POST", "/evictions", plan)
    assert (planned.status_code, "secret-job" in planned.text) == (202, False)


async def test_a_revoked_token_ends_at_every_replica(postgres_url: str, upstreams: None, tmp_path: Path) -> None:
    settings: Json = {**GUARDED, "database_url": postgres_url, "work": False}
    async with (
        mirror_under_test(tmp_path / "x", **settings) as one,
        mirror_under_test(tmp_path / "y", **settings) as two,
    ):
        token = await made(one, "controller")
        assert (await ask(two, token["token"], "GET", "/mirror")).status_code == 200
        await one.http.delete(f"/tokens/{token['id']}")
        assert (await ask(two, token["token"], "GET", "/mirror")).status_code == 401
