"""A disk of a node or of a cluster tier that fails, forbids, or takes nothing new: stages fail with the reason, the agent goes on."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from bdn.core.chunk import digest_of
from bdn.core.errors import BdnError, DiskFailedError
from bdn.core.layout import Manifest
from bdn.net.http1.pool import ConnectionPool
from bdn.wire.operation_schema import EvictCommand
from bdn.wire.stage_schema import StageDocument
from node_agent.app import Agent
from tests.fakes.clock import Clock
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts, read_only
from tests.support.agent.rig import Rig, metrics, staged
from tests.support.agent.site import Site, ask, serving_agent
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.crash.forgetful_disk import ForgetfulDisk, needs_forgetful_disks
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("space")
FILES = {"f": noise(MIB, 1)}


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


@dataclass(frozen=True)
class Trouble:
    """What befalls the disk of a cache, and how it is told by readiness, and to a stage that brings something new."""

    befalls: Callable[[Path], AbstractContextManager[None]]
    told: str
    refused: str
    size: str = ""  # of the file system in memory that it befalls


@contextmanager
def filled(cache: Path, content: bytes) -> Iterator[None]:
    """A neighbour has taken all bytes, or all files."""
    foreign = cache.parent / "foreign"
    foreign.mkdir()
    with suppress(OSError):
        for number in range(10_000):
            (foreign / f"{number}").write_bytes(content)
    yield
    for one in foreign.iterdir():
        one.unlink()


@contextmanager
def silent(_: Path) -> Iterator[None]:
    """It does not say how full it is."""

    def broken(_: object) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "statvfs", broken)
        yield


NO_SPACE, NO_ANSWER = "No space left on device", "Input/output error"
TROUBLES = {
    "full": Trouble(lambda cache: filled(cache, bytes(4096)), NO_SPACE, NO_SPACE, "16m"),
    "full of files": Trouble(lambda cache: filled(cache, b""), NO_SPACE, NO_SPACE, "16m,nr_inodes=400"),
    "read-only": Trouble(read_only, "it is mounted read-only", "Read-only file system"),
    "silent": Trouble(silent, NO_ANSWER, NO_ANSWER),
}


MOMENTS = [(what, at_start) for what in TROUBLES for at_start in (False, True)]
MOMENTS.remove(("full of files", True))  # which leaves no place for the socket that it is asked at


@needs_mounts
@pytest.mark.parametrize(
    ("what", "at_start"), MOMENTS, ids=[f"{what}-{'at its start' if begins else 'later'}" for what, begins in MOMENTS]
)
async def test_an_agent_whose_disk_takes_nothing_new_says_so_and_serves_what_it_holds(
    mirror: AgentMirror, tmp_path: Path, what: str, at_start: bool
) -> None:
    trouble, root = TROUBLES[what], tmp_path / "disk"
    root.mkdir()
    with mounted_tmpfs(root, trouble.size) if trouble.size else nullcontext():
        rig = Rig(mirror, root, {"cache_bytes": 4 * MIB})
        async with serving_agent(rig) as site:
            held = await staged(site.agent, mirror, mirror.publish(FILES))
            await site.agent.stages.renew(held.id, 1000)
            old = await staged(site.agent, mirror, mirror.publish({"old": noise(MIB, 2)}), job="old")
            await site.agent.stages.release(old.id)
            assert await readiness(site) == (200, None, "")
            if not at_start:
                with trouble.befalls(rig.cache):
                    await endure(site, mirror, trouble, held)
                await recover(site, mirror, held)
        if at_start:
            with trouble.befalls(rig.cache):
                async with serving_agent(rig) as site:
                    await endure(site, mirror, trouble, held)
            async with serving_agent(rig) as site:
                await recover(site, mirror, held)


async def endure(site: Site, mirror: AgentMirror, trouble: Trouble, held: StageDocument) -> None:
    agent, view = site.agent, Path(held.mounts[0].path)
    manifests = agent.cache.index.manifests()
    told = f"the disk failed at {agent.places.root}: {trouble.told}"
    assert await readiness(site) == (503, "DISK_FAILED", told)
    assert (await site.http.get("/healthz")).status_code == 200
    assert await problems(site, mirror) == {"node": told, "cluster": told}
    use = mirror.heartbeats[-1].tiers["node"]
    assert (use.committed, use.leased) == (2 * MIB, MIB)
    figures = metrics((await site.http.get("/metrics")).raise_for_status().text)
    assert figures['bdn_agent_cache_budget_bytes{tier="node"}'] == use.budget
    with pytest.raises(BdnError, match=trouble.refused):
        await staged(agent, mirror, mirror.publish({"g": b"g"}), job="other")
    if trouble.refused == NO_SPACE:  # what cannot be recorded is not begun
        assert not any(stage.record.job_id == "other" for stage in agent.stages.registry.all())
    with suppress(DiskFailedError):  # it is logged, and tried again
        await agent.housekeeping.reap()
    assert (agent.cache.index.manifests(), len(manifests)) == (manifests, 2)
    assert agent.cache.index.leases.is_leased(mirror.publish(FILES).digest)
    assert agent.stages.document(agent.stages.registry.find(held.id)).state == "READY"
    assert tree(view) == FILES


async def recover(site: Site, mirror: AgentMirror, held: StageDocument) -> None:
    assert await readiness(site) == (200, None, "")
    assert await problems(site, mirror) == {"node": None, "cluster": None}
    assert tree(Path(held.mounts[0].path)) == FILES
    assert (await staged(site.agent, mirror, mirror.publish({"g": b"g"}), job="other")).state == "READY"


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
        tier = agent.cache.chunks.tier
        await asked(peer, agent, mirror, old, OLD)
        clock.now += 61
        held = tier.held()
        assert [size for size, _ in held.values()] == [2 * MIB]
        with read_only(rig.cache / "cluster"):
            for _ in range(2):  # the first one left something behind that the second one waited for, for ever
                with pytest.raises(BdnError):
                    await asked(peer, agent, mirror, new, NEW)
                assert (tier.held(), tier.ledger.reserved_bytes) == (held, 0)
            with pytest.raises(DiskFailedError, match="Read-only file system"):
                await agent.evictions.evict(EvictCommand(id="evc", all=True, tier="cluster"))
            assert (tier.held(), tier.ledger.reserved_bytes) == (held, 0)
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
        tier = agent.cache.chunks.tier
        tier.ledger.reserve(digest_of(NEW), len(NEW))
        with pytest.raises(BdnError, match="still fetching chunk"):
            await asked(peer, agent, mirror, manifest, NEW)
        assert not mirror.chunk_requests
        tier.ledger.release(digest_of(NEW))
        tally.add(wrong=await asked(peer, agent, mirror, manifest, NEW) != NEW)
    tally.add(scenarios=1, faults=1, refused=1)


# --- A disk that answers EIO when it is asked what stands where: stages fail for it, and the agent goes on ---


OTHER = {"g": noise(MIB, 2)}


@needs_forgetful_disks
@pytest.mark.parametrize("place", ["*/mounts/stg_*", "*.part"])
async def test_a_stage_that_fails_where_nothing_can_be_looked_at_is_failed_and_ends_no_other_and_comes_later(
    disk: ForgetfulDisk, mirror: AgentMirror, tally: Tally, place: str
) -> None:
    """Its view cannot be taken down, or what of it was begun cannot be told."""
    manifest = mirror.publish(FILES)
    async with Rig(mirror, disk.place, {"cluster_cache_bytes": 0}).agent() as agent:
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
