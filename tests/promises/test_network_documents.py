"""Small documents between an agent and its mirror with a bit that is wrong, which TCP did not notice.

Manifests and layouts have names to be compared with, and so have the keys that grants are verified with. Of the rest, what
cannot be believed is an error, and the next heartbeat brings it right.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from bdn.core.errors import BdnError
from bdn.net.client import MirrorClient
from bdn.wire.errors import WrongDocumentError
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, noise, staged
from tests.support.content.trees import tree
from tests.support.network.fault_proxy import Exchange, Fault, FaultProxy
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("network")
pytest_plugins = ("tests.support.agent.fixtures",)

FILES: Final = {"large": noise(9_000_000, 1), **{f"small/{number}": noise(3000, number) for number in range(4)}}
LONGEST_SECONDS: Final = 120.0
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


async def test_a_manifest_with_a_wrong_bit_is_an_error(
    mirror: AgentMirror, proxy: FaultProxy, tally: Tally, scale: Scale
) -> None:
    manifest = mirror.publish(FILES)
    async with asyncio.timeout(LONGEST_SECONDS), MirrorClient(proxy.url) as client:
        for bit in bits(scale.of(100, 1000)):
            proxy.play(flips(bit))
            with pytest.raises(WrongDocumentError):
                await client.manifest(manifest.digest, mirror.grant(manifest))
            tally.add(scenarios=1, faults=1, refused=1)


async def test_a_layout_with_a_wrong_bit_is_an_error_or_fails_one_stage_with_one(
    mirror: AgentMirror, proxy: FaultProxy, tmp_path: Path, tally: Tally, scale: Scale
) -> None:
    """Where a small file lies in a slab, no name says: that is found out when its bytes come, or do not."""
    manifest, unnoticed = mirror.publish(FILES), []
    async with asyncio.timeout(LONGEST_SECONDS):
        async with MirrorClient(proxy.url) as client:
            right = await client.layout(manifest.digest, mirror.grant(manifest))
            for bit in bits(scale.of(100, 1000)):
                proxy.play(flips(bit))
                try:
                    found = await client.layout(manifest.digest, mirror.grant(manifest))
                except BdnError as error:
                    tally.add(scenarios=1, faults=1, refused=1, wrong=error.code not in TYPED)
                else:
                    unnoticed += [bit] if found != right else []
        assert unnoticed
        for bit in unnoticed[: scale.of(4, 40)]:
            await _stage_by_a_wrong_layout(Rig(mirror, tmp_path / f"{bit}", {"url": proxy.url}), proxy, bit, tally)


async def _stage_by_a_wrong_layout(rig: Rig, proxy: FaultProxy, bit: int, tally: Tally) -> None:
    """The stage is right, or has failed; the next one is right."""
    manifest = rig.mirror.publish(FILES)
    async with rig.agent(byte_threads=1) as agent:
        proxy.chosen = lambda asked: "/layout" in asked
        proxy.play(flips(bit))
        try:
            first = await staged(agent, rig.mirror, manifest, job="first")
            tally.add(wrong=tree(Path(first.mounts[0].path)) != FILES)
        except BdnError:
            tally.add(refused=1)
        met = proxy.met.total()
        proxy.heal()
        stage = await staged(agent, rig.mirror, manifest, job="next")
        tally.add(scenarios=1, faults=1, wrong=tree(Path(stage.mounts[0].path)) != FILES)
        assert met


async def test_a_heartbeat_s_answer_with_a_wrong_bit_costs_an_error_and_no_truth(
    mirror: AgentMirror, proxy: FaultProxy, tmp_path: Path, tally: Tally, scale: Scale
) -> None:
    """Whatever was told wrong, the agent stages what it holds without the mirror, and anything else after a heartbeat."""
    held, other = mirror.publish(FILES), mirror.publish({"other": b"other"})
    async with asyncio.timeout(LONGEST_SECONDS), Rig(mirror, tmp_path, {"url": proxy.url}).agent() as agent:
        await agent.heartbeats.beat()
        stage = await staged(agent, mirror, held)
        for number, bit in enumerate(bits(scale.of(150, 1500))):
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

        tally.add(wrong=tree(Path(stage.mounts[0].path)) != FILES)
        tally.add(lost=not agent.cache.index.is_complete(held.digest))
        assert tree(Path(after.mounts[0].path)) == {"other": b"other"}
