"""What a team of an organisation has is another team's as little as another organisation's."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select

from bdn.core.chunk import Digest, digest_of
from bdn.mirror.db.tables import MirrorSourceRow
from bdn.wire.grants import Grant, GrantedMount
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket
from tests.support.mirror.access_world import UNKNOWN, World, access_world, shape
from tests.support.mirror.service import LONGEST_SECONDS, Json, source, statements_of, with_secret
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [pytest.mark.promise("access"), pytest.mark.usefixtures("backend")]


@pytest.fixture
async def world(upstreams: None, hub: Hub, tmp_path: Path) -> AsyncIterator[World]:
    async with access_world(tmp_path / "mirror", hub) as world:
        yield world


async def pushed(world: World, bearer: str, uri: str, content: bytes) -> Json:
    """The mirror that a push of one file became."""
    begun = (await world.ask(bearer, "POST", "/pushes", json={"source": uri})).json()["push_id"]
    name = str(digest_of(content))
    sent = await world.plane.put(f"/pushes/{begun}/chunks/{name}", content=content, headers=world.bearers[bearer])
    assert sent.status_code == 204, sent.text
    files = {
        "files": [{"path": "x", "size": len(content), "digest": name, "slab": name, "offset": 0}],
        "details": {"checkpoint_type": "full"},
    }
    done = await world.ask(bearer, "POST", f"/pushes/{begun}/commit", json=files)
    assert done.status_code == 200, done.text
    return dict(done.json())


async def test_a_grant_opens_the_chunks_of_its_manifests_and_not_one_byte_of_another_team(
    world: World, bucket: S3Bucket, tally: Tally
) -> None:
    """Both teams have the same small files and one large file alike, among files of their own."""
    alike = {f"shared/{number}": b"a licence that both have %d" % number for number in range(20)}
    alike["large"] = b"in both" * 200_000
    groups = {"alpha": "research", "beta": "Default"}
    teams = {name: f"team {group} of a" for name, group in groups.items()}
    manifests: dict[str, str] = {}
    opened: dict[str, set[Digest]] = {}
    for team, bearer in teams.items():
        own = {"own": f"of {team}".encode(), "own large": team.encode() * 300_000}
        bucket.put({f"{team}/{path}": content for path, content in (alike | own).items()})
        wanted = {"weights": [source(f"s3://{bucket.name}/{team}", **with_secret("s3-keys"))]}
        begun = (await world.ask(bearer, "POST", "/mirror", json=wanted)).json()
        ready = (await world.ask(bearer, "GET", f"/mirror/{begun['id']}", params={"wait": LONGEST_SECONDS})).json()
        assert ready["status"] == "READY", ready
        manifest = manifests[team] = ready["sources"][0]["manifest"]
        world.bearers[f"grant {team}"] = {"Authorization": f"Bearer {ready['grant']}"}
        pages = {page.digest for page in await world.mirror.pages(manifest, ready["grant"])}
        files = await world.mirror.files(manifest, ready["grant"])
        assert await world.mirror.tree(manifest, ready["grant"]) == alike | own
        opened[team] = {Digest.parse(manifest), *pages}
        opened[team] |= {chunk for file in files.values() for chunk in file.layout.fetched}
    assert opened["alpha"] & opened["beta"] == {digest_of(alike["large"])}
    async with world.mirror.service.requests.database.read() as session:  # of upstreams, which no agent gets
        listings = (await session.execute(select(MirrorSourceRow.listing))).scalars()
        closed = [digest_of(alike["shared/0"]), *(Digest(name) for name in listings if name)]
    for team, other in (("alpha", "beta"), ("beta", "alpha")):
        bearer, nothing = f"grant {team}", await _answers(world, f"grant {team}", UNKNOWN, manifests[team])
        assert await _answers(world, f"grant {team}", UNKNOWN, manifests[other]) == nothing
        for chunk in opened[team]:
            assert {status for status, *_ in await _answers(world, bearer, chunk, manifests[team])} == {200, 206}
        for chunk in (*(opened[other] - opened[team]), *closed):
            for manifest in (manifests[team], manifests[other]):
                assert await _answers(world, bearer, chunk, manifest) == nothing, (team, chunk)
        for reader in (bearer, teams[team]):
            assert (await world.ask(reader, "GET", f"/manifests/{manifests[other]}")).status_code == 404
        addresses = {"paths": ["shared/0"]}
        asked = await world.ask(teams[team], "POST", f"/manifests/{manifests[other]}/addresses", json=addresses)
        assert asked.status_code == 404
        strange = Grant("a", (GrantedMount("/m", Digest.parse(manifests[other]), "x"),), 4e9, groups[team])
        signed = world.mirror.service.requests.signer.sign(strange)  # as the mirror never signs one
        world.bearers["strange"] = {"Authorization": f"Bearer {signed}"}
        unknown = await _answers(world, "strange", UNKNOWN, manifests[other])
        for chunk in opened[other]:
            assert await _answers(world, "strange", chunk, manifests[other]) == unknown
        tally.add(scenarios=5 * len(opened[other]), refused=5 * len(opened[other] - opened[team]))


async def _answers(world: World, bearer: str, chunk: Digest, manifest: str) -> list[tuple[object, ...]]:
    """The answers of API, data plane and locations to a request for a chunk, but for its name; those with bytes are checked."""
    path, headers = f"/chunks/{chunk}", world.bearers[bearer]
    body = {"manifest": manifest, "digests": [str(chunk)]}
    answers = [
        await world.ask(bearer, "GET", path),
        await world.ask(bearer, "GET", path, headers={"Range": "bytes=0-0"}),
        await world.ask(bearer, "HEAD", path),
        await world.plane.get(path, headers=headers),
        await world.plane.get(path, headers=headers | {"BDN-Suspect": "1"}),
        await world.plane.get(path, headers=headers | {"BDN-Manifest": manifest}),
        await world.ask(bearer, "POST", "/chunks/locations", json=body),
    ]
    for answer in answers:
        if answer.request.method == "GET" and answer.status_code == 200:
            assert digest_of(answer.content) == chunk
    return [shape(answer, chunk) for answer in answers]


async def test_what_another_team_has_is_answered_like_nothing(world: World, tally: Tally) -> None:
    """Nor do grants to push lead into another team's project, or names in a request to mirror."""
    ours, job = "team research of a", "bt://llama@job1"
    done = await pushed(world, ours, f"{job}/checkpoint-1", b"of research")
    begun = (await world.ask(ours, "POST", "/pushes", json={"source": f"{job}/checkpoint-2"})).json()["push_id"]
    mirror = (await world.ask(ours, "POST", "/mirror", json={"weights": [source(job)]})).json()["id"]
    ready = (await world.ask(ours, "GET", f"/mirror/{mirror}", params={"wait": LONGEST_SECONDS})).json()
    manifest = done["sources"][0]["manifest"]
    assert (ready["status"], ready["sources"][0]["manifest"]) == ("READY", manifest)
    (checkpoint,) = (await world.ask(ours, "GET", "/checkpoints")).json()["items"]
    (project,) = (await world.ask(ours, "GET", "/projects")).json()["items"]
    assert (project["name"], project["team"], project["checkpoints"], project["size_bytes"]) == (
        "llama",
        "research",
        1,
        11,
    )
    assert (await world.ask(ours, "GET", f"/manifests/{manifest}")).status_code == 200
    address = {"paths": ["x"]}
    assert (await world.ask(ours, "POST", f"/manifests/{manifest}/addresses", json=address)).status_code == 200
    nobody, nothing = f"mir_{'0' * 24}", str(UNKNOWN)
    cases: list[tuple[str, str, Json | None, str, str]] = [
        *(("GET", path, None, one, nobody) for one in (mirror, begun) for path in ("/mirror/{}", "/mirror/{}?wait=1", "/mirror/{}/events")),
        ("POST", "/mirror/{}/cancel", None, mirror, nobody),
        ("GET", "/mirror?source={}", None, job, "bt://nothing@job1"),
        ("POST", "/pushes/{}/missing", {"chunks": []}, begun, nobody),
        ("POST", "/pushes/{}/commit", {"files": [{"path": "x", "size": 0, "chunks": []}]}, begun, nobody),
        ("DELETE", "/pushes/{}", None, begun, nobody),
        ("DELETE", "/checkpoints/{}", None, checkpoint["id"], f"chk_{'0' * 24}"),
        ("GET", "/checkpoints?project={}", None, "llama", "nothing"),
        ("GET", "/checkpoints?project={}", None, project["id"], "nothing"),
        ("DELETE", "/projects/{}", None, "llama", "nothing"),
        ("DELETE", "/projects/{}", None, project["id"], "nothing"),
        ("GET", "/manifests/{}", None, manifest, nothing),
        ("POST", "/manifests/{}/addresses", address, manifest, nothing),
    ]  # fmt: skip
    for bearer in ("team Default of a", "team research of b"):
        for method, path, body, theirs, absent in cases:
            answers, costs = [], []
            for name in (theirs, absent):
                with statements_of(world.mirror) as statements:
                    answer = await world.ask(bearer, method, path.format(name), json=body)
                headers = {key: value for key, value in answer.headers.items() if key != "content-length"}
                answers.append((answer.status_code, headers, answer.text.replace(name, "X")))
                costs.append(statements)
            assert answers[0] == answers[1], (bearer, method, path)
            assert costs[0] == costs[1], (bearer, method, path)
            assert answers[0][0] == (200 if "?source" in path or "?project" in path else 404), (
                method,
                path,
                answers[0],
            )
            tally.add(scenarios=2, refused=1)
        chunk = f"/pushes/{begun}/chunks/{digest_of(b'x')}"
        assert (await world.plane.put(chunk, content=b"x", headers=world.bearers[bearer])).status_code == 404
        assert (await world.plane.head(chunk, headers=world.bearers[bearer])).status_code == 404
        for name in (job, f"bt://{project['id']}@job1", f"{job}/checkpoint-1", "bt://nothing"):
            body = {"weights": [source(name)]}
            asked = (await world.ask(bearer, "POST", "/mirror", json=body)).json()["id"]
            ended = (await world.ask(bearer, "GET", f"/mirror/{asked}", params={"wait": LONGEST_SECONDS})).json()
            assert (ended["status"], ended["grant"]) == ("FAILED", None), name
            assert ended["error"]["code"] == "SOURCE_NOT_FOUND", name
            planned = await world.ask(bearer, "POST", "/mirror?dry_run=true", json=body)
            assert (planned.status_code, planned.json()["error"]["code"]) == (502, "SOURCE_NOT_FOUND")
        grant = (await world.ask(bearer, "POST", "/pushes/grants", json={"job": job})).json()["grant"]
        world.bearers["grant of others"] = {"Authorization": f"Bearer {grant}"}
        assert (
            await world.ask("grant of others", "POST", f"/pushes/{begun}/missing", json={"chunks": []})
        ).status_code == 404
        own = await pushed(world, "grant of others", f"{job}/checkpoint-1", b"of others")  # of a project of their own
        assert own["sources"][0]["manifest"] != manifest
        assert [one["manifest"] for one in (await world.ask(bearer, "GET", "/checkpoints")).json()["items"]] == [
            own["sources"][0]["manifest"]
        ]
        listed = (await world.ask(bearer, "GET", "/mirror")).json()["items"]
        assert not {mirror, begun, done["id"]} & {one["id"] for one in listed}
        (named,) = (await world.ask(bearer, "GET", "/projects")).json()["items"]
        assert named["id"] != project["id"]
        tally.add(scenarios=8, refused=7)
    assert [one["name"] for one in (await world.ask(ours, "GET", "/teams")).json()["items"]] == ["research"]
    assert (await world.ask(ours, "GET", f"/mirror/{begun}")).json()["status"] == "SYNCING"
    assert [one["id"] for one in (await world.ask(ours, "GET", "/checkpoints")).json()["items"]] == [checkpoint["id"]]
    seen = (await world.ask("controller a", "GET", "/projects")).json()["items"]  # without a team, all of them
    assert {one["team"] for one in seen} == {"research", "Default"}


async def test_a_training_cache_is_its_teams(world: World, tally: Tally) -> None:
    body = {"project": "llama", "cluster": "c", "volume_id": "0" * 32}
    made = (await world.ask("team research of a", "POST", "/caches", json=body)).json()
    assert (await world.ask("controller a", "GET", f"/caches/{made['project_id']}/summary")).status_code == 200
    for bearer in ("team Default of a", "team research of b"):
        for name in (made["project_id"], "llama"):
            answer = await world.ask(bearer, "GET", f"/caches/{name}/summary")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND"), (bearer, name)
        own = (await world.ask(bearer, "POST", "/caches", json=body)).json()
        assert {own["project_id"], own["team_id"]} & {made["project_id"], made["team_id"]} == set()
        assert (await world.ask(bearer, "DELETE", f"/projects/{own['project_id']}")).status_code == 200
        left = (await world.ask(bearer, "GET", "/caches")).json()
        assert left["items"] == []
        assert [one["project_id"] for one in left["removals"]] == [own["project_id"]]
        tally.add(scenarios=4, refused=2)
    known = (await world.ask("team research of a", "GET", "/caches")).json()
    assert [one["project_id"] for one in known["items"]] == [made["project_id"]]
    assert known["removals"] == []
