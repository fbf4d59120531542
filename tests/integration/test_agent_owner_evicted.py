"""Chunks of an owner that are evicted while peers read them or wait for them: right bytes or a clean error, right counts."""

import asyncio
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from bdn.core.errors import InvalidRequestError
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.wire.http_fields import MANIFEST_HEADER, chunk_path
from bdn.wire.operation_schema import EvictCommand, EvictedItem
from node_agent.app import Agent
from node_agent.cache.cache_events import over_budget
from node_agent.cache.held_chunks import HeldChunks
from tests.support.agent.mirror import AgentMirror, held_by
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.agent.rig import MIB, Rig, noise, staged
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)

LARGE = noise(17 * MIB, 1)
PIECES = [LARGE[start : start + CHUNK_SIZE] for start in range(0, len(LARGE), CHUNK_SIZE)]
FILES = {"large": LARGE}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"auth": "token", "cluster_cache_bytes": 20 * MIB})


@pytest.fixture
def peers() -> Iterator[ThreadPoolExecutor]:
    """Not the loop's own threads: the agent in this process needs them to answer."""
    with ThreadPoolExecutor(4) as threads:
        yield threads


def asked_by(peers: ThreadPoolExecutor, agent: Agent, piece: bytes, manifest: str, grant: str) -> asyncio.Future[bytes]:
    """What a peer gets for a chunk."""
    request = (
        f"GET {chunk_path(digest_of(piece))} HTTP/1.1\r\nHost: peer\r\nAuthorization: Bearer {grant}\r\n"
        f"{MANIFEST_HEADER}: {manifest}\r\nConnection: close\r\n\r\n"
    )

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", agent.data_port), timeout=60) as connection:
            connection.sendall(request.encode())
            with connection.makefile("rb") as answer:
                return answer.read().rpartition(b"\r\n\r\n")[2]

    return asyncio.get_running_loop().run_in_executor(peers, ask)


async def evict_chunks(agent: Agent) -> list[EvictedItem]:
    return await agent.evictions.evict(EvictCommand(id="e", all=True, tier="cluster"))


async def check_counts(agent: Agent) -> None:
    """What is counted is what lies on the disk."""
    chunks = agent.places.root / "cluster" / "chunks"
    on_disk = {path.stat().st_ino: path.stat().st_size for path in chunks.rglob("*") if path.is_file()}
    use = (await agent.holdings.tiers())["cluster"]
    assert (use.committed, use.reserved) == (sum(on_disk.values()), 0)
    assert not list((chunks.parent / "incoming").iterdir())


async def test_a_peer_that_has_begun_to_read_a_chunk_gets_the_rest_of_it(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish(FILES)
    head = f"Host: peer\r\nAuthorization: Bearer {mirror.grant(manifest)}\r\n{MANIFEST_HEADER}: {manifest.digest}"
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        reader, writer = await asyncio.open_connection("127.0.0.1", agent.data_port)
        writer.write(f"GET {chunk_path(digest_of(PIECES[0]))} HTTP/1.1\r\n{head}\r\n\r\n".encode())
        while b"200 OK" not in (answer := await reader.readuntil(b"\r\n\r\n")):
            assert b"102" in answer
        begun = await reader.readexactly(1000)

        (item,) = await evict_chunks(agent)
        assert item.bytes == CHUNK_SIZE
        await check_counts(agent)
        assert (await agent.holdings.tiers())["cluster"].committed == 0
        assert begun + await reader.readexactly(CHUNK_SIZE - 1000) == PIECES[0]
        writer.close()


async def test_a_peer_that_waits_for_a_chunk_gets_it_although_its_manifest_is_evicted_meanwhile(
    rig: Rig, mirror: AgentMirror, peers: ThreadPoolExecutor
) -> None:
    manifest, gate, reading = mirror.publish(FILES), threading.Event(), asyncio.Event()
    digest, loop = digest_of(PIECES[0]), asyncio.get_running_loop()
    mirror.faults[digest] = [held_by(gate)]
    mirror.on_request = lambda _: loop.call_soon_threadsafe(reading.set)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        asked = asked_by(peers, agent, PIECES[0], str(manifest.digest), mirror.grant(manifest))
        await reading.wait()
        (item,) = await evict_chunks(agent)
        assert item.bytes == 0  # nothing is there yet; its room is counted until it has come
        gate.set()

        assert await asked == PIECES[0]
        assert mirror.chunk_requests[digest] == 2  # what came first had no name any more
        await check_counts(agent)
        assert (await agent.holdings.tiers())["cluster"].committed == CHUNK_SIZE


async def test_a_chunk_that_is_evicted_as_soon_as_it_has_come_is_obtained_again(
    rig: Rig, mirror: AgentMirror, peers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, looks, open_for = mirror.publish(FILES), itertools.count(), HeldChunks.open_for

    def open_after_an_eviction(self: HeldChunks, request: ChunkRequest) -> OpenChunk:
        if not next(looks):
            held = self._tier.index.ledger.used_bytes
            self._tier.evict(lambda index: index.plan_lru(held), "lru", over_budget("cluster", held, 0, 0))
        return open_for(self, request)

    monkeypatch.setattr(HeldChunks, "open_for", open_after_an_eviction)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        assert await asked_by(peers, agent, PIECES[0], str(manifest.digest), mirror.grant(manifest)) == PIECES[0]
        assert mirror.chunk_requests[digest_of(PIECES[0])] == 2
        await check_counts(agent)


async def test_peers_a_stage_and_evictions_that_do_not_wait_for_one_another(
    rig: Rig, mirror: AgentMirror, peers: ThreadPoolExecutor
) -> None:
    manifest = mirror.publish(FILES)
    grant = mirror.grant(manifest)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()

        async def evict_again_and_again() -> None:
            while True:
                await evict_chunks(agent)
                await agent.housekeeping.reap()

        async with asyncio.timeout(60):
            evicting = asyncio.create_task(evict_again_and_again())
            asked = [asked_by(peers, agent, piece, str(manifest.digest), grant) for piece in PIECES * 4]
            stage = await staged(agent, mirror, manifest)
            got = await asyncio.gather(*asked)
            evicting.cancel()

        assert got == PIECES * 4
        assert tree(Path(stage.mounts[0].path)) == FILES
        await check_counts(agent)


def fill_up(disk: Path, name: str) -> None:
    """Others take all that is left, but for a little that the agent writes its records with."""
    free = os.statvfs(disk)
    (disk / name).write_bytes(bytes(free.f_bavail * free.f_frsize - MIB // 4))


@needs_mounts
async def test_when_others_fill_the_disk_files_go_before_chunks_that_the_cluster_needs(
    mirror: AgentMirror, tmp_path: Path, peers: ThreadPoolExecutor
) -> None:
    mine, theirs = mirror.publish({"mine": noise(9 * MIB, 2)}), mirror.publish(FILES)
    with mounted_tmpfs(tmp_path / "disk", "40m") as disk:
        given = {"cache_bytes": 10**12, "cluster_cache_bytes": 8 * MIB, "headroom_bytes": 4 * MIB, "keep_percent": 0}
        async with Rig(mirror, disk, given).agent() as agent:
            await agent.heartbeats.beat()
            stage = await staged(agent, mirror, mine)
            await agent.stages.release(stage.id)
            await asked_by(peers, agent, PIECES[0], str(theirs.digest), mirror.grant(theirs))

            async def held() -> dict[str, int]:
                await agent.housekeeping.reap()
                return {tier: use.committed for tier, use in (await agent.holdings.tiers()).items()}

            assert await held() == {"node": 9 * MIB, "cluster": CHUNK_SIZE}
            fill_up(disk, "foreign")
            assert await held() == {"node": 0, "cluster": CHUNK_SIZE}
            fill_up(disk, "more")
            assert await held() == {"node": 0, "cluster": 0}
            await check_counts(agent)


async def test_a_cluster_cache_alone_feeds_nodes_that_own_nothing(mirror: AgentMirror, tmp_path: Path) -> None:
    manifest = mirror.publish(FILES)
    mirror.ring = {}
    cache = Rig(mirror, tmp_path / "cache", {"node": "cache", "roles": "cluster", "cache_bytes": 40 * MIB})
    node = Rig(mirror, tmp_path / "node", {"node": "node", "roles": "node"})
    async with cache.agent() as owner, node.agent() as worker:
        for agent in (owner, worker, owner, worker):
            await agent.heartbeats.beat()
        stage = await staged(worker, mirror, manifest)
        assert stage.mounts[0].bytes_from.cluster == len(LARGE)
        assert set(mirror.chunk_requests.values()) == {1}
        assert (await owner.holdings.tiers())["cluster"].committed == len(LARGE)

        with pytest.raises(InvalidRequestError):
            await owner.stages.start("job", mirror.grant(manifest))
