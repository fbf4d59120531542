"""Prefetches on a node: what they bring stays in the cache, and is leased only while it is being brought."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.core.chunk import Digest
from bdn.core.layout import Manifest
from bdn.wire.heartbeat_schema import Report
from bdn.wire.operation_schema import EvictCommand, PrefetchCommand
from node_agent.app import Agent
from tests.support.agent.cache import at_once
from tests.support.agent.mirror import AgentMirror, fresh_mirror, held_by
from tests.support.agent.rig import Rig, staged
from tests.support.content.noise import MIB, noise
from tests.support.waiting import until

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror

FILES = {"a.bin": noise(17 * MIB + 3, 1), "b.bin": noise(3 * MIB, 2)}
SIZE = sum(map(len, FILES.values()))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds chunks back; opened at the end, so that no thread of the server waits for it any longer."""
    opened = threading.Event()
    yield opened
    opened.set()


async def ended(agent: Agent, mirror: AgentMirror) -> Report:
    """What the agent says last of its only prefetch."""
    async with asyncio.timeout(30):
        while not mirror.reports("pre_1"):
            await agent.heartbeats.beat()
            await asyncio.sleep(0.01)
    return mirror.reports("pre_1")[0]


async def begun(agent: Agent, mirror: AgentMirror, manifest: Manifest, last: Digest) -> None:
    """A prefetch is at work, and has asked for its last chunk."""
    requested = mirror.asked(last.__eq__)
    mirror.ask(PrefetchCommand(id="pre_1", grant=mirror.grant(manifest)))
    await agent.heartbeats.beat()
    async with asyncio.timeout(30):
        await requested.wait()


async def test_a_prefetch_leaves_the_content_in_the_cache_without_a_lease(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest = mirror.publish(FILES)
    mirror.heartbeats.clear()
    async with Rig(mirror, tmp_path).agent() as agent:
        mirror.ask(PrefetchCommand(id="pre_1", grant=mirror.grant(manifest)))
        report = await ended(agent, mirror)

        assert report.error is None
        assert report.prefetch is not None
        assert (report.prefetch.bytes_total, report.prefetch.bytes_from.mirror) == (SIZE, SIZE)
        assert agent.cache.index.is_complete(manifest.digest)
        (victim,) = at_once(agent.cache.index.planning([manifest.digest])).victims
        assert victim.holders == ()

        def told() -> list[tuple[bool, list[str]]]:
            return [(one.complete, one.held_by) for recorded in mirror.held.values() for one in recorded.held.values()]

        await until(lambda: told() == [(True, [])], "the lease's end is told")
        mirror.forget()
        stage = await staged(agent, mirror, manifest)
        assert (stage.mounts[0].bytes_from.node, mirror.requests) == (SIZE, 0)


async def test_a_grant_that_is_not_the_mirror_s_fails_the_prefetch(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest = mirror.publish(FILES)
    async with Rig(mirror, tmp_path).agent() as agent:
        mirror.ask(PrefetchCommand(id="pre_1", grant=AgentMirror().grant(manifest)))
        report = await ended(agent, mirror)

    assert report.error is not None
    assert report.error.code == "GRANT_INVALID"
    assert mirror.requests == 0


async def test_a_prefetch_goes_on_after_a_restart(mirror: AgentMirror, tmp_path: Path, gate: threading.Event) -> None:
    manifest = mirror.publish(FILES)
    last = mirror.chunks(manifest, "a.bin")[-1]
    mirror.faults[last].append(held_by(gate))
    rig = Rig(mirror, tmp_path, {"byte_threads": 1})
    async with rig.agent() as agent:
        await begun(agent, mirror, manifest, last)
    mirror.forget()
    mirror.heartbeats.clear()
    async with rig.agent() as agent:
        report = await ended(agent, mirror)

    assert report.error is None
    assert last in mirror.chunk_requests
    assert not {*mirror.chunks(manifest, "a.bin")[:-1]} & mirror.chunk_requests.keys()


async def test_only_force_evicts_a_running_prefetch(mirror: AgentMirror, tmp_path: Path, gate: threading.Event) -> None:
    manifest = mirror.publish(FILES)
    last = mirror.chunks(manifest, "a.bin")[-1]
    mirror.faults[last].append(held_by(gate))
    async with Rig(mirror, tmp_path).agent() as agent:
        await begun(agent, mirror, manifest, last)

        refused = await agent.evictions.evict(EvictCommand(id="evi_1", all=True, tier="node"))
        assert [(item.refused, item.holders) for item in refused] == [(True, ["job prefetch (stage pre_1)"])]
        async with asyncio.timeout(30):
            forced = await agent.evictions.evict(EvictCommand(id="evi_2", all=True, tier="node", force=True))
        assert [item.refused for item in forced] == [False]
        report = await ended(agent, mirror)
        assert report.error is not None
        assert report.error.code == "CANCELED"
        assert agent.cache.index.manifests() == ()


async def test_a_prefetch_keeps_to_its_rate_and_a_stage_does_not_wait_for_it(
    mirror: AgentMirror, tmp_path: Path
) -> None:
    slow, wanted = mirror.publish({"f": FILES["a.bin"]}), mirror.publish({"f": FILES["b.bin"]})
    requested = mirror.asked({*mirror.chunks(slow, "f")}.__contains__)
    async with Rig(mirror, tmp_path).agent(prefetch_rate=1) as agent:  # one chunk, and the next one in months
        mirror.ask(PrefetchCommand(id="pre_1", grant=mirror.grant(slow)))
        await agent.heartbeats.beat()
        async with asyncio.timeout(30):
            await requested.wait()
        await staged(agent, mirror, wanted)
        assert sum(mirror.chunk_requests[chunk] for chunk in mirror.chunks(slow, "f")) == 1
