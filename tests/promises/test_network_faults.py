"""Whatever the network does between an agent, the mirror and peers: right files in bounded time, or an error that names the place."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from bdn.core.errors import BdnError
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, metrics, noise, staged
from tests.support.content.trees import tree
from tests.support.network.fault_proxy import Fault, parted
from tests.support.network.fault_proxy_faults import LASTING, PASSING, Swap, later, name_of, trickles
from tests.support.network.fault_proxy_ring import FaultyRing, faulty_ring
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("network")
pytest_plugins = ("tests.support.agent.fixtures",)

FILES: Final = {
    "large": noise(17 * MIB, 1),
    "other": noise(8 * MIB, 2),
    **{f"small/{number}": noise(30_000 + number, 100 + number) for number in range(4)},
}
LONGEST_SECONDS: Final = 60.0
PLACES: Final = ("api", "content")


@pytest.fixture
def ring(server: AgentMirror, tmp_path: Path) -> Iterator[FaultyRing]:
    with faulty_ring(server.renewed(is_packed=True), tmp_path) as ring:
        yield ring


@pytest.mark.parametrize("fault", [*PASSING, later(0.2)], ids=name_of)
@pytest.mark.parametrize("place", PLACES)
async def test_a_fault_on_the_way_to_the_mirror_costs_time_alone(
    ring: FaultyRing, place: str, fault: Fault, tally: Tally, scale: Scale
) -> None:
    times = scale.of(1, 2)
    manifest = ring.mirror.publish(FILES)
    proxy = ring.api if place == "api" else ring.content
    async with asyncio.timeout(LONGEST_SECONDS), ring.agent("node-1", byte_threads=2) as agent:
        proxy.play(*[fault] * times)
        stage = await staged(agent, ring.mirror, manifest)

        tally.add(scenarios=1, faults=proxy.met.total(), wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert proxy.met[name_of(fault)] == times
        assert stage.mounts[0].bytes_from.mirror == sum(map(len, FILES.values()))


@pytest.mark.parametrize("fault", LASTING, ids=name_of)
@pytest.mark.parametrize("place", PLACES)
async def test_a_fault_that_lasts_fails_the_stage_and_names_the_place(
    ring: FaultyRing, place: str, fault: Fault, tally: Tally
) -> None:
    manifest = ring.mirror.publish(FILES)
    proxy = ring.api if place == "api" else ring.content
    async with asyncio.timeout(LONGEST_SECONDS), ring.agent("node-1", byte_threads=2) as agent:
        proxy.every = fault
        with pytest.raises(BdnError) as caught:
            await staged(agent, ring.mirror, manifest)
        shown = [path for mount in agent.places.mounts.rglob("*") for path in [mount] if path.is_file()]
        proxy.heal()
        stage = await staged(agent, ring.mirror, manifest)

        tally.add(scenarios=1, faults=proxy.met.total(), refused=1, wrong=len(shown))
        tally.add(wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)
        assert f"127.0.0.1:{proxy.port}" in str(caught.value)


@pytest.mark.parametrize("place", PLACES)
async def test_a_mirror_that_refuses_connections_is_named_and_is_asked_again(
    ring: FaultyRing, place: str, tally: Tally
) -> None:
    manifest = ring.mirror.publish(FILES)
    proxy = ring.api if place == "api" else ring.content
    async with asyncio.timeout(LONGEST_SECONDS), ring.agent("node-1", byte_threads=2) as agent:
        proxy.close_port()
        with pytest.raises(BdnError, match=f"127.0.0.1:{proxy.port}") as caught:
            await staged(agent, ring.mirror, manifest)
        proxy.open_port()
        stage = await staged(agent, ring.mirror, manifest)

        tally.add(scenarios=1, faults=1, refused=1, wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)


async def test_right_sized_chunks_in_each_others_place_are_found_out(ring: FaultyRing, tally: Tally) -> None:
    manifest = ring.mirror.publish(FILES)
    swap = Swap()
    async with asyncio.timeout(LONGEST_SECONDS), ring.agent("node-1", byte_threads=4) as agent:
        ring.content.play(*[swap.swaps] * 4)
        stage = await staged(agent, ring.mirror, manifest)

        figures = metrics(agent.metrics.render(await agent.holdings.tiers()).decode())
        tally.add(scenarios=1, faults=swap.swapped, wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert swap.swapped
        assert figures["bdn_agent_verification_failures_total"]


@pytest.mark.parametrize("fault", [*PASSING, parted], ids=name_of)
async def test_a_fault_on_the_way_to_a_peer_costs_a_retry_at_most(
    ring: FaultyRing, fault: Fault, tally: Tally, scale: Scale
) -> None:
    """Once, and in the full run whatever a peer is asked: then the mirror serves."""
    manifest = ring.mirror.publish(FILES)
    async with (
        asyncio.timeout(LONGEST_SECONDS),
        ring.agent("holder") as holder,
        ring.agent("guest", roles="node") as guest,
    ):
        await staged(holder, ring.mirror, manifest)
        proxy = ring.peers["holder"]
        proxy.play(*[fault] * scale.of(1, 1000))
        stage = await staged(guest, ring.mirror, manifest)

        tally.add(scenarios=1, faults=proxy.met.total(), wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert proxy.met[name_of(fault)]
        assert stage.transfer is not None
        came = stage.mounts[0].bytes_from
        assert came.cluster + came.mirror == sum(map(len, FILES.values()))


async def test_a_peer_that_trickles_is_left_and_counted(ring: FaultyRing, tally: Tally) -> None:
    manifest = ring.mirror.publish(FILES)
    async with (
        asyncio.timeout(LONGEST_SECONDS),
        ring.agent("holder") as holder,
        ring.agent("guest", roles="node") as guest,
    ):
        await staged(holder, ring.mirror, manifest)
        ring.peers["holder"].every = trickles
        stage = await staged(guest, ring.mirror, manifest)

        tally.add(scenarios=1, faults=ring.peers["holder"].met.total(), wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert stage.transfer is not None
        assert stage.transfer.retries
        assert stage.transfer.peers_avoided == ["holder"]
