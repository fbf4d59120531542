"""Teams and their projects: what a name means to whom, and that a project goes whole, with all its checkpoints."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from bdn.core.errors import StoreUnavailableError
from bdn.mirror.db import mirrors
from bdn.mirror.db import projects as statements
from bdn.mirror.db.tables import CheckpointRow
from tests.support.mirror.job import Job
from tests.support.mirror.service import LONGEST_SECONDS, Json, MirrorUnderTest, mirror_under_test, refusal, source

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.usefixtures("upstreams")
ONE = "bt://llama@job1/checkpoint-1"


@dataclass
class World:
    """An organisation, somebody who acts for all of it, and two teams; ``everybody`` has no team, ``default`` is of Default."""

    mirror: MirrorUnderTest
    everybody: Job
    default: Job
    research: Job
    vision: Job

    async def projects(self, job: Job) -> dict[str, Json]:
        """By id."""
        return {one["id"]: one for one in (await job.ask("GET", "/projects")).json()["items"]}

    async def of(self, job: Job) -> str:
        """The id of the one project that this one sees."""
        (found,) = await self.projects(job)
        return found

    async def count(self) -> int:
        """Of all checkpoints, also those that are not listed."""
        async with self.mirror.service.requests.database.read() as session:
            return (await session.execute(select(func.count()).select_from(CheckpointRow))).scalar_one()


@pytest.fixture
async def world(database_options: dict[str, Any], tmp_path: Path) -> AsyncIterator[World]:
    guarded: Json = {"auth": "token", "token": "operator", "bearer": "operator", **database_options}
    async with mirror_under_test(tmp_path / "mirror", serve=True, **guarded) as mirror, AsyncExitStack() as stack:
        jobs: dict[str, Job] = {}
        for team in (None, "Default", "research", "vision"):
            if team not in (None, "Default"):
                made = await mirror.http.post("/teams", json={"name": team})
                assert made.status_code == 201, made.text
            body = {"name": "n", "organisation": "default", "role": "controller", "team": team}
            token = await mirror.http.post("/tokens", json=body)
            assert (token.status_code, token.json()["team"]) == (201, team), token.text
            jobs[team or "everybody"] = Job(mirror, token.json()["token"])
            await stack.enter_async_context(jobs[team or "everybody"].plane)
        yield World(mirror, jobs["everybody"], jobs["Default"], jobs["research"], jobs["vision"])


async def mirrored(job: Job, uri: str) -> Json:
    """What became of a mirror of this source."""
    begun = (await job.ask("POST", "/mirror", weights=[source(uri)])).json()
    path = f"/mirror/{begun['id']}"
    return dict((await job.mirror.http.get(path, params={"wait": LONGEST_SECONDS}, headers=job.headers)).json())


async def test_every_organisation_has_a_team_named_default_and_those_that_it_made(world: World) -> None:
    first = (await world.everybody.ask("GET", "/teams")).json()["items"]
    assert sorted(one["name"] for one in first) == ["Default", "research", "vision"]
    assert all(len(one["id"]) == 10 for one in first)
    again = await world.everybody.ask("POST", "/teams", name="research")
    assert again.json() in first
    other = {"Authorization": "Bearer operator", "BDN-Organisation": "other"}
    assert [one["name"] for one in (await world.mirror.http.get("/teams", headers=other)).json()["items"]] == [
        "Default"
    ]
    body: Json = {"name": "n", "organisation": "other", "role": "controller", "team": "research"}
    assert refusal(await world.mirror.http.post("/tokens", json=body)) == (404, "NOT_FOUND")
    for wrong in ({"role": "agent", "team": "Default"}, {"role": "operator", "team": "Default"}, {"team.pt": "a/b"}):
        assert refusal(await world.mirror.http.post("/tokens", json=body | wrong)) == (422, "INVALID_REQUEST")


async def test_a_project_s_name_is_its_own_within_its_team(world: World) -> None:
    for job in (world.default, world.research):
        await job.push({"team.pt": job.headers["Authorization"].encode()}, ONE)
    ours, theirs = await world.of(world.default), await world.of(world.research)
    assert ours != theirs
    for job in (world.default, world.research):
        (checkpoint,) = await job.checkpoints(project="llama")
        assert checkpoint["source"] == ONE
        done = await mirrored(job, "bt://llama")
        assert done["sources"][0]["manifest"] == checkpoint["manifest"]
        tree = await world.mirror.tree(checkpoint["manifest"], done["grant"])
        assert tree == {"team.pt": job.headers["Authorization"].encode()}
    assert (await world.projects(world.everybody)).keys() == {ours, theirs}


async def test_a_name_that_several_teams_have_is_the_team_defaults_or_takes_an_id(world: World) -> None:
    """To whoever has no team."""
    await world.research.push({"x": b"research"}, ONE)
    await world.everybody.push({"x": b"more"}, "bt://llama@job1/checkpoint-2")  # of the only one of this name
    assert len(await world.research.checkpoints()) == 2
    await world.vision.push({"x": b"vision"}, ONE)
    for refused in (
        await world.everybody.ask("POST", "/pushes", source="bt://llama@job1/checkpoint-3"),
        await world.mirror.http.get("/checkpoints?project=llama", headers=world.everybody.headers),
        await world.everybody.ask("DELETE", "/projects/llama"),
    ):
        assert refusal(refused) == (422, "INVALID_REQUEST")
        assert "'research', 'vision'" in refused.json()["error"]["message"]
    assert (await mirrored(world.everybody, ONE))["error"]["code"] == "INVALID_REQUEST"
    listed = await world.everybody.checkpoints()
    named = {f"bt://{one['project_id']}@job1/{one['checkpoint_id']}": one["manifest"] for one in listed}
    assert {one["source"]: one["manifest"] for one in listed} == named
    for uri, manifest in named.items():
        assert (await mirrored(world.everybody, uri))["sources"][0]["manifest"] == manifest

    await world.default.push({"x": b"default"}, ONE)
    (own,) = await world.everybody.checkpoints(project="llama")
    assert (own["source"], own["team"]) == (ONE, "Default")
    assert (await mirrored(world.everybody, ONE))["sources"][0]["manifest"] == own["manifest"]


async def test_nobody_hides_a_project_behind_its_id(world: World) -> None:
    await world.research.push({"x": b"research"}, ONE)
    known = await world.of(world.research)
    await world.default.push({"x": b"default"}, f"bt://{known}@job1/checkpoint-1")
    (seen,) = await world.everybody.checkpoints(project=known)
    assert (seen["project_id"], seen["team"]) == (known, "research")


async def test_what_a_token_without_a_team_makes_is_the_team_defaults_and_what_it_mirrors_no_team_s(
    world: World,
) -> None:
    done = await world.everybody.push({"x": b"1"}, ONE)
    assert (await world.default.checkpoints())[0]["source"] == ONE
    assert (await world.default.ask("GET", f"/mirror/{done['id']}")).status_code == 200
    copied = await mirrored(world.everybody, ONE)
    for job in (world.default, world.research):
        assert refusal(await job.ask("GET", f"/mirror/{copied['id']}")) == (404, "NOT_FOUND")


async def test_two_teams_may_push_one_tree_and_the_store_holds_it_once(world: World) -> None:
    tree = {"x": b"the same"}
    sent = [await world.research.push(tree, ONE)]
    stored = world.mirror.chunks()
    sent.append(await world.vision.push(tree, ONE))
    assert [one["bytes_transferred"] for one in sent] == [8, 8]
    assert len({one["sources"][0]["manifest"] for one in sent}) == 1
    assert world.mirror.chunks() == stored
    await world.research.ask("DELETE", "/projects/llama")
    assert await world.mirror.tree(sent[1]["sources"][0]["manifest"], sent[1]["grant"]) == tree
    manifest = sent[1]["sources"][0]["manifest"]
    assert refusal(await world.research.ask("GET", f"/manifests/{manifest}")) == (404, "NOT_FOUND")


async def test_what_one_team_mirrored_later_leaves_the_other_what_it_reads(world: World) -> None:
    tree = {"x": b"the same"}
    first = await world.research.push(tree, ONE)
    await world.vision.push(tree, ONE)
    async with world.mirror.service.requests.database.write() as session:
        while await mirrors.prune(session, 1e12):
            pass
    manifest = first["sources"][0]["manifest"]
    assert (await world.research.ask("GET", f"/manifests/{manifest}")).status_code == 200


# --- deletion ---


async def test_a_deleted_project_goes_with_its_checkpoints_and_what_was_mirrored_from_them_stays(world: World) -> None:
    await world.research.push({"x": b"kept"}, ONE)
    await world.research.push({"x": b"evicted"}, "bt://llama@job1/checkpoint-2")
    await world.research.push({"x": b"other"}, "bt://other@job1/checkpoint-1")
    deployed = await mirrored(world.research, ONE)
    evicted = {"source": "bt://llama@job1/checkpoint-2", "tier": "mirror", "purge": True}
    await world.mirror.http.post("/evictions", params={"wait": LONGEST_SECONDS}, json=evicted)
    (llama,) = [one for one in (await world.projects(world.research)).values() if one["name"] == "llama"]
    assert (llama["checkpoints"], llama["size_bytes"], llama["team"]) == (1, 4, "research")
    assert (await world.research.ask("DELETE", "/projects/llama")).json() == llama
    assert refusal(await world.research.ask("DELETE", f"/projects/{llama['id']}")) == (404, "NOT_FOUND")
    assert [one["source"] for one in await world.research.checkpoints()] == ["bt://other@job1/checkpoint-1"]
    assert await world.count() == 1
    assert (await mirrored(world.research, "bt://llama"))["error"]["code"] == "SOURCE_NOT_FOUND"
    await world.mirror.http.post("/collections", params={"wait": LONGEST_SECONDS}, json={"grace_seconds": 0})
    assert await world.mirror.tree(deployed["sources"][0]["manifest"], deployed["grant"]) == {"x": b"kept"}
    await world.research.push({"x": b"anew"}, ONE)
    assert llama["id"] not in await world.projects(world.research)


async def test_a_project_is_not_deleted_while_a_push_of_it_goes_on(world: World) -> None:
    await world.research.push({"x": b"1"}, ONE)
    project = await world.of(world.research)
    for uri in ("bt://llama@job1/checkpoint-2", f"bt://{project}@job1/checkpoint-2"):
        push = await world.research.begin(uri)
        await world.vision.push({"x": b"1"}, ONE)
        answer = await world.research.ask("DELETE", "/projects/llama")
        assert refusal(answer) == (409, "IN_USE")
        assert answer.json()["error"]["details"]["holders"] == [f"push {push}"]
        assert (await world.vision.ask("DELETE", "/projects/llama")).status_code == 200  # its own
        assert len(await world.research.checkpoints()) == 1
        await world.research.ask("DELETE", f"/pushes/{push}")
    assert (await world.research.ask("DELETE", "/projects/llama")).status_code == 200


async def test_a_deletion_of_a_project_that_was_cut_off_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bdn.mirror.jobs.projects._REMOVED_AT_ONCE", 2)
    for number in range(5):
        await world.research.push({"x": b"%d" % number}, f"bt://llama@job1/checkpoint-{number}")
    looks, look = iter(range(2)), statements.checkpoints_of

    async def cut_off(*what: Any) -> Any:
        if next(looks, None) is None:
            raise StoreUnavailableError("killed")
        return await look(*what)

    with monkeypatch.context() as patched:
        patched.setattr(statements, "checkpoints_of", cut_off)
        assert refusal(await world.research.ask("DELETE", "/projects/llama")) == (503, "STORE_UNAVAILABLE")
    assert len(await world.research.checkpoints()) == 1  # each step was durable
    assert (await world.research.ask("DELETE", "/projects/llama")).json()["checkpoints"] == 1
    assert await world.projects(world.research) == {}
    assert await world.count() == 0
