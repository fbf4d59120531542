"""Prefetches, verifications and evictions as the mirror records them and does its own part of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import Digest
from bdn.core.store import NotDeletedError
from bdn.mirror.db import chunks, manifests
from bdn.mirror.db.agents import ALIVE_SECONDS
from bdn.mirror.db.errors import DatabaseUnavailableError
from bdn.mirror.upkeep.eviction import StoreEviction
from bdn.store.directory import DirectoryStore
from bdn.wire.grants import GrantVerifier
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.fakes.clock import Clock
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import (
    LONGEST_SECONDS,
    Json,
    MirrorUnderTest,
    mirror_under_test,
    refusal,
    source,
    statements_of,
    until,
)

pytest_plugins = ("tests.support.mirror.fixtures",)
MODEL = source("hf://org/model")
CONTENT = b"12345"


@pytest.fixture
async def either(
    hub: Hub, upstreams: None, database_options: dict[str, Any], tmp_path: Path
) -> AsyncIterator[MirrorUnderTest]:
    """A mirror that holds a model, on either database, and reads nothing again by itself."""
    hub.repo("org/model").commit({"a.txt": CONTENT})
    async with mirror_under_test(tmp_path / "mirror", scrub_seconds=0, **database_options) as mirror:
        await mirror.ready(MODEL)
        yield mirror


async def begun(mirror: MirrorUnderTest, **request: Any) -> Json:
    return await mirror.ask("prefetches", **{"source": "hf://org/model"} | request)


async def now(mirror: MirrorUnderTest, prefetch: Json, wait_seconds: float = 0) -> Json:
    return await mirror.get(f"/prefetches/{prefetch['id']}", wait=wait_seconds)


def report(prefetch: Json, *, running: bool = False, error: Json | None = None, **facts: Any) -> Json:
    return {"reports": [{"id": prefetch["id"], "running": running, "error": error, "prefetch": facts}]}


NOTHING = f"b3:{'0' * 64}"
TO_N1: Json = {"source": "hf://org/model", "nodes": ["n1"]}
REFUSED: list[tuple[str, Json, int]] = [
    ("prefetches", {"source": "hf://org/model", "cluster": "nowhere"}, 404),
    ("prefetches", TO_N1 | {"nodes": ["nobody"]}, 404),
    ("prefetches", TO_N1 | {"source": "hf://org/other"}, 404),
    ("prefetches", TO_N1 | {"source": None, "manifest": NOTHING}, 404),
    ("prefetches", TO_N1 | {"mirror_id": "mir_1"}, 422),
    ("prefetches", {"source": "hf://org/model"}, 422),
    ("verifications", {}, 422),
    ("verifications", {"manifest": "latest"}, 422),
    ("verifications", {"manifest": NOTHING}, 404),
    ("verifications", {"source": "hf://org/other"}, 404),
    ("verifications", {"all": True, "node": "nobody"}, 404),
    ("evictions", {}, 422),
    ("evictions", {"all": True, "job": "j"}, 422),
    ("evictions", {"all": True, "plan": f"evi_{'0' * 24}"}, 422),
    ("evictions", {"all": True, "plan": f"evi_{'0' * 24}", "force": True, "dry_run": True}, 422),
    ("evictions", {"all": True, "plan": f"evi_{'0' * 24}", "force": True}, 404),
    ("evictions", {"manifest": "latest"}, 422),
    ("evictions", {"source": "hf://org/model@v9"}, 404),
    ("evictions", {"all": True, "node": "nobody"}, 404),
    ("evictions", {"all": True, "cluster": "d"}, 404),
    ("evictions", {"all": True, "cluster": "d", "node": "n1"}, 404),
]


async def test_what_cannot_be_done_is_refused_and_not_recorded(mirror: MirrorUnderTest, hub: Hub) -> None:
    hub.repo("org/model").commit({"a.txt": CONTENT})
    await mirror.ready(MODEL)
    await FakeAgent(mirror, "n1").beat()
    for operations, request, status in REFUSED:
        answer = await mirror.http.post(f"/{operations}", json=request)
        assert refusal(answer) == (status, "NOT_FOUND" if status == 404 else "INVALID_REQUEST"), (operations, request)
    assert mirror.count("operations") == 0
    assert (await mirror.http.get(f"/verifications/ver_{'0' * 24}")).status_code == 404


async def test_an_agent_is_told_until_it_is_at_work_and_its_last_word_ends_its_part(either: MirrorUnderTest) -> None:
    one, two = FakeAgent(either, "n1"), FakeAgent(either, "n2")
    await one.beat()
    await two.beat()
    waiting = asyncio.create_task(one.beat(wait_seconds=30))
    await asyncio.sleep(0)
    prefetch = await begun(either, cluster="c")
    told = (await asyncio.wait_for(waiting, 60))["pending"]

    assert [command["id"] for command in told] == [prefetch["id"]]
    assert [command["id"] for command in (await one.beat())["pending"]] == [prefetch["id"]]  # it may have restarted
    assert (await one.beat(**report(prefetch, running=True, bytes_total=5)))["pending"] == []
    came = {"node": 0, "cluster": 2, "mirror": 3}
    assert (await one.beat(**report(prefetch, bytes_total=5, bytes_from=came)))["pending"] == []
    await one.beat(**report(prefetch, running=True))  # late; what has ended stays as it is
    half = await now(either, prefetch)
    assert half["status"] == "RUNNING"
    assert [(node["node"], node["state"], node["bytes_from"]) for node in half["nodes"]] == [
        ("n1", "READY", came),
        ("n2", "PENDING", {"node": 0, "cluster": 0, "mirror": 0}),
    ]

    ending = asyncio.create_task(now(either, prefetch, 30))
    await asyncio.sleep(0)
    error = {"code": "CACHE_FULL", "message": "the cache is full", "retryable": True}
    await two.beat(**report(prefetch, error=error))
    done = await asyncio.wait_for(ending, 60)
    assert (done["status"], done["nodes"][1]["error"]["code"]) == ("FAILED", "CACHE_FULL")
    assert done["completed_at"]


async def test_a_named_dead_node_is_unreachable(either: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    await FakeAgent(either, "n1").beat()
    monkeypatch.setattr("bdn.mirror.db.agents.ALIVE_SECONDS", -1.0)
    prefetch = await begun(either, nodes=["n1"])
    assert (prefetch["status"], [node["state"] for node in prefetch["nodes"]]) == ("FAILED", ["UNREACHABLE"])
    done = await either.evict(all=True, tier="node")
    assert (done["status"], done["unreachable"]) == ("FAILED", ["c/n1"])


async def test_a_prefetch_to_a_cluster_goes_to_those_of_its_nodes_that_live(either: MirrorUnderTest) -> None:
    gone = FakeAgent(either, "gone")
    living = [FakeAgent(either, "n1"), FakeAgent(either, "n2"), FakeAgent(either, "store", roles=["cluster"])]
    for agent in (gone, *living, FakeAgent(either, "elsewhere", cluster="d")):
        await agent.beat()
    await gone.beat(leaving=True)
    assert [node["node"] for node in (await begun(either, cluster="c"))["nodes"]] == ["n1", "n2"]

    for agent in living:
        await agent.beat(leaving=True)
    answer = await either.http.post("/prefetches", json={"source": "hf://org/model", "cluster": "c"})
    assert (refusal(answer), "living" in answer.text) == ((404, "NOT_FOUND"), True)


async def test_a_source_without_a_revision_means_its_default_or_the_newest(either: MirrorUnderTest, hub: Hub) -> None:
    await FakeAgent(either, "n1").beat()
    for repo in ("org/model", "org/pinned"):
        hub.repo(repo).commit({"a.txt": b"of a branch"}, branch="v1")
        await either.ready(source(f"hf://{repo}@v1"))

    default, pinned = [await begun(either, source=f"hf://{repo}", nodes=["n1"]) for repo in ("org/model", "org/pinned")]

    assert (default["sources"], pinned["sources"]) == (["hf://org/model"], ["hf://org/pinned@v1"])


async def test_a_prefetch_outlives_a_restart_of_the_mirror_and_is_ready_when_all_its_nodes_are(
    hub: Hub, upstreams: None, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"a.txt": CONTENT})
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        await mirror.ready(MODEL)
        await FakeAgent(mirror, "n1").beat()
        prefetch = await begun(mirror, nodes=["n1"])
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        agent = FakeAgent(mirror, "n1")
        assert [command["id"] for command in (await agent.beat())["pending"]] == [prefetch["id"]]
        await agent.beat(**report(prefetch))
        assert (await now(mirror, prefetch))["status"] == "READY"


# --- Verifications: told to agents until they report, on both databases, and on the command line ---
DAMAGED = {"tier": "node", "chunk": f"b3:{'1' * 64}", "outcome": "lost", "reason": "its bytes are others"}


def verified(verification: Json, **facts: Any) -> Json:
    return {"id": verification["id"], "verify": facts}


async def test_store_and_agents_together_make_the_outcome(either: MirrorUnderTest) -> None:
    one, two = FakeAgent(either, "n1"), FakeAgent(either, "n2")
    await one.beat()
    await two.beat()
    place = f"/verifications/{(await either.ask('verifications', all=True))['id']}"
    (command,) = (await one.beat())["pending"]
    told = command["verify"]
    assert (f"/verifications/{told['id']}", told["all"], told["manifests"], told["repair"]) == (place, True, None, True)
    at_work = {"id": told["id"], "running": True}
    assert (await one.beat(reports=[at_work], wait_seconds=0.2))["pending"] == []
    assert (await one.beat(reports=[verified(told, items=[DAMAGED], chunks_read=7, bytes_read=70)]))["pending"] == []
    store = await either.ask("verifications", LONGEST_SECONDS, tier="mirror", all=True)
    assert (store["status"], (await either.get(place))["status"]) == ("DONE", "RUNNING")
    await two.beat(reports=[verified(told, chunks_read=1, bytes_read=5)])
    done = await either.get(place, wait=LONGEST_SECONDS)
    (item,) = done["items"]
    assert (done["status"], item["cluster"], item["node"], item["outcome"]) == ("DAMAGED", "c", "n1", "lost")
    stored = either.chunks()
    assert (done["chunks_read"], done["bytes_read"]) == (8 + len(stored), 75 + sum(stored.values()))


async def test_an_eviction_names_holders_whatever_an_agent_says_of_them(either: MirrorUnderTest) -> None:
    (manifest,) = [item["manifest"] for item in (await either.get("/manifests"))["items"]]
    longest = "j" * 4096
    holding = {"complete": True, "bytes": 5, "held_by": [longest]}
    await FakeAgent(either, "n1", holdings=[{"manifest": manifest, **holding}]).beat()
    planned = await either.ask("evictions", tier="mirror", manifest=manifest, dry_run=True)
    (item,) = planned["items"]
    assert item["refused"]
    (holder,) = item["holders"]
    assert holder.startswith("jjj")
    assert holder.endswith(" on n1")


async def test_an_agent_that_shall_mend_is_lent_grants_for_what_it_holds_and_no_more(either: MirrorUnderTest) -> None:
    (manifest,) = [item["manifest"] for item in (await either.get("/manifests"))["items"]]
    holding = {"complete": True, "bytes": 5, "held_by": []}
    holdings = [{"manifest": name, **holding} for name in (manifest, f"b3:{'2' * 64}")]
    agent = FakeAgent(either, "n1", holdings=holdings)
    await agent.beat()
    await either.ask("verifications", all=True, tier="node")
    reply = await agent.beat()
    told = reply["pending"][0]["verify"]
    (token,) = told["grants"]
    grant = GrantVerifier(reply["public_keys"]).verify(token, now=time.time())
    assert [str(mount.manifest) for mount in grant.mounts] == [manifest]
    await agent.beat(reports=[verified(told)])
    await either.ask("verifications", all=True, tier="node", repair=False)
    assert (await agent.beat())["pending"][0]["verify"]["grants"] == []


async def test_an_agent_that_falls_silent_is_unreachable_and_the_others_count(upstreams: None, tmp_path: Path) -> None:
    clock = Clock()
    async with mirror_under_test(tmp_path / "mirror", clock=clock, scrub_seconds=0, collect_seconds=0) as mirror:
        one, two = FakeAgent(mirror, "n1"), FakeAgent(mirror, "n2")
        await one.beat()
        await two.beat()
        verification = await mirror.ask("verifications", all=True, tier="node")
        place = f"/verifications/{verification['id']}"
        await one.beat(reports=[verified(verification)])
        assert (await mirror.get(place))["status"] == "RUNNING"
        clock.now += ALIVE_SECONDS
        done = await mirror.get(place, wait=LONGEST_SECONDS)
        assert (done["status"], done["unreachable"]) == ("FAILED", ["c/n2"])
        late = await mirror.ask("verifications", LONGEST_SECONDS, all=True, tier="node")
        assert (late["status"], late["unreachable"]) == ("FAILED", ["c/n1", "c/n2"])


async def test_an_answer_is_written_without_reading_what_others_answered(either: MirrorUnderTest) -> None:
    """The last answer reads all of them, once, for the verdict; and so does whoever asks how it went."""
    agents = [FakeAgent(either, f"n{number}") for number in range(4)]
    for agent in agents:
        await agent.beat()
    eviction = await either.ask("evictions", all=True, tier="node")
    gone = [{"tier": "node", "cluster": "c", "manifest": f"b3:{number:064x}", "bytes": 1} for number in range(3)]
    costs = []
    for agent in agents:
        told = {"id": eviction["id"], "evict": {"items": [item | {"node": agent.state["node"]} for item in gone]}}
        with statements_of(either) as seen:
            await agent.beat(reports=[told])
        assert (await agent.beat())["pending"] == []
        costs.append(sum(map(reads_results, seen)))
        assert len([statement for statement in seen if statement.startswith("UPDATE operation_parts")]) == 1
    assert costs == [0, 0, 0, 1]
    with statements_of(either) as seen:
        done = await either.get(f"/evictions/{eviction['id']}", wait=LONGEST_SECONDS)
    assert (done["status"], done["bytes_freed"]) == ("DONE", len(agents) * len(gone))
    assert sum(map(reads_results, seen)) == 1


async def test_what_the_mirror_evicts_stays_on_its_disk_until_then_unless_it_is_purged(
    either: MirrorUnderTest, hub: Hub
) -> None:
    hub.repo("org/other").commit({"b.bin": bytes(2 * 1024 * 1024)})
    before, everything = either.chunks(), {"all": True, "tier": "mirror"}
    await either.ready(source("hf://org/other"))
    stored = either.chunks()
    whole = sum(stored.values())
    other = whole - sum(before.values())

    evicted = await either.evict(source="hf://org/other", tier="mirror")
    assert (evicted["bytes_freed"], evicted["bytes_kept"]) == (other, other)
    assert evicted["kept_until"] == evicted["items"][0]["restorable_until"]
    held = await either.get("/manifests")
    assert sorted((one["sources"], one["mirror"], one["restorable_until"]) for one in held["items"]) == [
        (["hf://org/model"], True, None), (["hf://org/other"], False, evicted["kept_until"]),
    ]  # fmt: skip
    assert held["store"]["bytes_stored"] == whole
    assert 0 < held["store"]["disk_free"] < held["store"]["disk_total"]

    planned = await either.evict(**everything, purge=True, dry_run=True)
    assert (planned["bytes_freed"], planned["bytes_kept"], len(planned["items"])) == (whole, 0, 2)
    assert (await either.get("/manifests"))["items"] == held["items"]
    assert either.chunks() == stored

    purged = await either.evict(**everything, purge=True)
    assert (purged["bytes_freed"], purged["bytes_kept"], purged["kept_until"]) == (whole, 0, None)
    assert either.chunks() == {}
    held = await either.get("/manifests")
    assert (held["items"], held["store"]["bytes_stored"]) == ([], 0)
    answer = await either.http.post("/restorations", json={"source": "hf://org/other"})
    assert refusal(answer) == (404, "NOT_FOUND")
    await either.ready(source("hf://org/other"))
    assert refusal(await either.http.post("/evictions", json={"all": True, "purge": True, "tier": "node"}))[0] == 422


def reads_results(statement: str) -> bool:
    return statement.startswith("SELECT") and "operation_parts.result" in statement


# --- The mirror's own tier: what an eviction takes, what it spares, and what a failing store or a running copy does to it ---
MIB = 1024 * 1024
ONE, TWO = source("hf://org/one", "/one"), source("hf://org/two", "/two")
Filled = dict[str, str]  # manifests by name
LISTED = """SELECT lower(hex(digest)) FROM chunks JOIN set_chunks ON chunk_id = chunks.id JOIN chunk_sets ON chunk_sets.id = set_id
WHERE owner LIKE '%/listing' AND chunk_sets.state = 'published'"""


@pytest.fixture
async def mirror(upstreams: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MirrorUnderTest]:
    monkeypatch.setattr(manifests, "USE_SECONDS", 0.0)
    async with mirror_under_test(tmp_path, tombstone_seconds=0) as service:
        yield service


@pytest.fixture
async def filled(mirror: MirrorUnderTest, hub: Hub) -> Filled:
    """Manifests by name in the order of their last use: two revisions of ``one``, then ``two``, which shares seven MiB with both."""
    one = hub.repo("org/one")
    one.commit({"shared.bin": b"in both" * MIB, "only.txt": b"1" * MIB, "old.txt": b"old" * MIB})
    names = {"old": await mirror.manifest(ONE)}
    one.commit({"old.txt": None, "new.txt": b"newer" * MIB})
    names["new"] = await mirror.manifest(ONE)
    hub.repo("org/two").commit({"same.bin": b"in both" * MIB, "more.bin": b"more" * MIB})
    names["two"] = await mirror.manifest(TWO)
    hub.log.clear()
    assert sorted(size for size in mirror.chunks().values() if size >= MIB) == [MIB * size for size in (1, 3, 4, 5, 7)]
    return names


async def evicted(mirror: MirrorUnderTest, **request: Any) -> tuple[str, dict[str, int], int]:
    """Status, MiB by manifest, and MiB freed, without the few KiB of documents; the bytes are those by which the store shrinks."""
    before = sum(mirror.chunks().values())
    document = await mirror.evict(**request)
    assert all(item["tier"] == "mirror" and not item["refused"] for item in document["items"])
    sizes = {item["manifest"]: item["bytes"] for item in document["items"]}
    assert sum(sizes.values()) == document["bytes_freed"]
    if not request.get("dry_run"):
        assert before - sum(mirror.chunks().values()) == document["bytes_freed"]
    return document["status"], {name: size // MIB for name, size in sizes.items()}, document["bytes_freed"] // MIB


async def held(mirror: MirrorUnderTest) -> set[str]:
    return {item["manifest"] for item in (await mirror.get("/manifests"))["items"]}


async def check_store(mirror: MirrorUnderTest) -> None:
    """Every manifest that is held is whole, and nothing else is kept."""
    needed: set[str] = set()
    for manifest in await held(mirror):
        await mirror.tree(manifest)
        needed |= {Digest.parse(manifest).hex, *(page.digest.hex for page in await mirror.pages(manifest))}
        for file in (await mirror.files(manifest)).values():
            needed.update(name.hex for name in file.layout.fetched)
    listings = {row[0] for row in mirror.behind.query(LISTED)}
    assert {Path(path).name for path in mirror.chunks()} == needed | listings


async def test_by_source_all_its_revisions_go_and_shared_contents_stay(mirror: MirrorUnderTest, filled: Filled) -> None:
    items = {filled["old"]: 3, filled["new"]: 6}  # two has what is shared
    assert await evicted(mirror, source="hf://org/one") == ("DONE", items, 9)
    assert await held(mirror) == {filled["two"]}
    await check_store(mirror)


async def test_other_selectors_name_one_revision_one_manifest_or_the_longest_unused(
    mirror: MirrorUnderTest, hub: Hub, filled: Filled
) -> None:
    hub.repo("org/three").commit({"a.txt": b"1"})
    tagged = await mirror.manifest(source("hf://org/three@main"))

    async def planned(**request: Any) -> dict[str, int]:
        status, items, _ = await evicted(mirror, dry_run=True, **request)
        assert status == "DONE"
        return items

    assert await planned(source="hf://org/three@main") == {tagged: 0}
    assert await planned(manifest=filled["old"]) == {filled["old"]: 3}
    await mirror.http.get(f"/manifests/{filled['old']}")  # used now
    assert await planned(lru_bytes=5 * MIB, tier="mirror") == {filled["new"]: 5}
    await mirror.ready(ONE)  # which uses the new one
    assert filled["new"] not in await planned(lru_bytes=4 * MIB, tier="mirror")
    for spares_the_mirror in ({"lru_bytes": 5}, {"job": "j"}, {"all": True, "tier": "node"}):
        assert await planned(**spares_the_mirror) == {}


async def test_everything_goes_and_can_be_mirrored_again(mirror: MirrorUnderTest, hub: Hub, filled: Filled) -> None:
    before = await mirror.ready(TWO)
    status, items, freed = await evicted(mirror, all=True)
    assert (status, set(items), freed) == ("DONE", set(filled.values()), 7 + 4 + 9)
    assert mirror.chunks() == {}
    tables = ("manifests", "chunks", "chunk_sets", "set_chunks", "identities")
    assert not any(mirror.rows(*tables).values())
    again = await mirror.ready(TWO)
    assert again["bytes_transferred"] == (7 + 4) * MIB
    assert again["sources"][0]["manifest"] == before["sources"][0]["manifest"]
    await check_store(mirror)


async def test_a_dry_run_tells_the_same_and_changes_nothing(mirror: MirrorUnderTest, filled: Filled) -> None:
    requests: list[Json] = [{"all": True}, {"lru_bytes": 1, "tier": "mirror"}, {"source": "hf://org/one"}]
    planned: Any = None
    for request in requests:
        before = mirror.rows(), mirror.chunks()
        planned = await evicted(mirror, dry_run=True, **request)
        after = mirror.rows(), mirror.chunks()
        for table in ("operations", "operation_parts"):
            assert len(after[0].pop(table)) == len(before[0].pop(table)) + 1
        assert after == before
    assert await evicted(mirror, **requests[-1]) == planned


async def test_force_of_a_plan__ends_the_leases_that_it_named_and_refuses_for_others(
    mirror: MirrorUnderTest, filled: Filled
) -> None:
    one, two = FakeAgent(mirror, "n1"), FakeAgent(mirror, "n2")

    def leased(*jobs: str) -> Json:
        holding = {"manifest": filled["two"], "bytes": MIB, "complete": True, "sources": [], "held_by": list(jobs)}
        return {"holdings": [holding]}

    def item(agent: FakeAgent, *holders: str) -> Json:
        place = {"tier": "node", "cluster": "c", "node": agent.state["node"]}
        return place | {"manifest": filled["two"], "bytes": MIB, "holders": list(holders)}

    await two.beat()
    await one.beat(**leased("early"))
    plan = await mirror.ask("evictions", manifest=filled["two"], force=True, dry_run=True)
    forced = {"manifest": filled["two"], "force": True, "plan": plan["id"]}
    unended = await mirror.http.post("/evictions", json=forced)
    await one.carry_out(await one.beat(), item(one, "job early (stage stg_1)"))
    await two.carry_out(await two.beat())
    await two.beat(**leased("late"))

    done = await mirror.ask("evictions", **forced)
    (told,) = (await one.beat(**leased("early")))["pending"]
    (other,) = (await two.beat(**leased("late")))["pending"]
    await one.carry_out({"pending": [told]}, item(one, "job early (stage stg_1)"))
    await two.carry_out({"pending": [other]}, item(two, "job late (stage stg_2)") | {"refused": True})

    assert refusal(unended) == (422, "INVALID_REQUEST")
    assert (told["evict"]["holders"], other["evict"]["holders"]) == (["job early (stage stg_1)"], [])
    done = await mirror.get(f"/evictions/{done['id']}", wait=LONGEST_SECONDS)
    assert (done["status"], [one["holders"] for one in done["items"] if one["tier"] == "mirror"]) == (
        "REFUSED",
        [["late on n2"]],
    )
    assert filled["two"] in await held(mirror)
    again = await mirror.ask("evictions", manifest=filled["two"], tier="mirror", force=True, dry_run=True)
    assert (await mirror.evict(**forced | {"plan": again["id"], "tier": "mirror"}))["status"] == "DONE"
    assert refusal(await mirror.http.post("/evictions", json=forced | {"plan": done["id"]}))[0] == 422
    assert refusal(await mirror.http.post("/evictions", json=forced | {"plan": f"evi_{'0' * 24}"}))[0] == 404


async def test_what_a_running_mirror_published_stays(mirror: MirrorUnderTest, hub: Hub, filled: Filled) -> None:
    hub.repo("org/slow").commit({"slow.bin": b"slow"})
    hub.fail(stall(), origin="cdn")
    begun = await mirror.begin(TWO, source("hf://org/slow"))
    await until(lambda: sum(row[5] == "READY" for row in mirror.rows("mirror_sources")["mirror_sources"]) == 4)
    for force in (False, True):
        document = await mirror.evict(manifest=filled["two"], force=force)
        assert (document["status"], document["bytes_freed"]) == ("REFUSED", 0)
        assert document["items"][0]["holders"] == [f"mirror {begun['id']}"]
    assert (await evicted(mirror, manifest=filled["old"]))[0] == "DONE"  # which has nothing to do with it
    hub.release_stalled()
    assert (await mirror.ended(begun["id"]))["grant"] is not None
    assert (await evicted(mirror, manifest=filled["two"]))[0] == "DONE"


async def test_chunks_that_could_not_be_deleted_are_collected_later_and_mirroring_goes_on(
    mirror: MirrorUnderTest, hub: Hub, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: DirectoryStore, digests: Collection[Digest], **_: object) -> None:
        raise NotDeletedError("the disk is away", frozenset(digests))

    before = mirror.chunks()
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryStore, "delete", fail)
        answer = await mirror.http.post("/evictions", json={"source": "hf://org/one"})
        assert refusal(answer) == (503, "STORE_UNAVAILABLE")
    (eviction,) = mirror.operations("eviction")
    document = await mirror.get(f"/evictions/{eviction}")
    assert (document["status"], len(document["items"])) == ("FAILED", 2)
    assert await held(mirror) == {filled["two"]}
    assert mirror.chunks() == before
    await mirror.ready(source("hf://org/two", "/again"))
    monkeypatch.setattr(chunks, "DELETE_SECONDS", 0.0)  # as if the deletion had expired
    await mirror.collect(grace_seconds=0)
    await mirror.ready(ONE)
    assert await held(mirror) == {filled["two"], filled["new"]}
    await check_store(mirror)


@pytest.mark.embedded("another process may be at work on a bucket or a shared directory")
async def test_what_a_mirror_was_deleting_when_it_ended_is_mirrored_at_once_by_the_next(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: DirectoryStore, digests: Collection[Digest], **_: object) -> None:
        raise NotDeletedError("the process ends here", frozenset(digests))

    hub.repo("org/one").commit({"w.bin": b"weights"})
    async with mirror_under_test(tmp_path) as mirror:
        await mirror.ready(ONE)
        monkeypatch.setattr(DirectoryStore, "delete", fail)
        answer = await mirror.http.post("/evictions", json={"source": "hf://org/one", "purge": True})
        assert refusal(answer) == (503, "STORE_UNAVAILABLE")
    async with mirror_under_test(tmp_path) as mirror:
        await mirror.ready(ONE)


async def test_an_eviction_whose_plan_fails_has_failed_and_evicted_nothing(
    mirror: MirrorUnderTest, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise DatabaseUnavailableError("scripted")

    before = mirror.chunks()
    with monkeypatch.context() as patch:
        patch.setattr(StoreEviction, "_plan", fail)
        assert (await mirror.http.post("/evictions", json={"all": True})).status_code == 503
    (eviction,) = mirror.operations("eviction")
    document = await mirror.get(f"/evictions/{eviction}")
    assert (document["status"], document["error"]["code"], document["items"]) == ("FAILED", "STORE_UNAVAILABLE", [])
    assert mirror.chunks() == before
    assert await held(mirror) == set(filled.values())
