"""The mirror, its database, its store or the peers are out of reach or fail: what can be done is done, the rest says so and goes on later."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from bdn.core.errors import BdnError
from bdn.mirror import scrub
from bdn.mirror.api import routes
from bdn.mirror.ingest import worker
from bdn.net.api_server import bind_tcp, serving
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Rig, noise, staged
from tests.support.content.trees import tree
from tests.support.crash.forgetful_disk import ForgetfulDisk, forgetful_disk, needs_forgetful_disks
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, until
from tests.support.network.fault_proxy import ByteProxy, Fault, parted
from tests.support.network.fault_proxy_faults import falls_silent, name_of, resets_at_once
from tests.support.network.fault_proxy_ring import FaultyRing, faulty_ring
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures", "tests.support.mirror.fixtures")
pytestmark = pytest.mark.promise("network")
FILES: Final = {"large": noise(17 * MIB, 1), **{f"small/{number}": noise(30_000, number) for number in range(4)}}
SIZE: Final = sum(map(len, FILES.values()))
MODEL: Final = source("hf://org/model")


@pytest.fixture
def ring(server: AgentMirror, tmp_path: Path) -> Iterator[FaultyRing]:
    with faulty_ring(server.renewed(is_packed=True), tmp_path) as ring:
        yield ring


@pytest.mark.parametrize("how", ["parted", "refused"])
async def test_a_cluster_serves_what_it_holds_without_the_mirror(ring: FaultyRing, how: str, tally: Tally) -> None:
    """Also to a node that never saw the manifest and owns chunks that only others hold."""
    manifest = ring.mirror.publish(FILES)
    async with asyncio.timeout(60), ring.agent("node-1") as first, ring.agent("node-2") as second:
        await ring.ring.staged_by_all(manifest, [first, second])
        async with ring.agent("late") as late:
            if how == "parted":
                ring.part_mirror()
            else:
                ring.api.close_port()
                ring.content.close_port()
            ring.mirror.forget()
            stage = await staged(late, ring.mirror, manifest)
            again = await staged(first, ring.mirror, manifest, job="again")

            tally.add(scenarios=2, faults=1, wrong=tree(Path(stage.mounts[0].path)) != FILES)
            assert stage.mounts[0].bytes_from.model_dump() == {"node": 0, "cluster": SIZE, "mirror": 0}
            assert again.mounts[0].bytes_from.node == SIZE
            ring.heal()


@pytest.mark.parametrize("fault", [parted, falls_silent, resets_at_once], ids=name_of)
async def test_a_node_that_sees_no_peer_asks_the_mirror(ring: FaultyRing, fault: Fault, tally: Tally) -> None:
    """Neither what it asks peers nor what they answer arrives; or they hear it, and it does not hear them."""
    manifest = ring.mirror.publish(FILES)
    async with asyncio.timeout(60), ring.agent("node-1") as first, ring.agent("node-2") as second:
        await staged(first, ring.mirror, manifest)
        for proxy in ring.peers.values():
            proxy.every = fault
        stage = await staged(second, ring.mirror, manifest)

        met = sum(proxy.met.total() for proxy in ring.peers.values())
        tally.add(scenarios=1, faults=met, wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert met
        assert stage.mounts[0].bytes_from.cluster < SIZE
        assert stage.transfer is not None
        assert stage.transfer.peers_avoided == ["node-1"]
        ring.heal()


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[tuple[ByteProxy, str]]:
    """A migrated PostgreSQL behind a proxy, and the address that leads through it."""
    server = urlsplit(postgres_url)
    proxy = ByteProxy((server.hostname or "", server.port or 0))
    with proxy.running():
        yield proxy, postgres_url.replace(f":{server.port}/", f":{proxy.port}/")


@pytest.mark.parametrize("how", ["cut", "refused", "parted"])
async def test_a_database_that_goes_away_is_named_and_what_ran_goes_on_when_it_is_back(
    database: tuple[ByteProxy, str],
    upstreams: None,
    hub: Hub,
    tmp_path: Path,
    how: str,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections cut (as in a failover), the server stopped, or all packets lost."""
    for name, seconds in (("POLL_SECONDS", 0.02), ("RENEW_SECONDS", 0.05), ("CLAIM_SECONDS", 1.0)):
        monkeypatch.setattr(worker, name, seconds)
    monkeypatch.setattr(routes, "PROBE_SECONDS", 1.0)
    proxy, url = database
    hub.repo("org/model").commit({"w.bin": FILES["large"]})
    hub.fail(stall(), origin="cdn", times=None)
    async with asyncio.timeout(60), mirror_under_test(tmp_path / "mirror", database_url=url, jobs=1) as mirror:
        begun = await mirror.begin(MODEL)
        await until(lambda: hub.log.count(origin="cdn"), "the copy has begun")
        if how == "cut":
            proxy.cut()
        elif how == "refused":
            proxy.close_port()
            await _refused(mirror, tally)
            proxy.open_port()
        else:
            proxy.is_parted = True
            try:
                await _not_ready(mirror)
            finally:
                proxy.is_parted = False
                proxy.cut()  # a connection that lost bytes is of no use to either side
        hub.release_stalled()
        await _ready_again(mirror)
        document = await mirror.ended(begun["id"])

        tally.add(scenarios=1, faults=1, lost=document["status"] != "READY")
        assert document["error"] is None
        tally.add(wrong=await mirror.tree(document["sources"][0]["manifest"]) != {"w.bin": FILES["large"]})


async def _refused(mirror: MirrorUnderTest, tally: Tally) -> None:
    """Every call says which part is away, and that asking again may help."""
    agent = FakeAgent(mirror, "node")
    heartbeat = await mirror.http.post("/agents/heartbeat", json=agent.state)
    for answer in (await mirror.post(MODEL), await mirror.http.get("/mirror"), heartbeat):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["retryable"]) == (503, "STORE_UNAVAILABLE", True)
        tally.add(refused=1)
    await _not_ready(mirror)


async def _not_ready(mirror: MirrorUnderTest) -> None:
    answer = await mirror.http.get("/readyz")
    assert answer.status_code == 503
    assert "database" in answer.json()["error"]["message"]


async def _ready_again(mirror: MirrorUnderTest) -> None:
    """The first answers after a failover may still be of connections that are gone: one for each in the pool."""
    for _ in range(200):
        if (await mirror.http.get("/readyz")).status_code == 200:
            return
    pytest.fail("the mirror does not come back")


async def test_a_store_that_goes_away_loses_nothing(upstreams: None, hub: Hub, tmp_path: Path, tally: Tally) -> None:
    """During a mirror, a stage and an eviction; each of them works when the store is back."""
    hub.repo("org/model").commit({"w.bin": FILES["large"]})
    hub.repo("org/other").commit({"o.bin": FILES["large"][: 3 * MIB]})
    async with asyncio.timeout(60), mirror_under_test(tmp_path / "mirror", serve=True) as mirror:
        ready = await mirror.ready(MODEL)
        listener = bind_tcp("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        rig = Rig(AgentMirror(), tmp_path / "node", {"url": url})
        async with serving(mirror.service.api, listener), rig.agent() as agent:
            await agent.heartbeats.beat()
            chunks = tmp_path / "mirror/store/chunks"
            away = chunks.rename(tmp_path / "away")

            readiness = await mirror.http.get("/readyz")
            failed = await mirror.mirror(source("hf://org/other"))
            begun = await agent.stages.start("job", ready["grant"])
            with pytest.raises(BdnError) as stage_error:
                await agent.stages.finish(begun.record.id)
            away.rename(chunks)
            stage = await agent.stages.finish((await agent.stages.start("job-2", ready["grant"])).record.id)
            mirrored = await mirror.ready(source("hf://org/other"))

            tally.add(scenarios=3, faults=1, refused=3)
            tally.add(wrong=tree(Path(str(stage.mounts[0].path))) != {"w.bin": FILES["large"]})
            assert readiness.status_code == 503
            assert "store" in readiness.json()["error"]["message"]
            assert (failed["error"]["code"], failed["error"]["retryable"]) == ("STORE_UNAVAILABLE", True)
            assert (stage_error.value.code, stage_error.value.transient) == ("STORE_UNAVAILABLE", True)
            assert mirrored["bytes_total"] == 3 * MIB


# --- The disk under the mirror's store fails, or refuses: whoever needs it is told so, and what it held and had to lose is not forgotten ---
LONGEST_SECONDS: Final = 60.0
STORED: Final = {"w.bin": noise(9 * MIB, 1), "config.json": b"{}"}
OTHERS: Final = {"o.bin": noise(MIB, 2)}
OTHER: Final = source("hf://org/other")
STEPS: Final = [
    ("unlink", "store/aside/*", errno.EIO),
    ("rename", "store/chunks/*", errno.EACCES),
    ("create", "store/incoming/*", errno.EACCES),
    ("write", "store/incoming/*", errno.EIO),
    ("fsync", "store/incoming/*", errno.EIO),
    ("rename", "store/incoming*", errno.EROFS),
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ForgetfulDisk]:
    with forgetful_disk(tmp_path) as disk:
        yield disk


@pytest.fixture
def repositories(upstreams: None, hub: Hub) -> None:
    hub.repo("org/model").commit(STORED)
    hub.repo("org/other").commit(OTHERS)


@asynccontextmanager
async def mirror_on(disk: ForgetfulDisk, root: Path) -> AsyncIterator[MirrorUnderTest]:
    """Its database is elsewhere; what is evicted is to go at once."""
    settings: Json = {"store": f"file://{disk.place / 'store'}", "tombstone_seconds": 0}
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(root / "mirror", **settings) as mirror:
        yield mirror


def files(disk: ForgetfulDisk) -> list[Path]:
    """All of the store but its evidence."""
    return [path for path in (disk.place / "store").rglob("*") if path.is_file() and path.parent.name != "quarantine"]


def switch_off(disk: ForgetfulDisk) -> None:
    """From now on every call answers EIO."""
    disk.fail_at(1, [])
    with pytest.raises(OSError, match="Input/output"):
        (disk.place / "anything").touch()


def check_away(error: Any) -> None:
    assert (error["code"], error["retryable"]) == ("STORE_UNAVAILABLE", True), error
    assert "store" in error["message"]


@needs_forgetful_disks
@pytest.mark.parametrize(("kind", "path", "number"), STEPS[2:], ids=[kind for kind, *_ in STEPS[2:]])
@pytest.mark.usefixtures("repositories")
async def test_a_copy_that_the_disk_refuses_is_typed_and_goes_on_when_it_does_not(
    disk: ForgetfulDisk, tmp_path: Path, kind: str, path: str, number: int, tally: Tally
) -> None:
    async with mirror_on(disk, tmp_path) as mirror:
        disk.refuse(kind, path, number=number)
        error = await mirror.failed(MODEL)
        met = disk.faults_met
        disk.mend()
        document = await mirror.ready(MODEL)
        found = await mirror.tree(document["sources"][0]["manifest"])

    tally.add(scenarios=1, faults=met, refused=1, wrong=found != STORED)
    check_away(error)
    assert os.strerror(number) in error["message"]


@needs_forgetful_disks
@pytest.mark.usefixtures("repositories")
async def test_a_store_that_is_away_is_named_to_everybody(disk: ForgetfulDisk, tmp_path: Path, tally: Tally) -> None:
    async with mirror_on(disk, tmp_path) as mirror:
        kept, lost = await mirror.ready(MODEL), await mirror.ready(OTHER)
        manifest, victim = kept["sources"][0]["manifest"], lost["sources"][0]["manifest"]
        layout = (await mirror.http.get(f"/manifests/{manifest}/layout")).json()
        before = len(files(disk))
        switch_off(disk)
        answers = [
            await mirror.http.get("/readyz"),
            await mirror.http.get(f"/chunks/{layout['files'][0]['chunks'][0]}"),
            await mirror.http.post("/evictions", json={"manifest": victim, "tier": "mirror"}),
        ]
        asked = await mirror.http.post("/collections", params={"wait": 20}, json={"grace_seconds": 0})
        disk.lose_power("kept")
        is_ready = (await mirror.http.get("/readyz")).is_success
        found = await mirror.tree(manifest)
        collected = await mirror.collect()
        again = await mirror.ready(OTHER)
        back = await mirror.tree(again["sources"][0]["manifest"])

    tally.add(scenarios=5, faults=1, refused=4, wrong=(found != STORED) + (back != OTHERS), lost=not is_ready)
    for answer in answers:
        assert answer.status_code == 503
        check_away(answer.json()["error"])
    assert asked.json()["status"] == "FAILED"
    check_away(asked.json()["error"])
    assert collected["bytes_freed"] == len(OTHERS["o.bin"]), "it was evicted while the store was away"
    assert len(files(disk)) == before


@needs_forgetful_disks
@pytest.mark.usefixtures("repositories")
async def test_a_verification_of_a_store_that_is_away_calls_nothing_damaged_and_goes_on_when_it_is_back(
    disk: ForgetfulDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(scrub, "_AWAY_SECONDS", 0.01)
    async with mirror_on(disk, tmp_path) as mirror:
        document = await mirror.ready(MODEL)
        switch_off(disk)
        begun = (await mirror.http.post("/verifications", params={"wait": 1}, json={"all": True})).json()
        damaged = mirror.count("damaged_chunks")
        disk.lose_power("kept")
        ended = await mirror.http.get(f"/verifications/{begun['id']}", params={"wait": LONGEST_SECONDS})
        found = await mirror.tree(document["sources"][0]["manifest"])

    tally.add(scenarios=1, faults=1, refused=1, wrong=found != STORED, lost=damaged)
    assert begun["status"] == "RUNNING"
    assert (ended.json()["status"], ended.json()["items"]) == ("DONE", [])


@needs_forgetful_disks
@pytest.mark.parametrize(("kind", "path", "number"), STEPS[:2], ids=["unlink", "rename"])
@pytest.mark.usefixtures("repositories")
async def test_an_eviction_that_the_disk_refuses_is_made_up_for_by_the_next_collection(
    disk: ForgetfulDisk, tmp_path: Path, kind: str, path: str, number: int, tally: Tally
) -> None:
    async with mirror_on(disk, tmp_path) as mirror:
        document = await mirror.ready(OTHER)
        disk.refuse(kind, path, number=number)
        evicting = {"manifest": document["sources"][0]["manifest"], "tier": "mirror"}
        refused = await mirror.http.post("/evictions", json=evicting)
        met = disk.faults_met
        disk.mend()
        gone = await mirror.http.get(f"/manifests/{evicting['manifest']}")
        await mirror.collect(grace_seconds=0)

    tally.add(scenarios=1, faults=met, refused=1, lost=len(files(disk)))
    assert met
    check_away(refused.json()["error"])
    assert gone.status_code == 404
