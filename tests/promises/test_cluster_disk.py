"""The disk of a cluster tier fails: what it holds stays held and served, and nobody asks it in a loop."""

import time
from pathlib import Path

import pytest

from bdn.core.digest import digest_of
from bdn.core.errors import BdnError, DiskFailedError
from bdn.core.manifest import Manifest
from bdn.net.http1.pool import ConnectionPool
from bdn.wire.operation_schema import EvictCommand
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.mounts import needs_mounts, read_only
from tests.support.agent.peer import ask
from tests.support.agent.rig import MIB, Clock, Rig, noise
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("space")

OLD, NEW = noise(2 * MIB, 1), noise(3 * MIB, 2)


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


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
