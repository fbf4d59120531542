"""Training caches as the mirror grants, pins, measures and forgets them."""

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bdn.core.errors import GrantInvalidError
from bdn.mirror.db import agents, projects
from bdn.wire.cache_schema import FileSummary, pack
from bdn.wire.grants import CacheGrant, FileGrant, GrantVerifier, PushGrant
from bdn.wire.shapes import moment
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal

pytest_plugins = ("tests.support.mirror.fixtures",)
VOLUME, OTHER = "0" * 32, "1" * 32
EAST: Json = {"project": "llama", "cluster": "east", "volume_id": VOLUME}
WEST: Json = {"project": "llama", "cluster": "west", "volume_id": OTHER}
ENTRY: Json = {
    "path": "user_artifacts/x", "size_bytes": 5, "modified": "2026-11-25T10:00:00.5Z", "file_type": "file", "permissions": "-rw-r--r--",
}  # fmt: skip


@pytest.fixture
async def mirror(database_options: dict[str, Any], tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", scrub_seconds=0, cache_bytes=1000, **database_options) as mirror:
        yield mirror


async def granted(mirror: MirrorUnderTest, asked: Json = EAST, **more: Any) -> Json:
    answer = await mirror.http.post("/caches", json=asked | more)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def refused(mirror: MirrorUnderTest, asked: Json, **more: Any) -> str:
    answer = await mirror.http.post("/caches", json=asked | more)
    assert answer.status_code in (409, 507), answer.text
    return refusal(answer)[1]


async def measured(
    mirror: MirrorUnderTest, project: str, size: int, at: str = "2026-11-25T10:00:00Z", **more: Any
) -> int:
    body = {"volume_id": VOLUME, "timestamp": at, "size_bytes": size, "files": 1}
    body["packed"] = pack([FileSummary.model_validate(ENTRY)])
    answer = await mirror.http.put(f"/caches/{project}/{more.pop('cluster', 'east')}/summary", json=body | more)
    return answer.status_code


async def caches(mirror: MirrorUnderTest) -> Json:
    return dict((await mirror.http.get("/caches")).json())


async def test_a_grant_names_ids_and_opens_nothing_else(mirror: MirrorUnderTest) -> None:
    document = await granted(mirror)
    verifier = GrantVerifier((await FakeAgent(mirror, "n1").beat())["public_keys"])
    grant = verifier.verify_as(CacheGrant, document["grant"], now=time.time())
    ids = document["project_id"], document["team_id"]
    assert grant == CacheGrant("default", *ids, "east", VOLUME, grant.expires_at)
    assert 0 < grant.expires_at - time.time() <= 900
    for verify in (verifier.verify, partial(verifier.verify_as, PushGrant), partial(verifier.verify_as, FileGrant)):
        with pytest.raises(GrantInvalidError):
            verify(document["grant"], now=time.time())
    assert await granted(mirror, EAST | {"project": ids[0]}) | {"grant": "", "expires_at": ""} == document | {
        "grant": "",
        "expires_at": "",
    }  # by its id it is the same project


async def test_a_project_stays_where_its_first_cache_is(mirror: MirrorUnderTest) -> None:
    await granted(mirror, gpu_type="H100")
    assert await refused(mirror, WEST) == "CACHE_AFFINITY"  # any GPUs will do, and so those there
    assert await refused(mirror, WEST, require_cache_affinity=False) == "CACHE_AFFINITY"
    assert await refused(mirror, WEST, gpu_type="H200") == "CACHE_AFFINITY"
    both = {"gpu_type": "H200", "offered_in": ["east", "west"], "require_cache_affinity": False}
    assert await refused(mirror, WEST, **both) == "CACHE_AFFINITY"
    await granted(mirror, WEST, gpu_type="H200", require_cache_affinity=False)
    await granted(mirror)
    (cache,) = (await caches(mirror))["items"]
    assert (cache["project_name"], cache["cluster"]) == ("llama", "east")
    assert [(one["cluster"], one["volume_id"]) for one in cache["directories"]] == [("east", VOLUME), ("west", OTHER)]


async def test_a_refusal_pins_nothing(mirror: MirrorUnderTest) -> None:
    await granted(mirror)
    assert await refused(mirror, EAST, volume_id=OTHER) == "CACHE_NOT_SHARED"
    assert await refused(mirror, WEST, gpu_type="H200") == "CACHE_AFFINITY"
    (cache,) = (await caches(mirror))["items"]
    assert len(cache["directories"]) == 1


async def test_a_volume_that_is_lost_is_forgotten_and_the_next_one_taken(mirror: MirrorUnderTest) -> None:
    project = (await granted(mirror))["project_id"]
    await granted(mirror, WEST, gpu_type="H200", require_cache_affinity=False)
    await measured(mirror, project, 5)
    assert await refused(mirror, EAST, volume_id=OTHER) == "CACHE_NOT_SHARED"
    forgotten = await mirror.http.delete("/caches/llama/east")
    assert [(one["cluster"], one["volume_id"]) for one in forgotten.json()["directories"]] == [("west", OTHER)]
    for path in ("/caches/llama/east", "/caches/llama/north", "/caches/mistral/east"):
        assert refusal(await mirror.http.delete(path)) == (404, "NOT_FOUND")
    await granted(mirror, EAST, volume_id=OTHER)
    assert await refused(mirror, EAST) == "CACHE_NOT_SHARED"
    (cache,) = (await caches(mirror))["items"]
    assert [(one["cluster"], one["volume_id"], one["size_bytes"]) for one in cache["directories"]] == [
        ("east", OTHER, None),
        ("west", OTHER, None),
    ]


async def test_a_cache_that_holds_too_much_is_refused_until_it_holds_less_or_may_hold_more(
    mirror: MirrorUnderTest,
) -> None:
    project = (await granted(mirror))["project_id"]
    assert await measured(mirror, project, 1001) == 200
    assert await refused(mirror, EAST) == "CACHE_OVER_QUOTA"
    limited = await mirror.http.patch("/caches/llama", json={"limit_bytes": 2000})
    assert limited.json()["limit_bytes"] == 2000
    await granted(mirror)
    await mirror.http.patch("/caches/llama", json={"limit_bytes": None})
    assert await refused(mirror, EAST) == "CACHE_OVER_QUOTA"
    assert await measured(mirror, project, 1000, at="2026-11-25T10:10:00Z") == 200
    await granted(mirror)


async def test_a_cache__without_a_limit_that_was_set__holds_1_tb(
    database_options: dict[str, Any], tmp_path: Path
) -> None:
    terabyte = 1000**4
    async with mirror_under_test(tmp_path / "mirror", scrub_seconds=0, **database_options) as mirror:
        project = (await granted(mirror))["project_id"]
        for minute, limit in enumerate((terabyte, 10 * terabyte)):
            for second, size in enumerate((limit, limit + 1)):
                assert await measured(mirror, project, size, at=f"2026-11-25T10:0{minute}:0{second}Z") == 200
                if size == limit:
                    await granted(mirror)
            assert await refused(mirror, EAST) == "CACHE_OVER_QUOTA"
            await mirror.http.patch("/caches/llama", json={"limit_bytes": 10 * terabyte})


async def test_a_summary_is_the_newest_of_the_pinned_cluster(mirror: MirrorUnderTest) -> None:
    assert refusal(await mirror.http.get("/caches/llama/summary")) == (404, "NOT_FOUND")
    async with mirror.service.requests.database.write() as session:
        fresh = (await projects.project(session, "default", "Default", "llama", 1.0)).id
    nothing = (await mirror.http.get("/caches/llama/summary")).json()
    assert (nothing["project_id"], nothing["file_summaries"]) == (fresh, [])

    project = (await granted(mirror))["project_id"]
    await granted(mirror, WEST, gpu_type="H200", require_cache_affinity=False)
    assert await measured(mirror, project, 7, at="2026-11-25T10:10:00Z") == 200
    assert await measured(mirror, project, 8) == 200  # it was on its way for long
    assert await measured(mirror, project, 9, at="2026-11-25T11:00:00Z", cluster="west", volume_id=OTHER) == 200
    found = (await mirror.http.get(f"/caches/{project}/summary")).json()
    assert found == {
        "timestamp": "2026-11-25T10:10:00Z",
        "project_id": project,
        "file_summaries": [ENTRY | {"modified": "2026-11-25T10:00:00.500000Z"}],
    }
    (cache,) = (await caches(mirror))["items"]
    assert [(one["cluster"], one["size_bytes"], one["files"]) for one in cache["directories"]] == [
        ("east", 7, 1),
        ("west", 9, 1),
    ]


async def test_summary__dated_in_the_future__counts_from_when_it_came(mirror: MirrorUnderTest) -> None:
    project = (await granted(mirror))["project_id"]
    assert await measured(mirror, project, 7, at="2099-01-01T00:00:00Z") == 200
    now = datetime.now(UTC)
    dated = (await mirror.http.get(f"/caches/{project}/summary")).json()["timestamp"]
    assert datetime.fromisoformat(dated) <= now
    assert await measured(mirror, project, 8, at=now.isoformat()) == 200
    (cache,) = (await caches(mirror))["items"]
    assert cache["directories"][0]["size_bytes"] == 8


async def test_a_summary_of_what_is_not_there_or_is_none_is_not_kept(mirror: MirrorUnderTest) -> None:
    project = (await granted(mirror))["project_id"]
    assert await measured(mirror, "0000000000", 1) == 404
    assert await measured(mirror, project, 1, cluster="west") == 404
    assert await measured(mirror, project, 1, volume_id=OTHER) == 404
    for packed in ("", "x", "AAAA", pack([])[:-8]):
        assert await measured(mirror, project, 1, packed=packed) == 422, packed
    (cache,) = (await caches(mirror))["items"]
    assert cache["directories"][0]["captured_at"] is None


async def test_another_organisation_sees_and_gets_another_project(mirror: MirrorUnderTest) -> None:
    own = await granted(mirror)
    other = {"BDN-Organisation": "other"}
    theirs = (await mirror.http.post("/caches", json=WEST, headers=other)).json()
    assert theirs["cluster"] == "west"
    assert {theirs["project_id"], theirs["team_id"]} & {own["project_id"], own["team_id"]} == set()
    assert refusal(await mirror.http.get(f"/caches/{own['project_id']}/summary", headers=other))[0] == 404
    assert refusal(await mirror.http.delete(f"/caches/{own['project_id']}/east", headers=other))[0] == 404
    for name in ("llama", theirs["project_id"]):
        limited = await mirror.http.patch(f"/caches/{name}", json={"limit_bytes": 1})
        assert limited.status_code == (200 if name == "llama" else 404)
    assert [one["project_id"] for one in (await caches(mirror))["items"]] == [own["project_id"]]


async def test_the_caches_of_a_deleted_project_are_removed_by_whoever_has_their_volume(mirror: MirrorUnderTest) -> None:
    project = (await granted(mirror))["project_id"]
    await granted(mirror, WEST, gpu_type="H200", require_cache_affinity=False)
    await measured(mirror, project, 5)
    stranger = FakeAgent(mirror, "n0", "east")
    await stranger.beat()
    assert (await mirror.http.delete("/projects/llama")).status_code == 200
    assert (await caches(mirror))["items"] == []
    assert (await granted(mirror))["project_id"] != project  # the name is free
    left = (await caches(mirror))["removals"]
    assert [(one["project_id"], one["cluster"], one["state"]) for one in left] == [
        (project, "east", "PENDING"),
        (project, "west", "PENDING"),
    ]

    assert (await stranger.beat())["pending"] == []
    assert (await stranger.beat(volume_id=OTHER))["pending"] == []  # which is west's
    one, two = FakeAgent(mirror, "n1", "east", volume_id=VOLUME), FakeAgent(mirror, "n2", "east", volume_id=VOLUME)
    (told,) = (await one.beat(wait_seconds=30))["pending"]
    expected = {"id": told["id"], "organisation": "default", "project": project, "volume_id": VOLUME}
    assert told["remove_cache"] == expected
    assert [command["id"] for command in (await two.beat())["pending"]] == [told["id"]]
    running = {"id": told["id"], "running": True}
    assert (await one.beat(reports=[running]))["pending"] == []
    assert [left["state"] for left in (await caches(mirror))["removals"]] == ["RUNNING", "PENDING"]
    await one.beat(reports=[{"id": told["id"], "remove_cache": {"removed": True}}])
    assert (await two.beat())["pending"] == []
    await two.beat(reports=[{"id": told["id"], "remove_cache": {"removed": False}}])  # late

    (left,) = (await caches(mirror))["removals"]
    assert left["cluster"] == "west"
    agent = FakeAgent(mirror, "n1", "west", volume_id=OTHER)  # days later
    (told,) = (await agent.beat(wait_seconds=30))["pending"]
    error = {"code": "INTERNAL", "message": "a bug", "retryable": False}
    await agent.beat(reports=[{"id": told["id"], "error": error}])
    (left,) = (await caches(mirror))["removals"]
    assert (left["state"], left["error"]["message"]) == ("FAILED", "a bug")


async def uses(mirror: MirrorUnderTest, project: str) -> list[str]:
    """As an agent asks before it deletes from a cache."""
    return list((await mirror.get(f"/caches/{project}/uses"))["items"])


async def deletion(mirror: MirrorUnderTest, project: str) -> list[str]:
    """Delete the project; returns what forbids it."""
    answer = await mirror.http.delete(f"/projects/{project}")
    if answer.status_code == 200:
        return []
    assert refusal(answer) == (409, "IN_USE")
    return list(answer.json()["error"]["details"]["holders"])


def mounting(project: str, *holders: str) -> list[Json]:
    return [{"project": project, "holders": holders}]


async def test_a_project_whose_cache_a_job_of_any_node_has_mounted_is_not_deleted(mirror: MirrorUnderTest) -> None:
    project = (await granted(mirror))["project_id"]
    other = (await granted(mirror, EAST | {"project": "other"}))["project_id"]
    agent = FakeAgent(mirror, "n2", "east", volume_id=VOLUME)
    await agent.beat(caches=mounting(project, "jv_1", "jv_2"))
    assert await deletion(mirror, "llama") == await uses(mirror, project) == ["jv_1 on n2", "jv_2 on n2"]
    assert await deletion(mirror, other) == []
    assert (await mirror.http.delete("/caches/llama/east")).status_code == 200  # whichever volume it is on
    assert await deletion(mirror, "llama") == ["jv_1 on n2", "jv_2 on n2"]
    await agent.beat(caches=[])
    assert await uses(mirror, project) == []
    assert await deletion(mirror, "llama") == []


async def test_a_node_that_fell_silent_counts_until_its_agent_is_removed(mirror: MirrorUnderTest) -> None:
    project = (await granted(mirror))["project_id"]
    await FakeAgent(mirror, "n2", "east").beat(caches=mounting(project, "jv_1"), leaving=True)  # its job goes on
    for heard_at in (time.time(), 1_700_000_000.0):
        async with mirror.service.requests.database.write() as session:
            row = await agents.who_is(session, "east", "n2")
            assert row is not None
            row.last_heartbeat = heard_at
        (use,) = await deletion(mirror, "llama")
        date = f"{moment(heard_at):%Y-%m-%dT%H:%M:%SZ}"
        assert use == f"jv_1 on n2 (silent since {date}; if the node is gone: bdn-admin agents rm n2)"
    assert (await mirror.http.delete("/agents", params={"node": "n2"})).status_code == 200
    assert await deletion(mirror, "llama") == []


async def test_a_push_forbids_to_delete_from_the_cache_of_its_project(mirror: MirrorUnderTest) -> None:
    project = (await granted(mirror))["project_id"]
    other = (await granted(mirror, EAST | {"project": "other"}))["project_id"]
    push = (await mirror.http.post("/pushes", json={"source": "bt://llama@job1/checkpoint-1"})).json()["push_id"]
    assert await uses(mirror, project) == await deletion(mirror, "llama") == [f"push {push}"]
    assert await uses(mirror, other) == []
    await mirror.http.delete(f"/pushes/{push}")
    assert await uses(mirror, project) == await deletion(mirror, "llama") == []


async def test_a_mount_that_is_reported_as_its_project_is_deleted_is_known_to_the_agent_that_removes_the_cache(
    mirror: MirrorUnderTest,
) -> None:
    project = (await granted(mirror))["project_id"]
    assert await deletion(mirror, "llama") == []
    agent = FakeAgent(mirror, "n2", "east", volume_id=VOLUME)
    (told,) = (await agent.beat(caches=mounting(project, "jv_1"), wait_seconds=30))["pending"]
    assert told["remove_cache"]["project"] == project
    assert await uses(mirror, project) == ["jv_1 on n2"]
    await agent.beat(caches=[])
    assert await uses(mirror, project) == []


@pytest.mark.parametrize(
    ("late", "is_dropped"),
    [
        ({"state_at": 1.0}, True),
        ({"state_at": 1.0, "leaving": True}, True),
        ({"state_at": 1.0, "wait_seconds": 1}, True),
        ({"state_at": 3.0}, False),
        ({"state_at": 1.0, "boot_id": "after a restart of the machine"}, False),
        ({}, False),  # an agent of an earlier version
    ],
)
async def test_heartbeat__delayed_behind_a_later_state__does_not_undo_a_mount(
    mirror: MirrorUnderTest, late: Json, *, is_dropped: bool
) -> None:
    project = (await granted(mirror))["project_id"]
    agent = FakeAgent(mirror, "n2", "east", volume_id=VOLUME)
    await agent.beat(state_at=0.5, caches=[])
    await agent.beat(state_at=2.0, caches=mounting(project, "jv_1"))
    await agent.beat(caches=[], **late)
    assert await uses(mirror, project) == (["jv_1 on n2"] if is_dropped else [])
