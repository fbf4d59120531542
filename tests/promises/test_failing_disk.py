"""A disk of a node or of a cluster tier that fails, forbids, or takes nothing new: stages fail with the reason, the agent goes on."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bdn.core.chunk import Manifest, digest_of
from bdn.core.errors import BdnError, DiskFailedError
from bdn.net.http1.pool import ConnectionPool
from bdn.wire.operation_schema import EvictCommand
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts, read_only
from tests.support.agent.rig import MIB, Clock, Rig, metrics, noise, staged
from tests.support.agent.site import Site, ask, serving_agent
from tests.support.content.trees import tree
from tests.support.crash.forgetful_disk import ForgetfulDisk, forgetful_disk, needs_forgetful_disks
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("space")
FILES = {"f": noise(MIB, 1)}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


async def problems(site: Site, mirror: AgentMirror) -> dict[str, str | None]:
    """What both tiers say in a heartbeat, which has to come, and in the cache's document."""
    await site.agent.heartbeats.beat()
    told = mirror.heartbeats[-1].tiers
    document = (await site.http.get("/cache")).raise_for_status().json()["tiers"]
    assert {tier: use["problem"] for tier, use in document.items()} == {tier: use.problem for tier, use in told.items()}
    return {tier: use.problem for tier, use in told.items()}


async def readiness(site: Site) -> tuple[int, str | None, str]:
    answer = await site.http.get("/readyz")
    error = answer.json().get("error", {})
    return answer.status_code, error.get("code"), error.get("message", "")


async def test_while_a_disk_does_not_say_how_full_it_is_heartbeats_go_on_and_tell_why_nothing_new_comes_in(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with serving_agent(Rig(mirror, tmp_path)) as site:
        stage = await staged(site.agent, mirror, mirror.publish(FILES))
        assert await problems(site, mirror) == {"node": None, "cluster": None}
        with monkeypatch.context() as patched:
            patched.setattr(os, "statvfs", broken)
            told = f"the disk failed at {tmp_path / 'cache'}: Input/output error"
            assert await problems(site, mirror) == {"node": told, "cluster": told}
            use = mirror.heartbeats[-1].tiers["node"]
            assert (use.budget, use.committed, use.leased) == (MIB, MIB, MIB)
            figures = metrics((await site.http.get("/metrics")).raise_for_status().text)
            assert figures['bdn_agent_cache_budget_bytes{tier="node"}'] == MIB
            assert await readiness(site) == (503, "DISK_FAILED", told)
            assert (await site.http.get("/healthz")).status_code == 200
        assert await problems(site, mirror) == {"node": None, "cluster": None}
        assert await readiness(site) == (200, None, "")
        assert tree(Path(stage.mounts[0].path)) == FILES
    tally.add(scenarios=1, faults=1)


@needs_mounts
@pytest.mark.parametrize(("options", "taken"), [("16m", bytes(4096)), ("16m,nr_inodes=400", b"")])
async def test_a_full_disk_is_alive_and_not_ready_until_there_is_room_again(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, options: str, taken: bytes
) -> None:
    """Full of bytes, or of files."""
    with mounted_tmpfs(tmp_path / "disk", options) as disk:
        async with serving_agent(Rig(mirror, disk)) as site:
            await site.agent.heartbeats.beat()
            stage = await staged(site.agent, mirror, mirror.publish(FILES))
            assert await readiness(site) == (200, None, "")
            foreign = disk / "foreign"
            foreign.mkdir()
            with suppress(OSError):
                for number in range(10_000):
                    (foreign / f"{number}").write_bytes(taken)
            told = f"the disk failed at {disk / 'cache'}: No space left on device"
            assert await readiness(site) == (503, "DISK_FAILED", told)
            assert await problems(site, mirror) == {"node": told, "cluster": told}
            assert (await site.http.get("/healthz")).status_code == 200
            assert tree(Path(stage.mounts[0].path)) == FILES
            for one in foreign.iterdir():
                one.unlink()
            assert await readiness(site) == (200, None, "")
            again = await staged(site.agent, mirror, mirror.publish({"g": b"g"}), job="other")
            assert again.state == "READY"
    tally.add(scenarios=1, faults=1)


# --- The disk of a cluster tier fails: what it holds stays held and served, and nobody asks it in a loop ---


OLD, NEW = noise(2 * MIB, 1), noise(3 * MIB, 2)


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"cluster_cache_bytes": 4 * MIB})


async def asked(peer: ConnectionPool, agent: Agent, mirror: AgentMirror, manifest: Manifest, chunk: bytes) -> bytes:
    """What a peer gets."""
    return await ask(peer, agent.data_port, chunk, mirror.grant(manifest), manifest)


@needs_mounts
async def test_a_cluster_tier_whose_disk_turns_read_only_holds_what_it_held_and_takes_in_more_once_it_may_write(
    rig: Rig, mirror: AgentMirror, peer: ConnectionPool, tally: Tally
) -> None:
    old, new = mirror.publish({"f": OLD}), mirror.publish({"f": NEW})
    clock = Clock(time.time())
    async with rig.agent(clock) as agent:
        await agent.heartbeats.beat()
        tier = agent.evictions.tier
        await asked(peer, agent, mirror, old, OLD)
        clock.now += 61
        held = tier.held()
        assert [size for size, _ in held.values()] == [2 * MIB]
        with read_only(rig.cache / "cluster"):
            for _ in range(2):  # the first one left something behind that the second one waited for, for ever
                with pytest.raises(BdnError):
                    await asked(peer, agent, mirror, new, NEW)
                assert (tier.held(), tier.index.ledger.reserved_bytes) == (held, 0)
            with pytest.raises(DiskFailedError, match="Read-only file system"):
                await agent.evictions.evict(EvictCommand(id="evc", all=True, tier="cluster"))
            assert (tier.held(), tier.index.ledger.reserved_bytes) == (held, 0)
            tally.add(wrong=await asked(peer, agent, mirror, old, OLD) != OLD)
        clock.now += 61
        tally.add(wrong=await asked(peer, agent, mirror, new, NEW) != NEW)
        assert [size for size, _ in tier.held().values()] == [3 * MIB]
        assert mirror.chunk_requests == {digest_of(OLD): 1, digest_of(NEW): 1}
    tally.add(scenarios=2, faults=4, refused=3)


async def test_who_asks_for_a_chunk_that_is_for_ever_on_its_way_is_told_so_and_gets_it_once_it_is_not(
    rig: Rig, mirror: AgentMirror, peer: ConnectionPool, tally: Tally
) -> None:
    """Somebody else on the node has room for it, and does not come to hold it; there is no read to wait for."""
    manifest = mirror.publish({"f": NEW})
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        tier = agent.evictions.tier
        tier.index.admit(manifest.digest, digest_of(NEW), len(NEW), now=time.time(), budget=4 * MIB)
        with pytest.raises(BdnError, match="on its way to this node, and not here yet"):
            await asked(peer, agent, mirror, manifest, NEW)
        assert not mirror.chunk_requests
        tier.index.lose(digest_of(NEW))
        tally.add(wrong=await asked(peer, agent, mirror, manifest, NEW) != NEW)
    tally.add(scenarios=1, faults=1, refused=1)


# --- A disk that answers EIO when it is asked what stands where: stages fail for it, and the agent goes on ---


OTHER = {"g": noise(MIB, 2)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ForgetfulDisk]:
    with forgetful_disk(tmp_path) as disk:
        yield disk


@needs_forgetful_disks
@pytest.mark.parametrize("place", ["*/mounts/stg_*", "*.part"])
async def test_a_stage_that_fails_where_nothing_can_be_looked_at_is_failed_and_ends_no_other_and_comes_later(
    disk: ForgetfulDisk, mirror: AgentMirror, tally: Tally, place: str
) -> None:
    """Its view cannot be taken down, or what of it was begun cannot be told."""
    manifest = mirror.publish(FILES)
    async with Rig(mirror, disk.place, {"cluster_cache_bytes": 0}).agent() as agent:
        await agent.heartbeats.beat()
        held = await staged(agent, mirror, manifest)
        disk.refuse("lookup", place)
        for _ in range(2):
            with pytest.raises(BdnError, match=r"the disk failed at .*: Input/output error"):
                await staged(agent, mirror, mirror.publish(OTHER), job="other")
        assert disk.faults_met >= 4
        disk.mend()
        assert agent.stages.document(agent.stages.registry.find(held.id)).state == "READY"
        tally.add(wrong=tree(Path(held.mounts[0].path)) != FILES)
        other = await staged(agent, mirror, mirror.publish(OTHER), job="other")
        tally.add(wrong=tree(Path(other.mounts[0].path)) != OTHER)
        await agent.stages.release(other.id)
        ledger = agent.cache.index.ledger
        assert (ledger.committed_bytes, ledger.reserved_bytes) == (2 * MIB, 0)
        assert agent.cache.index.leases.leased() == (manifest.digest,)
    tally.add(scenarios=1, faults=2, refused=2)


async def put_aside(agent: Agent, held: str) -> None:
    """A file of a READY stage is found to be wrong: the stage is to be mended."""
    stage = agent.stages.registry.find(held)
    ((content, _),) = agent.cache.index.contents_of(next(iter(stage.record.manifests))).items()

    def take() -> bool:
        agent.places.file(content).unlink()
        return False

    await agent.cache.withdraw(content, take)


@needs_forgetful_disks
@pytest.mark.parametrize("place", ["*/mounts/stg_*", "*.part"])
async def test_a_stage_that_cannot_be_mended_where_nothing_can_be_looked_at_stays_and_is_mended_later(
    disk: ForgetfulDisk, mirror: AgentMirror, tally: Tally, place: str
) -> None:
    elapsed = Clock(0.0)
    async with Rig(mirror, disk.place, {"cluster_cache_bytes": 0}).agent(elapsed=elapsed) as agent:
        await agent.heartbeats.beat()
        held = await staged(agent, mirror, mirror.publish(FILES))
        stage = agent.stages.registry.find(held.id)
        await put_aside(agent, held.id)
        disk.refuse("lookup", place)
        await agent.housekeeping.reap()
        await stage.wait(None)
        disk.mend()
        document = agent.stages.document(stage)
        assert (document.state, document.error and document.error.code) == ("READY", "DISK_FAILED")
        tally.add(lost=tree(Path(held.mounts[0].path)) != FILES)  # what a job reads was not taken down
        elapsed.now += 301
        await agent.housekeeping.reap()
        await stage.wait(None)
        document = agent.stages.document(stage)
        assert (document.state, document.error) == ("READY", None)
        tally.add(wrong=tree(Path(held.mounts[0].path)) != FILES)
    tally.add(scenarios=1, faults=1, repaired=1)


@needs_forgetful_disks
async def test_an_eviction_on_a_deaf_disk_names_it(disk: ForgetfulDisk, mirror: AgentMirror, tally: Tally) -> None:
    async with Rig(mirror, disk.place, {"cluster_cache_bytes": 0, "cache_bytes": MIB}).agent() as agent:
        await agent.heartbeats.beat()
        old = await staged(agent, mirror, mirror.publish(FILES))
        await agent.stages.release(old.id)
        disk.refuse("unlink", "*/manifests/*")
        disk.refuse("lookup", "*/files/??/*")
        with pytest.raises(BdnError) as caught:
            await staged(agent, mirror, mirror.publish(OTHER), job="other")
        assert caught.value.code == "DISK_FAILED"
        disk.mend()
        ledger = agent.cache.index.ledger
        assert ledger.reserved_bytes == 0
        assert not agent.cache.index.leases.leased()
    tally.add(scenarios=1, faults=1, refused=1)
