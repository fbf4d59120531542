"""Whatever the network does between agents, mirror, peers, upstreams and those who ask: the right answer or a typed error, in bounded time."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from bdn.core.errors import BdnError
from bdn.core.layout import Manifest
from bdn.net.api_clients import MirrorClient
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, staged
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.network.fault_proxy import Exchange, Fault, FaultProxy, parted
from tests.support.network.fault_proxy_faults import (
    LASTING,
    PASSING,
    answers_busy,
    falls_silent,
    later,
    name_of,
    resets_at_once,
    trickles,
)
from tests.support.network.fault_proxy_ring import FaultyRing, faulty_ring
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("network")
FILES: Final = {
    "large": noise(17 * MIB + 3, 1),
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
    ring: FaultyRing, place: str, fault: Fault, tally: Tally
) -> None:
    manifest = ring.mirror.publish(FILES)
    proxy = ring.api if place == "api" else ring.content
    async with asyncio.timeout(LONGEST_SECONDS), ring.agent("node-1", byte_threads=2) as agent:
        proxy.play(fault)
        stage = await staged(agent, ring.mirror, manifest)

        tally.add(scenarios=1, faults=proxy.met.total(), wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert proxy.met[name_of(fault)] == 1
        assert stage.mounts[0].bytes_from.mirror == sum(map(len, FILES.values()))


@pytest.mark.parametrize("fault", [*LASTING, None], ids=lambda fault: name_of(fault) if fault else "refused")
@pytest.mark.parametrize("place", PLACES)
async def test_a_fault_that_lasts_names_the_place(
    ring: FaultyRing, place: str, fault: Fault | None, tally: Tally
) -> None:
    manifest = ring.mirror.publish(FILES)
    proxy = ring.api if place == "api" else ring.content
    async with asyncio.timeout(LONGEST_SECONDS), ring.agent("node-1", byte_threads=2) as agent:
        proxy.every = fault
        if fault is None:
            proxy.close_port()
        with pytest.raises(BdnError) as caught:
            await staged(agent, ring.mirror, manifest)
        shown = [path for mount in agent.places.mounts.rglob("*") for path in [mount] if path.is_file()]
        proxy.heal()
        if fault is None:
            proxy.open_port()
        stage = await staged(agent, ring.mirror, manifest)

        tally.add(scenarios=1, faults=proxy.met.total() or 1, refused=1, wrong=len(shown))
        tally.add(wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert (caught.value.code, caught.value.transient) == ("STORE_UNAVAILABLE", True)
        assert f"127.0.0.1:{proxy.port}" in str(caught.value)


@asynccontextmanager
async def pair(ring: FaultyRing) -> AsyncIterator[tuple[Manifest, FaultProxy, Agent]]:
    """What one node holds, the way to it, and another node that owns nothing."""
    manifest = ring.mirror.publish(FILES)
    async with ring.agent("holder") as holder, ring.agent("guest", roles="node") as guest:
        await staged(holder, ring.mirror, manifest)
        yield manifest, ring.peers["holder"], guest


def asks_for(ring: FaultyRing, manifest: Manifest, what: str) -> Callable[[str], bool]:
    """Whether a request is for one of the manifest's chunks of files, or pages, or for its root."""
    root = {manifest.digest}
    pages = ring.mirror.pages_of[manifest.digest] - root
    names = {"chunks": ring.mirror.chunks_of[manifest.digest], "pages": pages, "root": root}[what]
    return lambda asked: any(asked.endswith(str(name)) for name in names)


@pytest.mark.parametrize("what", ["chunks", "pages", "root"])
@pytest.mark.parametrize("fault", [*PASSING, parted], ids=name_of)
async def test_a_fault_of_a_peer_costs_a_retry(ring: FaultyRing, fault: Fault, what: str, tally: Tally) -> None:
    """Once, and in the full run whatever a peer is asked: then the mirror serves."""
    async with asyncio.timeout(LONGEST_SECONDS), pair(ring) as (manifest, proxy, guest):
        if what == "root":  # which peers are asked for when the mirror has failed
            ring.api.play(answers_busy)
        proxy.chosen = asks_for(ring, manifest, what)
        proxy.play(*[fault] * at_scale(1, 1000))
        stage = await staged(guest, ring.mirror, manifest)

        tally.add(scenarios=1, faults=proxy.met.total(), wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert proxy.met[name_of(fault)]
        assert stage.transfer is not None
        came = stage.mounts[0].bytes_from
        assert came.cluster + came.mirror == sum(map(len, FILES.values()))


@pytest.mark.parametrize("fault", [parted, falls_silent, resets_at_once, trickles], ids=name_of)
async def test_a_peer_that_stays_at_fault_is_left_and_the_mirror_is_asked(
    ring: FaultyRing, fault: Fault, tally: Tally
) -> None:
    """Neither what it is asked nor what it answers arrives; or it hears, and is not heard; or hardly anything comes."""
    async with asyncio.timeout(LONGEST_SECONDS), pair(ring) as (manifest, proxy, guest):
        proxy.chosen, proxy.every = asks_for(ring, manifest, "chunks"), fault
        stage = await staged(guest, ring.mirror, manifest)

        tally.add(scenarios=1, faults=proxy.met.total(), wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert proxy.met
        assert stage.mounts[0].bytes_from.cluster < sum(map(len, FILES.values()))
        assert stage.transfer is not None
        assert stage.transfer.retries
        assert stage.transfer.peers_avoided == ["holder"]
        ring.heal()


# --- Small documents between an agent and its mirror with a bit that is wrong, which TCP did not notice ---
DOCUMENTED: Final = {"large": noise(9_000_000, 1), **{f"small/{number}": noise(3000, number) for number in range(4)}}
DOCUMENT_SECONDS: Final = 1800.0  # thousands of requests, some of which wait for an answer that never comes
SEED: Final = 20261122
TYPED: Final = ("CHECKSUM_MISMATCH", "INTERNAL")


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed(is_packed=True)


@pytest.fixture
def proxy(mirror: AgentMirror) -> Iterator[FaultProxy]:
    with FaultProxy(("127.0.0.1", int(mirror.url.rpartition(":")[2]))).running() as proxy:
        yield proxy


def flips(bit: int) -> Fault:
    """That bit of the body, counted around."""

    async def flips_one(exchange: Exchange) -> bool:
        answer = await exchange.perform()
        body = bytearray(answer.body)
        body[bit // 8 % len(body)] ^= 1 << bit % 8
        await exchange.send(answer.head + bytes(body))
        return True

    return flips_one


def bits(count: int) -> list[int]:
    chosen = random.Random(SEED)
    return [chosen.randrange(1 << 20) for _ in range(count)]


async def test_a_root_with_a_wrong_bit_is_an_error_or_fails_one_stage_with_one(
    mirror: AgentMirror, proxy: FaultProxy, tmp_path: Path, tally: Tally
) -> None:
    """Where the mirror serves chunks, no name says: that is found out when they are asked for."""
    manifest, unnoticed = mirror.publish(DOCUMENTED), []
    async with asyncio.timeout(DOCUMENT_SECONDS):
        async with MirrorClient(proxy.url) as client:
            right = await client.root(manifest.digest, mirror.grant(manifest))
            for bit in bits(at_scale(100, 1000)):
                proxy.play(flips(bit))
                try:
                    found = await client.root(manifest.digest, mirror.grant(manifest))
                except BdnError as error:
                    tally.add(scenarios=1, faults=1, refused=1, wrong=error.code not in TYPED)
                else:
                    unnoticed += [bit] if found != right else []
                    tally.add(wrong=found[0] not in (None, right[0]))
        for bit in unnoticed[: at_scale(4, 40)]:
            await _stage_by_a_wrong_root(Rig(mirror, tmp_path / f"{bit}", {"url": proxy.url}), proxy, bit, tally)


async def _stage_by_a_wrong_root(rig: Rig, proxy: FaultProxy, bit: int, tally: Tally) -> None:
    """The stage is right, or has failed; the next one is right."""
    manifest = rig.mirror.publish(DOCUMENTED)
    async with rig.agent(byte_threads=1) as agent:
        proxy.chosen = lambda asked: "/manifests/" in asked
        proxy.play(flips(bit))
        try:
            first = await staged(agent, rig.mirror, manifest, job="first")
            tally.add(wrong=tree(Path(first.mounts[0].path)) != DOCUMENTED)
        except BdnError:
            tally.add(refused=1)
        met = proxy.met.total()
        proxy.heal()
        stage = await staged(agent, rig.mirror, manifest, job="next")
        tally.add(scenarios=1, faults=1, wrong=tree(Path(stage.mounts[0].path)) != DOCUMENTED)
        assert met


async def test_a_heartbeat_s_answer_with_a_wrong_bit_costs_an_error_and_no_truth(
    mirror: AgentMirror, proxy: FaultProxy, tmp_path: Path, tally: Tally
) -> None:
    """Whatever was told wrong, the agent stages what it holds without the mirror, and anything else after a heartbeat."""
    held, other = mirror.publish(DOCUMENTED), mirror.publish({"other": b"other"})
    async with asyncio.timeout(DOCUMENT_SECONDS), Rig(mirror, tmp_path, {"url": proxy.url}).agent() as agent:
        await agent.heartbeats.beat()
        stage = await staged(agent, mirror, held)
        for number, bit in enumerate(bits(at_scale(150, 1500))):
            proxy.play(flips(bit))
            try:
                await agent.heartbeats.beat()
            except BdnError:
                tally.add(refused=1)
            proxy.heal()
            if number % 10 == 0:
                proxy.is_parted = True
                again = await staged(agent, mirror, held, job=f"{number}")
                proxy.is_parted = False
                await agent.stages.release(again.id)
            tally.add(scenarios=1, faults=1)
        await agent.heartbeats.beat()
        after = await staged(agent, mirror, other, job="other")

        tally.add(wrong=tree(Path(stage.mounts[0].path)) != DOCUMENTED)
        tally.add(lost=not agent.cache.index.is_complete(held.digest))
        assert tree(Path(after.mounts[0].path)) == {"other": b"other"}
