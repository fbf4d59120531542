"""An agent that owns chunks: it obtains them for peers, holds them within a budget, evicts them, also while they are read."""

import asyncio
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import BdnError, InvalidRequestError, NotFoundError, StoreUnavailableError
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.net.http1.pool import ConnectionPool
from bdn.wire.http_fields import MANIFEST_HEADER, chunk_path
from bdn.wire.operation_schema import EvictCommand, EvictedItem
from node_agent.app import Agent
from node_agent.cache.cache_events import over_budget
from node_agent.cache.held_chunks import HeldChunks
from tests.support.agent.mirror import AgentMirror, failing, flipped, held_by
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.agent.process import Program
from tests.support.agent.rig import MIB, Clock, Rig, metrics, noise, staged
from tests.support.agent.site import ask
from tests.support.content.trees import tree
from tests.support.crash.rot import cached, flip
from tests.support.network.ports import free_port

pytest_plugins = ("tests.support.agent.fixtures",)
LARGE = noise(9 * MIB, 1)
FILES = {"large": LARGE, "small": b"small", "other": b"other"}


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed(is_packed=True)


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"auth": "token", "cluster_cache_bytes": 20 * MIB})


FIRST = LARGE[:CHUNK_SIZE]
LAST = LARGE[CHUNK_SIZE:]


def figures(agent: Agent, use: Any) -> dict[str, float]:
    return metrics(agent.metrics.render(use).decode())


async def test_many_peers_cost_one_read_of_the_mirror(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        grants = [mirror.grant(manifest, expires_in=3600 + number) for number in range(8)]
        got = await asyncio.gather(*(ask(peer, agent.data_port, FIRST, grant, manifest) for grant in grants))

        assert got == [FIRST] * 8
        assert mirror.chunk_requests == {digest_of(FIRST): 1}
        assert len([path for path in mirror.documents if path.endswith("/layout")]) == 1
        assert sum(mirror.documents.values()) == 1
        assert (await agent.holdings.tiers())["cluster"].committed == CHUNK_SIZE
        text = figures(agent, await agent.holdings.tiers())
        assert (text["bdn_agent_obtained_chunks_total"], text["bdn_agent_obtained_bytes_total"]) == (1, CHUNK_SIZE)


async def test_a_slab_is_obtained_as_a_chunk(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    (slab,) = mirror.chunks(manifest, "small")
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        assert sorted(await ask(peer, agent.data_port, slab, mirror.grant(manifest), manifest, 10)) == sorted(
            b"smallother"
        )


async def test_what_is_held_is_served_after_a_restart(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    grant = mirror.grant(manifest)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        await ask(peer, agent.data_port, FIRST, grant, manifest)
    async with rig.agent(url="http://127.0.0.1:1") as agent:
        assert await ask(peer, agent.data_port, FIRST, grant, manifest) == FIRST
        assert await ask(peer, agent.data_port, FIRST, grant, None) == FIRST
        with pytest.raises(BdnError) as refused:
            await ask(peer, agent.data_port, LAST, grant, manifest)
        assert refused.value.transient


async def test_without_the_manifest_nothing_is_obtained(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        with pytest.raises(NotFoundError):
            await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), None)
    assert mirror.requests == 0


async def test_who_owns_nothing_obtains_nothing(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent(roles="node") as agent:
        await agent.heartbeats.beat()
        with pytest.raises(NotFoundError):
            await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest)
        await staged(agent, mirror, manifest)
        assert await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest) == FIRST
        assert (await agent.holdings.tiers()).keys() == {"node"}


async def test_a_grant_is_good_for_its_own_chunks_alone(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    mine, theirs = mirror.publish(FILES), mirror.publish({"theirs": noise(MIB, 3)})
    secret = digest_of(noise(MIB, 3))
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        await ask(peer, agent.data_port, secret, mirror.grant(theirs), theirs, MIB)
        for named in (mine, theirs, None):  # held here, and still not for this bearer
            with pytest.raises(NotFoundError):
                await ask(peer, agent.data_port, secret, mirror.grant(mine), named, MIB)
        with pytest.raises(BdnError) as expired:
            await ask(peer, agent.data_port, secret, mirror.grant(theirs, expires_in=-1), theirs, MIB)
        assert expired.value.code == "GRANT_EXPIRED"


async def test_a_chunk_of_two_manifests_is_read_once(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    one, two = mirror.publish({"a": LARGE}), mirror.publish({"b": LARGE, "c": b"more"})
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        for manifest in (one, two):
            assert await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest) == FIRST
        assert mirror.chunk_requests[digest_of(FIRST)] == 1
        await agent.evictions.evict(EvictCommand(id="e", manifests=[str(one.digest)], tier="cluster"))
        assert await ask(peer, agent.data_port, FIRST, mirror.grant(two), two) == FIRST


async def test_a_failing_mirror_fails_all_who_wait(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    grant = mirror.grant(manifest)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        mirror.every = failing(StoreUnavailableError("it is down"))
        got = await asyncio.gather(
            *(ask(peer, agent.data_port, FIRST, grant, manifest) for _ in range(4)), return_exceptions=True
        )
        assert [isinstance(error, BdnError) and error.transient for error in got] == [True] * 4
        use = (await agent.holdings.tiers())["cluster"]
        assert (use.committed, use.reserved) == (0, 0)
        mirror.every = None
        assert await ask(peer, agent.data_port, FIRST, grant, manifest) == FIRST


async def test_wrong_bytes_from_the_mirror_are_not_kept(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        mirror.faults[digest_of(FIRST)] = [flipped, flipped]
        with pytest.raises(BdnError):
            await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest)
        assert await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest) == FIRST


async def test_the_tiers_have_budgets_of_their_own(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest, other = mirror.publish(FILES), mirror.publish({"theirs": noise(3 * MIB, 3)})
    clock = Clock(time.time())
    async with rig.agent(clock, cache_bytes=10 * MIB, cluster_cache_bytes=10 * MIB) as agent:
        await agent.heartbeats.beat()
        await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest)
        with pytest.raises(BdnError) as full:  # what was just asked for is in use
            await ask(peer, agent.data_port, noise(3 * MIB, 3), mirror.grant(other), other)
        assert full.value.code == "CACHE_FULL"
        clock.now += 61
        await ask(peer, agent.data_port, noise(3 * MIB, 3), mirror.grant(other), other)
        await staged(agent, mirror, manifest)
        use = await agent.holdings.tiers()
        assert (use["node"].budget, use["node"].committed) == (10 * MIB, manifest.bytes_total)
        assert (use["cluster"].budget, use["cluster"].committed) == (10 * MIB, 3 * MIB)
        text = figures(agent, await agent.holdings.tiers())
        assert text['bdn_agent_cluster_evictions_total{reason="lru"}'] == 1


async def test_an_eviction_reaches_the_tier_that_it_names(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest, other = mirror.publish(FILES), mirror.publish({"theirs": noise(3 * MIB, 3)})
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        await staged(agent, mirror, other)
        await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest)

        for dry_run in (True, False):
            items = await agent.evictions.evict(EvictCommand(id="e", all=True, tier="cluster", dry_run=dry_run))
            assert [(item.tier, item.manifest, item.bytes, item.refused) for item in items] == [
                ("cluster", str(manifest.digest), CHUNK_SIZE, False)
            ]
        assert (await agent.holdings.tiers())["cluster"].committed == 0
        assert [holding.manifest for holding in await agent.holdings.all()] == [str(other.digest)]
        assert not list((rig.cache / "cluster" / "chunks").iterdir())
        refused = await agent.evictions.evict(EvictCommand(id="f", all=True))
        assert [(item.tier, item.refused) for item in refused] == [("node", True)]


async def test_a_chunk_of_a_whole_file_is_kept_once(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest)
        await staged(agent, mirror, manifest)
        assert mirror.chunk_requests[digest_of(FIRST)] == 1  # the stage took it from the cluster tier
        await agent.housekeeping.reap()

        assert (await agent.holdings.tiers())["cluster"].committed == 0
        assert await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest) == FIRST


async def test_who_asks_during_a_fill_waits_for_it(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest, gate, reading = mirror.publish(FILES), threading.Event(), asyncio.Event()
    mirror.faults[digest_of(FIRST)] = [held_by(gate)]
    loop = asyncio.get_running_loop()
    mirror.on_request = lambda chunk: chunk == digest_of(FIRST) and loop.call_soon_threadsafe(reading.set)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        stage = await agent.stages.start("job", mirror.grant(manifest))
        await reading.wait()
        asked = asyncio.ensure_future(ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest))
        await ask(peer, agent.data_port, LAST, mirror.grant(manifest), manifest)
        gate.set()
        assert await asked == FIRST
        await agent.stages.finish(stage.record.id)
        assert mirror.chunk_requests[digest_of(FIRST)] == 1


async def test_a_dedicated_cluster_cache_stages_nothing(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    async with rig.agent(roles="cluster", cache_bytes=30 * MIB, cluster_cache_bytes=None) as agent:
        await agent.heartbeats.beat()
        with pytest.raises(InvalidRequestError, match="BDN_AGENT_ROLES"):
            await agent.stages.start("job", mirror.grant(manifest))
        assert await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), manifest) == FIRST
        tiers = await agent.holdings.tiers()
        assert tiers.keys() == {"cluster"}
        assert tiers["cluster"].budget == 30 * MIB
        assert mirror.heartbeats[-1].tiers.keys() == {"cluster"}


async def test_an_owner_killed_leaves_nothing_half(mirror: AgentMirror, tmp_path: Path, peer: ConnectionPool) -> None:
    port = free_port()
    program = Program(tmp_path, mirror.url, {"BDN_AGENT_DATA_PORT": str(port)})
    manifest, gate, reading = mirror.publish(FILES), threading.Event(), asyncio.Event()
    mirror.faults[digest_of(LAST)] = [held_by(gate)]
    loop = asyncio.get_running_loop()
    mirror.on_request = lambda chunk: chunk == digest_of(LAST) and loop.call_soon_threadsafe(reading.set)
    async with program.daemon() as daemon:
        assert await ask(peer, port, FIRST, mirror.grant(manifest), manifest) == FIRST
        asked = asyncio.ensure_future(ask(peer, port, LAST, mirror.grant(manifest), manifest))
        await reading.wait()
        await daemon.kill()
        with pytest.raises(StoreUnavailableError):
            await asked
    gate.set()
    incoming = tmp_path / "cache" / "cluster" / "incoming"
    (incoming / "7").write_bytes(b"half")
    async with program.daemon():
        assert not list(incoming.iterdir())
        for piece in (FIRST, LAST):
            assert await ask(peer, port, piece, mirror.grant(manifest), manifest) == piece
    assert (mirror.chunk_requests[digest_of(FIRST)], mirror.chunk_requests[digest_of(LAST)]) == (1, 2)


async def test_a_suspected_wrong_chunk_is_fetched_again(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    grant = mirror.grant(manifest)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        assert await ask(peer, agent.data_port, FIRST, grant, manifest, is_suspect=False) == FIRST
        assert await ask(peer, agent.data_port, FIRST, grant, manifest, is_suspect=True) == FIRST
        assert mirror.chunk_requests == {digest_of(FIRST): 1}
        flip(agent.scrub.scrubber.tier.files.path(manifest.digest, digest_of(FIRST)), 9)
        assert await ask(peer, agent.data_port, FIRST, grant, manifest, is_suspect=True) == FIRST
        assert mirror.chunk_requests == {digest_of(FIRST): 2}


async def test_a_suspected_file_is_told_to_the_scrub(rig: Rig, mirror: AgentMirror, peer: ConnectionPool) -> None:
    manifest = mirror.publish(FILES)
    grant = mirror.grant(manifest)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        await ask(
            peer, agent.data_port, FIRST, grant, manifest, is_suspect=False
        )  # so the owner has the manifest's list of chunks
        await staged(agent, mirror, manifest)
        await agent.housekeeping.reap()  # what the whole file has is not kept twice
        flip(cached(agent, manifest, "large"), 9)
        with pytest.raises(NotFoundError):
            await ask(peer, agent.data_port, FIRST, grant, manifest, is_suspect=True)
        await agent.scrub.catch_up()
        assert cached(agent, manifest, "large").read_bytes() == LARGE
        assert await ask(peer, agent.data_port, FIRST, grant, manifest, is_suspect=True) == FIRST


# --- Chunks of an owner that are evicted while peers read them or wait for them: right bytes or a clean error, right counts ---
EVICTED = noise(17 * MIB, 1)
PIECES = [EVICTED[start : start + CHUNK_SIZE] for start in range(0, len(EVICTED), CHUNK_SIZE)]
EVICTED_FILES = {"large": EVICTED}


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
    manifest = mirror.publish(EVICTED_FILES)
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
    manifest, gate, reading = mirror.publish(EVICTED_FILES), threading.Event(), asyncio.Event()
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
    manifest, looks, open_for = mirror.publish(EVICTED_FILES), itertools.count(), HeldChunks.open_for

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


async def test_peers_a_stage_and_evictions_at_once(rig: Rig, mirror: AgentMirror, peers: ThreadPoolExecutor) -> None:
    manifest = mirror.publish(EVICTED_FILES)
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
        assert tree(Path(stage.mounts[0].path)) == EVICTED_FILES
        await check_counts(agent)


def fill_up(disk: Path, name: str) -> None:
    """Others take all that is left, but for a little that the agent writes its records with."""
    free = os.statvfs(disk)
    (disk / name).write_bytes(bytes(free.f_bavail * free.f_frsize - MIB // 4))


@needs_mounts
async def test_when_others_fill_the_disk_files_go_before_chunks_that_the_cluster_needs(
    mirror: AgentMirror, tmp_path: Path, peers: ThreadPoolExecutor
) -> None:
    mine, theirs = mirror.publish({"mine": noise(9 * MIB, 2)}), mirror.publish(EVICTED_FILES)
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
    manifest = mirror.publish(EVICTED_FILES)
    mirror.ring = {}
    cache = Rig(mirror, tmp_path / "cache", {"node": "cache", "roles": "cluster", "cache_bytes": 40 * MIB})
    node = Rig(mirror, tmp_path / "node", {"node": "node", "roles": "node"})
    async with cache.agent() as owner, node.agent() as worker:
        for agent in (owner, worker, owner, worker):
            await agent.heartbeats.beat()
        stage = await staged(worker, mirror, manifest)
        assert stage.mounts[0].bytes_from.cluster == len(EVICTED)
        assert set(mirror.chunk_requests.values()) == {1}
        assert (await owner.holdings.tiers())["cluster"].committed == len(EVICTED)

        with pytest.raises(InvalidRequestError):
            await owner.stages.start("job", mirror.grant(manifest))
