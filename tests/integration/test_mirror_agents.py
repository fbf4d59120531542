"""Agents as the mirror sees them: membership, commands, reports, and leases that hold off evictions."""

import asyncio
import base64
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bdn.mirror.db import agents
from bdn.mirror.upkeep.eviction import StoreEviction
from bdn.wire.operation_schema import EvictCommand
from tests.doubles.hub import Hub
from tests.fakes.clock import Clock
from tests.support.mirror.fake_agent import USE, FakeAgent
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal, source, statements_of

pytest_plugins = ("tests.support.mirror.fixtures",)

DAY = 86400.0


def item(manifest: str, size: int, **refusal: Any) -> Json:
    return {"tier": "node", "cluster": "c", "node": "n1", "manifest": manifest, "bytes": size, **refusal}


@pytest.fixture
async def manifest(mirror: MirrorUnderTest, hub: Hub) -> str:
    hub.repo("org/model").commit({"a.txt": b"12345"})
    return await mirror.manifest(source("hf://org/model"))


@pytest.fixture
def clock() -> Clock:
    return Clock(1_800_000_000.0)


@pytest.fixture
async def timed(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MirrorUnderTest]:
    """A mirror without a worker that lives by the clock, and reads members anew for each who asks."""
    monkeypatch.setattr("bdn.mirror.operations.heartbeats.LOOK_SECONDS", 0.0)
    async with mirror_under_test(tmp_path / "mirror", clock=clock, work=False) as mirror:
        yield mirror


def members(reply: Json) -> list[str]:
    return [member["node"] for member in reply["members"]]


async def agents_of(mirror: MirrorUnderTest) -> list[Json]:
    return list((await mirror.get("/agents"))["items"])


async def test_the_epoch_grows_when_members_change_and_only_then(idle: MirrorUnderTest) -> None:
    one, two = FakeAgent(idle, "n1"), FakeAgent(idle, "n2")
    elsewhere = FakeAgent(idle, "n1", cluster="d")
    epochs = [(await agent.beat())["epoch"] for agent in (one, one, two, one, two, elsewhere, one)]
    first, second = epochs[0], epochs[2]
    assert epochs[:5] == [first, first, second, second, second]
    assert epochs[6] == second > first
    moved = await two.beat(advertise="http://n2:9999", tiers={})
    assert moved["epoch"] > second
    assert members(moved) == ["n1", "n2"]
    assert (await one.beat(holdings=[{"manifest": f"b3:{'0' * 64}", "bytes": 1}]))["epoch"] == moved["epoch"]
    assert (await one.beat(boot_id="after a restart"))["epoch"] == moved["epoch"]


async def test_a_database_that_is_new_or_was_set_back_repeats_no_epoch(timed: MirrorUnderTest, clock: Clock) -> None:
    agents = [FakeAgent(timed, f"n{number}") for number in range(3)]
    told = [(await agent.beat())["epoch"] for agent in agents]
    for lost in (
        "DELETE FROM clusters",
        "DELETE FROM agents",
        f"UPDATE clusters SET epoch = {told[0]}",
        "DELETE FROM agents WHERE node = 'n2'",
    ):
        with closing(sqlite3.connect(timed.data_dir / "mirror.sqlite", timeout=30)) as database, database:
            database.execute(lost)
        clock.now += 10
        for agent in agents:  # some are members still; a move makes all of them change
            told.append((await agent.beat(advertise=f"http://{agent.state['node']}:{len(told)}"))["epoch"])
    assert told == sorted(set(told))


async def test_an_agent_that_is_silent_is_no_member(timed: MirrorUnderTest, clock: Clock) -> None:
    one, two = FakeAgent(timed, "n1"), FakeAgent(timed, "n2")
    await one.beat()
    before = await two.beat()
    replies = []
    for _ in range(7):
        clock.now += 10
        replies.append(await two.beat())
    assert members(before) == ["n1", "n2"]
    assert {reply["epoch"] for reply in replies[:5]} == {before["epoch"]}  # 50 s
    assert members(replies[-1]) == ["n2"]
    assert replies[-1]["epoch"] > before["epoch"]
    assert [agent["alive"] for agent in await agents_of(timed)] == [False, True]


async def test_a_mirror_that_heard_of_nobody_forgets_nobody(timed: MirrorUnderTest, clock: Clock) -> None:
    one, two = FakeAgent(timed, "n1"), FakeAgent(timed, "n2")
    await one.beat()
    await two.beat()
    clock.now += 300
    assert members(await two.beat()) == ["n1", "n2"]


async def test_an_agent_that_leaves_is_no_member_from_then_on(idle: MirrorUnderTest) -> None:
    one, two = FakeAgent(idle, "n1"), FakeAgent(idle, "n2")
    await one.beat()
    before = await two.beat()
    waiting = asyncio.create_task(two.beat(epoch=before["epoch"], wait_seconds=30))
    await one.beat(leaving=True)
    reply = await asyncio.wait_for(waiting, 60)
    assert members(reply) == ["n2"]
    assert reply["epoch"] > before["epoch"]


async def test_two_agents_that_take_the_same_name_in_turns_are_told_apart(idle: MirrorUnderTest) -> None:
    one, two = FakeAgent(idle, "n1"), FakeAgent(idle, "n1", boot_id="another")
    await one.beat()
    await two.beat()
    assert [agent["disputed"] for agent in await agents_of(idle)] == [False]  # it moved
    await one.beat()
    assert [agent["disputed"] for agent in await agents_of(idle)] == [True]


async def test_agents_and_clusters_tell_capacity_and_use(idle: MirrorUnderTest) -> None:
    holding = {"manifest": f"b3:{'0' * 64}", "bytes": 300}
    await FakeAgent(idle, "n1", holdings=[holding]).beat()
    await FakeAgent(idle, "n2").beat()
    found = [(agent["node"], agent["manifests"], agent["tiers"]["node"]) for agent in await agents_of(idle)]
    assert found == [
        ("n1", 1, USE | {"problem": None}),
        ("n2", 0, USE | {"problem": None}),
    ]
    silent = FakeAgent(idle, "n3")
    await silent.beat()
    await silent.beat(leaving=True)
    (cluster,) = (await idle.get("/clusters"))["items"]
    assert (cluster["agents"], cluster["agents_alive"]) == (3, 2)
    assert cluster["epoch"] > 0
    assert cluster["tiers"]["node"] == {name: 2 * size for name, size in USE.items()} | {"problem": None}


async def test_an_agent_that_takes_nothing_new_stays_a_member_and_the_reason_is_told(idle: MirrorUnderTest) -> None:
    await FakeAgent(idle, "n1", tiers={"node": USE | {"problem": "Input/output error"}}).beat()
    (agent,) = await agents_of(idle)
    assert (agent["alive"], agent["tiers"]["node"]["problem"]) == (True, "Input/output error")


async def test_holdings_stay_until_others_are_reported(mirror: MirrorUnderTest, manifest: str) -> None:
    agent = FakeAgent(mirror, "n1", holdings=[{"manifest": manifest, "bytes": 5, "held_by": ["job-7"]}])
    await agent.beat()
    await agent.beat(holdings=None)
    (held,) = (await mirror.get("/manifests"))["items"]
    assert held["mirror"]
    assert held["nodes"]["c/n1"]["held_by"] == ["job-7"]
    assert held["sources"] == ["hf://org/model"]
    await agent.beat(holdings=[])
    assert (await mirror.get("/manifests"))["items"][0]["nodes"] == {}


async def test_a_command_answers_the_open_heartbeat_at_once(mirror: MirrorUnderTest, manifest: str) -> None:
    agent = FakeAgent(mirror, "n1", holdings=[{"manifest": manifest, "bytes": 5}])
    await agent.beat()
    waiting = asyncio.create_task(agent.beat(wait_seconds=30))
    await asyncio.sleep(0)
    eviction = await mirror.ask("evictions", source="hf://org/model", tier="node")
    reply = await asyncio.wait_for(waiting, 60)
    what = {"manifests": [manifest], "job": None, "lru_bytes": None, "all": False, "tier": "node"}
    who = {"organisation": "default", "asked_by": "an operator of default"}
    how: dict[str, object] = {"dry_run": False, "force": False, "plan": None, "holders": [], "purge": False}
    assert reply["pending"][0]["evict"] == {"id": eviction["id"], "source": "hf://org/model", **how, **what, **who}
    assert eviction["status"] == "RUNNING"
    after = await agent.carry_out(reply, item(manifest, 5))
    assert after["pending"] == []
    done = await mirror.get(f"/evictions/{eviction['id']}")
    assert (done["status"], done["bytes_freed"], done["unreachable"]) == ("DONE", 5, [])
    assert done["items"][0]["sources"] == ["hf://org/model"]
    await agent.carry_out(reply, item(manifest, 5))  # told twice, counted once
    assert await mirror.get(f"/evictions/{eviction['id']}") == done


async def test_an_eviction_waits_for_every_agent_it_concerns(mirror: MirrorUnderTest, manifest: str) -> None:
    one, two, other = (FakeAgent(mirror, *name) for name in (("n1", "c"), ("n2", "c"), ("n1", "d")))
    for agent in (one, two, other):
        await agent.beat()
    eviction = await mirror.ask("evictions", all=True, cluster="c")
    replies = [await agent.beat() for agent in (one, two, other)]
    assert [len(reply["pending"]) for reply in replies] == [1, 1, 0]
    await one.carry_out(replies[0], item(manifest, 5))
    assert (await mirror.get(f"/evictions/{eviction['id']}"))["status"] == "RUNNING"
    refusal = item(manifest, 5, refused=True, holders=["job-9"]) | {"node": "n2"}
    await two.carry_out(replies[1], refusal)
    done = await mirror.get(f"/evictions/{eviction['id']}")
    assert (done["status"], done["bytes_freed"]) == ("REFUSED", 5)
    narrowed = await mirror.ask("evictions", job="j", node="n1", cluster="d", dry_run=True)
    assert [len((await agent.beat())["pending"]) for agent in (one, two, other)] == [0, 0, 1]
    assert narrowed["request"]["job"] == "j"


async def test_an_eviction_is_not_over_before_the_mirror_has_done_its_own_part(
    mirror: MirrorUnderTest, manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent(mirror, "n1", holdings=[{"manifest": manifest, "bytes": 5, "held_by": ["job-7"]}])
    await agent.beat()
    turn, run = asyncio.Event(), StoreEviction.run

    async def run_late(self: StoreEviction, command: EvictCommand, organisation: str) -> None:
        await turn.wait()  # another eviction is at work
        await run(self, command, organisation)

    monkeypatch.setattr(StoreEviction, "run", run_late)
    asking = asyncio.create_task(mirror.evict(source="hf://org/model"))
    reply = await agent.beat(wait_seconds=10)
    await agent.carry_out(reply, item(manifest, 5))  # the job has ended, and the next heartbeat will say so
    turn.set()

    done = await asking
    assert [(one["tier"], one["refused"]) for one in done["items"]] == [("mirror", True), ("node", False)]
    assert done["status"] == "REFUSED"


async def test_an_agent_that_never_answers_fails_the_eviction_after_its_time_and_is_then_left_alone(
    timed: MirrorUnderTest, clock: Clock
) -> None:
    agent = FakeAgent(timed, "n1")
    await agent.beat()
    eviction = await timed.ask("evictions", all=True, tier="node")
    clock.now += 46
    assert (await agent.beat())["pending"] == []  # it came too late: nobody waits for its answer
    done = await timed.get(f"/evictions/{eviction['id']}")
    assert (done["status"], done["unreachable"]) == ("FAILED", ["c/n1"])
    assert done["completed_at"]


async def test_what_an_agent_leases_stays_unless_forced(mirror: MirrorUnderTest, manifest: str) -> None:
    agent = FakeAgent(mirror, "n1", holdings=[{"manifest": manifest, "bytes": 5, "held_by": ["job-7"]}])
    await agent.beat()
    before = mirror.chunks()
    for dry_run in (True, False):
        refused = await mirror.evict(source="hf://org/model", tier="mirror", dry_run=dry_run)
        assert (refused["status"], refused["bytes_freed"]) == ("REFUSED", 0)
        assert refused["items"][0]["holders"] == ["job-7 on n1"]
    assert (await mirror.evict(lru_bytes=1, tier="mirror"))["items"] == []
    assert mirror.chunks() == before
    forced = await mirror.evict(source="hf://org/model", tier="mirror", force=True)
    assert (forced["status"], forced["bytes_freed"]) == ("DONE", sum(before.values()))
    assert forced["items"][0]["restorable_until"] is not None
    assert (await mirror.http.get(f"/manifests/{manifest}")).status_code == 404
    assert forced["request"]["force"]
    assert forced["items"][0]["holders"] == ["job-7 on n1"]
    assert mirror.count("operations") == 4  # every one is recorded


# --- What is held is told as changes, and read a page at a time ---


def name(number: int) -> str:
    return f"b3:{number:064x}"


def changes(base: str | None, digest: str, *held: int, gone: tuple[int, ...] = ()) -> Json:
    told = [{"manifest": name(number), "bytes": number, "held_by": [f"job-{number}"]} for number in held]
    return {"base": base, "digest": digest, "held": told, "gone": [name(number) for number in gone]}


@pytest.fixture
async def either(upstreams: None, database_options: Json, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", work=False, **database_options) as mirror:
        yield mirror


async def holdings(mirror: MirrorUnderTest, *numbers: int) -> dict[str, dict[str, int]]:
    """The bytes of each of these manifests, by agent."""
    async with mirror.service.requests.database.read() as session:
        found = await agents.holdings_of(session, [name(number)[3:] for number in numbers])
    return {f"b3:{digest}": {node: one.bytes for (_, node), one in held.items()} for digest, held in found.items()}


async def test_a_change_is_taken_up_when_it_is_of_what_the_mirror_has(either: MirrorUnderTest) -> None:
    agent = FakeAgent(either, "n1", holdings=None)
    assert (await agent.beat())["holdings_digest"] == ""
    assert (await agent.beat(changes=changes(None, "one", 1, 2)))["holdings_digest"] == "one"
    assert (await agent.beat(changes=changes("one", "two", 2, 3, gone=(1,))))["holdings_digest"] == "two"
    assert (await agent.beat(changes=changes("one", "three", 4)))["holdings_digest"] == "two"
    assert await holdings(either, 1, 2, 3, 4) == {name(2): {"n1": 2}, name(3): {"n1": 3}}
    assert [one["manifests"] for one in await agents_of(either)] == [2]
    assert (await agent.beat(changes=changes(None, "three", 4)))["holdings_digest"] == "three"
    assert await holdings(either, 1, 2, 3, 4) == {name(4): {"n1": 4}}


async def test_a_change_costs_rows_for_what_changed_and_a_heartbeat_without_one_reads_none(
    either: MirrorUnderTest,
) -> None:
    agent = FakeAgent(either, "n1", holdings=None)
    await agent.beat(changes=changes(None, "one", *range(100)))
    with statements_of(either) as seen:
        await agent.beat()
    assert not [statement for statement in seen if "holdings " in statement]
    with statements_of(either) as seen:
        await agent.beat(changes=changes("one", "two", 1, 200))
    assert not [statement for statement in seen if statement.startswith(("DELETE", "SELECT holdings"))]


async def test_heartbeats_that_are_kept_open_and_say_nothing_new_are_written_down_together(
    either: MirrorUnderTest,
) -> None:
    crowd = [FakeAgent(either, f"n{number}", holdings=None) for number in range(20)]
    for agent in crowd:
        await agent.beat(changes=changes(None, "one", 1))
    before = {agent["node"]: agent["last_heartbeat"] for agent in await agents_of(either)}
    with statements_of(either) as seen:
        replies = await asyncio.gather(*(agent.beat(wait_seconds=1) for agent in crowd))
        assert {reply["holdings_digest"] for reply in replies} == {"one"}
        while not all(agent["last_heartbeat"] > before[agent["node"]] for agent in await agents_of(either)):
            pass
    assert len([statement for statement in seen if statement.startswith("UPDATE agents")]) <= 3


async def test_an_open_heartbeat_of_an_agent_that_was_taken_for_gone_makes_it_a_member_again(
    idle: MirrorUnderTest,
) -> None:
    agent = FakeAgent(idle, "n1")
    epoch = (await agent.beat())["epoch"]
    with closing(sqlite3.connect(idle.data_dir / "mirror.sqlite", timeout=30)) as database, database:
        database.execute("UPDATE agents SET joined_at = NULL")  # as another process does it
        database.execute("UPDATE clusters SET epoch = epoch + 1")
    reply = await agent.beat(epoch=epoch, wait_seconds=30)
    assert members(reply) == ["n1"]
    assert reply["epoch"] > epoch + 1


async def test_no_answer_about_agents_reads_what_they_hold(either: MirrorUnderTest) -> None:
    for node in ("n1", "n2"):
        await FakeAgent(either, node, holdings=[{"manifest": name(1), "bytes": 1}]).beat()
    for path in ("/metrics", "/agents", "/clusters"):
        with statements_of(either) as seen:
            assert (await either.http.get(path)).status_code == 200
        assert not [statement for statement in seen if "holdings " in statement or ".holdings," in statement], path


async def test_agents_come_in_pages(either: MirrorUnderTest) -> None:
    names = [(cluster, node) for cluster in ("c", "d/e f") for node in ("n1", "n2/\u00e4", "n3")]
    for cluster, node in names:
        await FakeAgent(either, node, cluster, advertise=None).beat()
    found, cursor = [], None
    while True:
        page = await either.get("/agents", limit=2, **({} if cursor is None else {"cursor": cursor}))
        found.append([(one["cluster"], one["node"]) for one in page["items"]])
        if (cursor := page["next_cursor"]) is None:
            break
    assert found == [names[:2], names[2:4], names[4:]]
    for cursor in ("x", "AA==", base64.urlsafe_b64encode(b"a %00").decode()):
        answer = await either.http.get("/agents", params={"cursor": cursor})
        assert refusal(answer) == (422, "INVALID_REQUEST")


async def test_what_is_held_comes_in_pages_that_many_holders_make_shorter(
    mirror: MirrorUnderTest, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.operations.names._HOLDINGS", 2)
    held = []
    for number in range(4):
        hub.repo(f"org/model-{number}").commit({"a.txt": b"%d" % number})
        held.append(await mirror.manifest(source(f"hf://org/model-{number}")))
    held.sort()
    for node in ("n1", "n2"):
        told = [{"manifest": manifest, "bytes": 5} for manifest in held[1:3]]
        await FakeAgent(mirror, node, holdings=told).beat()
    pages, cursor = [], None
    while True:
        page = await mirror.get("/manifests", limit=2, **({} if cursor is None else {"cursor": cursor}))
        pages.append({item["manifest"]: list(item["nodes"]) for item in page["items"]})
        if (cursor := page["next_cursor"]) is None:
            break
    both = ["c/n1", "c/n2"]
    assert pages == [{held[0]: [], held[1]: both}, {held[2]: both, held[3]: []}]
    monkeypatch.setattr("bdn.mirror.operations.names._HOLDINGS", 1)
    page = await mirror.get("/manifests", cursor=held[0])
    assert [item["manifest"] for item in page["items"]] == [held[1]]  # at least one, with all who hold it
    assert len(page["items"][0]["nodes"]) == 2


# --- Who left is asked nothing ---


async def test_who_left_or_was_silent_for_a_day_is_asked_nothing(timed: MirrorUnderTest, clock: Clock) -> None:
    here, left, silent = (FakeAgent(timed, node) for node in ("here", "left", "silent"))
    await silent.beat()
    clock.now += DAY - 1
    await left.beat()
    await here.beat()
    eviction = await timed.ask("evictions", all=True, tier="node")
    assert eviction["unreachable"] == ["c/silent"]  # it may come back
    await left.beat(leaving=True)
    clock.now += 1
    reply = await here.beat()
    for kind in ("evictions", "verifications"):
        asked = await timed.ask(kind, all=True, tier="node")
        assert (asked["status"], asked["unreachable"]) == ("RUNNING", [])
        for node in ("left", "silent"):
            answer = await timed.http.post(f"/{kind}", json={"all": True, "node": node})
            assert refusal(answer) == (404, "NOT_FOUND")
    (_, evict, _) = (await here.beat())["pending"]
    assert reply["pending"]
    await here.beat(reports=[{"id": evict["id"], "evict": {"items": []}}])
    assert (await timed.get(f"/evictions/{evict['id']}"))["status"] == "DONE"
    await left.beat()  # it is back
    back = await timed.ask("evictions", all=True, node="left")
    assert [one["id"] for one in (await left.beat())["pending"]][-1] == back["id"]


async def test_an_agent_that_was_removed_and_comes_back_is_a_new_one(timed: MirrorUnderTest, clock: Clock) -> None:
    agent, twin = FakeAgent(timed, "n1", holdings=None), FakeAgent(timed, "n1", "d")
    await agent.beat(changes=changes(None, "one", 1))
    before = await twin.beat()
    gone = {"node": "n1", "cluster": "c"}
    for params, expected in (
        ({"node": "n1"}, (422, "INVALID_REQUEST")),  # which of both?
        (gone, (409, "IN_USE")),
        ({"node": "n2"}, (404, "NOT_FOUND")),
    ):
        assert refusal(await timed.http.delete("/agents", params=params)) == expected
    await agent.beat(leaving=True)
    removed = await timed.http.delete("/agents", params=gone)
    assert (removed.status_code, removed.json()["node"], removed.json()["alive"]) == (200, "n1", False)
    assert refusal(await timed.http.delete("/agents", params=gone)) == (404, "NOT_FOUND")
    assert [one["cluster"] for one in await agents_of(timed)] == ["d"]
    assert timed.count("holdings") == 0
    clock.now += 61
    assert (await timed.http.delete("/agents", params={"node": "n1"})).status_code == 200  # silent is enough
    back = await agent.beat(changes=changes("one", "two", 2))
    assert (back["holdings_digest"], members(back)) == ("", ["n1"])
    assert (await twin.beat())["epoch"] > before["epoch"]
