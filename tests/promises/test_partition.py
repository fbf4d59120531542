"""The mirror, its database, its store or the peers are out of reach: what can be done is done, the rest says so and goes on later."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

from bdn.core.errors import BdnError
from bdn.mirror.api import control
from bdn.mirror.ingest import worker
from bdn.net.api_server import bind_tcp, serving
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Rig, noise, staged
from tests.support.content.trees import tree
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, until
from tests.support.network.fault_proxy import Fault, parted
from tests.support.network.fault_proxy_bytes import ByteProxy
from tests.support.network.fault_proxy_faults import falls_silent, name_of, resets_at_once
from tests.support.network.fault_proxy_ring import FaultyRing, faulty_ring
from tests.support.promises.tally import Tally

pytestmark = pytest.mark.promise("network")
pytest_plugins = ("tests.support.agent.fixtures", "tests.support.mirror.fixtures")

FILES: Final = {"large": noise(17 * MIB, 1), **{f"small/{number}": noise(30_000, number) for number in range(4)}}
SIZE: Final = sum(map(len, FILES.values()))
MODEL: Final = source("hf://org/model")


@pytest.fixture
def ring(server: AgentMirror, tmp_path: Path) -> Iterator[FaultyRing]:
    with faulty_ring(server.renewed(is_packed=True), tmp_path) as ring:
        yield ring


@pytest.mark.parametrize("how", ["parted", "refused"])
async def test_a_cluster_serves_what_it_holds_while_the_mirror_is_away_for_the_whole_stage(
    ring: FaultyRing, how: str, tally: Tally
) -> None:
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
async def test_a_node_that_sees_the_mirror_and_no_peer_stages_from_the_mirror(
    ring: FaultyRing, fault: Fault, tally: Tally
) -> None:
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
    monkeypatch.setattr(control, "PROBE_SECONDS", 1.0)
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


async def test_a_store_that_goes_away_fails_what_needs_it_and_nothing_is_lost(
    upstreams: None, hub: Hub, tmp_path: Path, tally: Tally
) -> None:
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
