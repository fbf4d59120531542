"""Verifications as the mirror records them: told to agents until they report, on both databases, and on the command line."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bdn.core.digest import digest_of
from bdn.mirror.db.agents import ALIVE_SECONDS
from bdn.wire.grants import GrantVerifier
from tests.doubles.hub import Hub
from tests.support.agent.rig import Clock
from tests.support.crash.rot import rot
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import LONGEST_SECONDS, Json, MirrorUnderTest, mirror_under_test, source
from tests.support.services.cluster import Cluster

pytest_plugins = ("tests.support.mirror.fixtures",)

MODEL = source("hf://org/model")
CONTENT = b"12345"
DAMAGED = {"tier": "node", "chunk": f"b3:{'1' * 64}", "outcome": "lost", "reason": "its bytes are others"}


@pytest.fixture
async def either(
    hub: Hub, upstreams: None, database_options: dict[str, Any], tmp_path: Path
) -> AsyncIterator[MirrorUnderTest]:
    """A mirror that holds a model, on either database."""
    hub.repo("org/model").commit({"a.txt": CONTENT})
    async with mirror_under_test(tmp_path / "mirror", scrub_seconds=0, **database_options) as mirror:
        await mirror.ready(MODEL)
        yield mirror


async def begun(mirror: MirrorUnderTest, wait: float = 0, **request: Any) -> Json:
    answer = await mirror.http.post("/verifications", params={"wait": wait}, json=request)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def ended(mirror: MirrorUnderTest, verification: Json) -> Json:
    answer = await mirror.http.get(f"/verifications/{verification['id']}", params={"wait": LONGEST_SECONDS})
    assert answer.json()["status"] != "RUNNING"
    return dict(answer.json())


def report(verification: Json, **facts: Any) -> Json:
    return {"id": verification["id"], "verify": facts}


async def test_store_and_agents_together_make_the_outcome(either: MirrorUnderTest) -> None:
    one, two = FakeAgent(either, "n1"), FakeAgent(either, "n2")
    await one.beat()
    await two.beat()
    waiting = asyncio.create_task(one.beat(wait_seconds=30))
    await asyncio.sleep(0)
    verification = await begun(either, all=True)
    (command,) = (await asyncio.wait_for(waiting, 10))["pending"]
    told = command["verify"]
    assert (told["id"], told["all"], told["manifests"], told["repair"]) == (verification["id"], True, None, True)
    assert (await one.beat())["pending"] == [command]  # it may have restarted
    at_work = {"id": told["id"], "running": True}
    assert (await one.beat(reports=[at_work], wait_seconds=0.2))["pending"] == []
    assert (await one.beat(reports=[report(told, items=[DAMAGED], chunks_read=7, bytes_read=70)]))["pending"] == []
    assert (await begun(either, tier="mirror", all=True, wait=LONGEST_SECONDS))["status"] == "DONE"
    answer = await either.http.get(f"/verifications/{told['id']}")
    assert answer.json()["status"] == "RUNNING"
    await two.beat(reports=[report(told, chunks_read=1, bytes_read=5)])
    done = await ended(either, verification)
    (item,) = done["items"]
    assert (done["status"], item["cluster"], item["node"], item["outcome"]) == ("DAMAGED", "c", "n1", "lost")
    assert (done["chunks_read"], done["bytes_read"]) == (9, 75 + len(CONTENT))


async def test_an_agent_that_shall_mend_is_lent_grants_for_what_it_holds_and_no_more(either: MirrorUnderTest) -> None:
    (manifest,) = [item["manifest"] for item in (await either.http.get("/manifests")).json()["items"]]
    other = f"b3:{'2' * 64}"
    holding = {"complete": True, "bytes": 5, "held_by": []}
    agent = FakeAgent(either, "n1", holdings=[{"manifest": name, **holding} for name in (manifest, other)])
    await agent.beat()
    await begun(either, all=True, tier="node")
    told = (await agent.beat())["pending"][0]["verify"]
    (token,) = told["grants"]
    keys = (await agent.beat())["public_keys"]
    grant = GrantVerifier(keys).verify(token, now=time.time())
    assert [str(mount.manifest) for mount in grant.mounts] == [manifest]
    await agent.beat(reports=[report(told)])
    await begun(either, all=True, tier="node", repair=False)
    told = (await agent.beat())["pending"][0]["verify"]
    assert told["grants"] == []


async def test_a_damaged_store_is_repaired_on_either_database(either: MirrorUnderTest, hub: Hub) -> None:
    path = either.data_dir / "store/chunks" / digest_of(CONTENT).fanout
    rot(path, "flipped")
    done = await begun(either, source="hf://org/model", wait=LONGEST_SECONDS)
    assert (done["status"], [item["outcome"] for item in done["items"]]) == ("DONE", ["repaired"])
    assert path.read_bytes() == CONTENT
    told = await either.http.get("/events", params={"digest": str(digest_of(CONTENT))})
    assert sorted(event["kind"] for event in told.json()["items"]) == ["damaged", "repaired"]


async def test_an_agent_that_falls_silent_is_unreachable_and_the_others_count(upstreams: None, tmp_path: Path) -> None:
    clock = Clock()
    async with mirror_under_test(tmp_path / "mirror", clock=clock, scrub_seconds=0, collect_seconds=0) as mirror:
        one, two = FakeAgent(mirror, "n1"), FakeAgent(mirror, "n2")
        await one.beat()
        await two.beat()
        verification = await begun(mirror, all=True, tier="node")
        await one.beat(reports=[report(verification)])
        assert (await mirror.http.get(f"/verifications/{verification['id']}")).json()["status"] == "RUNNING"
        clock.now += ALIVE_SECONDS
        done = await ended(mirror, verification)
        assert (done["status"], done["unreachable"]) == ("FAILED", ["c/n2"])
        late = await begun(mirror, all=True, tier="node", wait=LONGEST_SECONDS)
        assert (late["status"], late["unreachable"]) == ("FAILED", ["c/n1", "c/n2"])


async def test_what_cannot_be_verified_is_refused(idle: MirrorUnderTest) -> None:
    table: list[tuple[Json, int]] = [
        ({}, 422),
        ({"all": True, "source": "hf://org/model"}, 422),
        ({"manifest": "latest"}, 422),
        ({"manifest": f"b3:{'0' * 64}"}, 404),
        ({"source": "hf://org/other"}, 404),
        ({"all": True, "node": "nobody"}, 404),
    ]
    for body, status in table:
        assert (await idle.http.post("/verifications", json=body)).status_code == status, body
    assert (await idle.http.get(f"/verifications/ver_{'0' * 24}")).status_code == 404


def test_the_command_tells_damage_that_is_left_from_damage_that_is_repaired(tmp_path: Path, hub: Hub) -> None:
    hub.repo("org/model").commit({"a.txt": CONTENT})
    cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url})
    with cluster.mirror():
        shell, store = cluster.shell(), cluster.root / "mirror/data/store"
        shell.root.mkdir()
        mirrored = shell.run("bdn", "mirror", "hf://org/model", "--mount", "/m", "--wait", "--json").document
        manifest = mirrored["sources"][0]["manifest"]
        chunk = store / "chunks" / digest_of(CONTENT).fanout
        rot(chunk, "zeroed")
        looked = shell.run("bdn-admin", "verify", "--all", "--no-repair")
        assert (looked.code, looked.out.count("damaged mirror")) == (1, 1), looked.out + looked.err
        assert "a.txt of hf://org/model" in looked.out
        repaired = shell.run("bdn-admin", "verify", manifest, "--json")
        assert (repaired.code, [item["outcome"] for item in repaired.document["items"]]) == (0, ["repaired"])
        assert chunk.read_bytes() == CONTENT
        assert shell.run("bdn-admin", "verify", "hf://org/other").code == 4
