"""An owner that is told that a chunk of its own came wrong looks before it gives it again, also to who names the manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from bdn.core.errors import NotFoundError
from bdn.core.manifest import Manifest
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import PartialChunk
from bdn.transfer.http_chunks import HttpChunkReader
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Rig, noise, staged
from tests.support.crash.rot import cached, flip

pytest_plugins = ("tests.support.agent.fixtures",)

LARGE = noise(9 * MIB, 1)
FIRST = LARGE[:CHUNK_SIZE]


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"auth": "token", "cluster_cache_bytes": 20 * MIB})


@pytest.fixture
def peer() -> Iterator[ConnectionPool]:
    pool = ConnectionPool(timeout_seconds=20)
    yield pool
    pool.close()


async def ask(pool: ConnectionPool, agent: Agent, grant: str, manifest: Manifest, *, is_suspect: bool) -> bytes:
    buffer = memoryview(bytearray(len(FIRST)))
    reader = HttpChunkReader(pool, f"http://127.0.0.1:{agent.data_port}", grant, manifest.digest, is_suspect=is_suspect)
    with ThreadPoolExecutor(1) as thread:
        await asyncio.get_running_loop().run_in_executor(
            thread, reader.read_into, PartialChunk(digest_of(FIRST), buffer)
        )
    return bytes(buffer)


async def test_a_suspected_chunk_of_the_cluster_tier_is_read_and_one_that_is_wrong_is_obtained_again(
    rig: Rig, mirror: AgentMirror, peer: ConnectionPool
) -> None:
    manifest = mirror.publish({"large": LARGE})
    grant = mirror.grant(manifest)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        assert await ask(peer, agent, grant, manifest, is_suspect=False) == FIRST
        assert await ask(peer, agent, grant, manifest, is_suspect=True) == FIRST
        assert mirror.chunk_requests == {digest_of(FIRST): 1}
        flip(agent.scrub.scrubber.tier.files.path(manifest.digest, digest_of(FIRST)), 9)
        assert await ask(peer, agent, grant, manifest, is_suspect=True) == FIRST
        assert mirror.chunk_requests == {digest_of(FIRST): 2}


async def test_a_suspected_chunk_of_a_whole_file_that_is_wrong_is_not_given_and_the_scrub_is_told(
    rig: Rig, mirror: AgentMirror, peer: ConnectionPool
) -> None:
    manifest = mirror.publish({"large": LARGE})
    grant = mirror.grant(manifest)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        await ask(peer, agent, grant, manifest, is_suspect=False)  # so the owner has the manifest's list of chunks
        await staged(agent, mirror, manifest)
        await agent.housekeeping.reap()  # what the whole file has is not kept twice
        flip(cached(agent, manifest, "large"), 9)
        with pytest.raises(NotFoundError):
            await ask(peer, agent, grant, manifest, is_suspect=True)
        await agent.scrub.catch_up()
        assert cached(agent, manifest, "large").read_bytes() == LARGE
        assert await ask(peer, agent, grant, manifest, is_suspect=True) == FIRST
