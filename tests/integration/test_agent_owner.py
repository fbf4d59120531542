"""An agent that owns chunks: it obtains them for peers, holds them within a budget, evicts them, also while they are read."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import BdnError, InvalidRequestError, NotFoundError, StoreUnavailableError
from bdn.core.layout import Manifest
from bdn.net.http1.pool import ConnectionPool
from bdn.wire.http_fields import MANIFEST_HEADER, chunk_path
from bdn.wire.operation_schema import EvictCommand, EvictedItem
from bdn.wire.stage_schema import TierUse
from node_agent.app import Agent
from tests.fakes.clock import Clock
from tests.support.agent.mirror import AgentMirror, failing, flipped, fresh_mirror
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.agent.rig import Rig, metrics, staged
from tests.support.agent.site import ask
from tests.support.content.layouts import pieces
from tests.support.content.noise import MIB, noise
from tests.support.crash.rot import flip
from tests.support.waiting import until

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror
LARGE = noise(17 * MIB + 3, 1)
PIECES = pieces(LARGE)
FIRST, LAST = PIECES[0], PIECES[-1]
FILES = {"large": LARGE, "small": b"small", "other": b"other"}
THEIRS = noise(3 * MIB, 3)


@pytest.fixture
def manifest(mirror: AgentMirror) -> Manifest:
    return mirror.publish(FILES)


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"auth": "token", "cluster_cache_bytes": 20 * MIB})


@dataclass(frozen=True)
class AskedAgent:
    """An agent that has the mirror's keys, and a peer that asks it for chunks."""

    agent: Agent
    mirror: AgentMirror
    pool: ConnectionPool

    async def ask(self, chunk: bytes | Digest, manifest: Manifest, size: int = 0, **options: Any) -> bytes:
        return await ask(self.pool, self.agent.data_port, chunk, self.mirror.grant(manifest), manifest, size, **options)

    async def use(self) -> TierUse:
        """What the cluster tier holds."""
        return (await self.agent.holdings.tiers())["cluster"]

    async def figures(self) -> dict[str, float]:
        return metrics(self.agent.metrics.render(await self.agent.holdings.tiers()).decode())

    async def evict(self, **selector: Any) -> list[EvictedItem]:
        """From the cluster tier, everything unless something else is selected."""
        command = {"id": "e", "tier": "cluster"} | (selector or {"all": True})
        return await self.agent.evictions.evict(EvictCommand.model_validate(command))

    async def check_counts(self) -> None:
        """What is counted is what lies on the disk."""
        chunks = self.agent.places.root / "cluster" / "chunks"
        on_disk = {path.stat().st_ino: path.stat().st_size for path in chunks.rglob("*") if path.is_file()}
        use = await self.use()
        assert (use.committed, use.reserved) == (sum(on_disk.values()), 0)
        assert not list((chunks.parent / "incoming").iterdir())


@asynccontextmanager
async def asked_agent(
    rig: Rig, peer: ConnectionPool, clock: Callable[[], float] = time.time, **changes: Any
) -> AsyncIterator[AskedAgent]:
    async with rig.agent(clock, **changes) as agent:
        await agent.heartbeats.beat()
        yield AskedAgent(agent, rig.mirror, peer)


@pytest.fixture
def owning(rig: Rig, peer: ConnectionPool) -> Callable[..., AbstractAsyncContextManager[AskedAgent]]:
    return lambda *given, **changes: asked_agent(rig, peer, *given, **changes)


Owning = Callable[..., AbstractAsyncContextManager[AskedAgent]]


async def test_many_peers_cost_one_read_of_the_mirror(
    owning: Owning, mirror: AgentMirror, peer: ConnectionPool, manifest: Manifest
) -> None:
    async with owning() as owner:
        grants = [mirror.grant(manifest, expires_in=3600 + number) for number in range(8)]
        got = await asyncio.gather(*(ask(peer, owner.agent.data_port, FIRST, grant, manifest) for grant in grants))

        assert got == [FIRST] * 8
        assert mirror.chunk_requests == {digest_of(FIRST): 1}
        (page,) = mirror.trees[manifest.digest].root.pages
        assert mirror.documents == {f"/manifests/{manifest.digest}": 1, f"/chunks/{page.digest}": 1}
        assert (await owner.use()).committed == CHUNK_SIZE
        text = await owner.figures()
        assert (text["bdn_agent_obtained_chunks_total"], text["bdn_agent_obtained_bytes_total"]) == (1, CHUNK_SIZE)
        (slab,) = mirror.chunks(manifest, "small")
        assert sorted(await owner.ask(slab, manifest, 10)) == sorted(b"smallother")


async def test_chunks_for_peers__are_obtained_round_robin_over_organisations(
    owning: Owning, mirror: AgentMirror, peer: ConnectionPool
) -> None:
    """One job's peers ask for many chunks at once; another organisation's only one is obtained in the next round."""
    many = [noise(2 * MIB, number) for number in range(9)]
    manifest, order = mirror.publish({str(number): content for number, content in enumerate(many)}), list[Digest]()
    async with owning(byte_threads=1) as owner, asyncio.TaskGroup() as group:

        def ask_for(content: bytes, organisation: str) -> Coroutine[object, object, bytes]:
            grant = mirror.grant(manifest, organisation=organisation)
            return ask(peer, owner.agent.data_port, content, grant, manifest)

        def obtaining() -> int:
            return sum(task.get_name() == "obtain for a peer" for task in asyncio.all_tasks())

        for organisation, content in zip("ab", many, strict=False):  # both have the list of chunks by now
            await ask_for(content, organisation)
        gate, is_read = mirror.hold()
        told = mirror.on_request

        def note(digest: Digest) -> None:
            order.append(digest)
            told(digest)

        mirror.on_request = note
        for content in many[2:-1]:
            group.create_task(ask_for(content, "a"))
        await until(lambda: obtaining() == len(many) - 3)
        group.create_task(ask_for(many[-1], "b"))
        await until(lambda: obtaining() == len(many) - 2)
        await is_read.wait()
        gate.set()
    assert order.index(digest_of(many[-1])) <= 2


async def test_what_is_held_is_served_after_a_restart(
    owning: Owning, rig: Rig, mirror: AgentMirror, peer: ConnectionPool, manifest: Manifest
) -> None:
    async with owning() as owner:
        await owner.ask(FIRST, manifest)
    async with rig.agent(url="http://127.0.0.1:1") as agent:
        for named in (manifest, None):
            assert await ask(peer, agent.data_port, FIRST, mirror.grant(manifest), named) == FIRST
        with pytest.raises(BdnError) as refused:
            await ask(peer, agent.data_port, LAST, mirror.grant(manifest), manifest)
        assert refused.value.transient


async def test_who_owns_nothing_obtains_nothing(owning: Owning, mirror: AgentMirror, manifest: Manifest) -> None:
    async with owning(roles="node") as owner:
        with pytest.raises(NotFoundError):
            await owner.ask(FIRST, manifest)
        await staged(owner.agent, mirror, manifest)
        assert await owner.ask(FIRST, manifest) == FIRST
        assert (await owner.agent.holdings.tiers()).keys() == {"node"}


async def test_a_failing_mirror_fails_all_who_wait(owning: Owning, mirror: AgentMirror, manifest: Manifest) -> None:
    async with owning() as owner:
        mirror.every = failing(StoreUnavailableError("it is down"))
        got = await asyncio.gather(*(owner.ask(FIRST, manifest) for _ in range(4)), return_exceptions=True)
        assert [isinstance(error, BdnError) and error.transient for error in got] == [True] * 4
        use = await owner.use()
        assert (use.committed, use.reserved) == (0, 0)
        mirror.every = None
        mirror.faults[digest_of(FIRST)] = [flipped, flipped]
        with pytest.raises(BdnError):  # wrong bytes are not kept
            await owner.ask(FIRST, manifest)
        assert await owner.ask(FIRST, manifest) == FIRST


async def test_the_tiers_have_budgets_of_their_own(owning: Owning, mirror: AgentMirror, manifest: Manifest) -> None:
    other, clock = mirror.publish({"theirs": THEIRS}), Clock(time.time())
    async with owning(clock, cache_bytes=18 * MIB, cluster_cache_bytes=10 * MIB) as owner:
        await owner.ask(FIRST, manifest)
        with pytest.raises(BdnError) as full:  # what was just asked for is in use
            await owner.ask(THEIRS, other)
        assert full.value.code == "CACHE_FULL"
        clock.now += 61
        await owner.ask(THEIRS, other)
        await staged(owner.agent, mirror, manifest)
        use = await owner.agent.holdings.tiers()
        assert (use["node"].budget, use["node"].committed) == (18 * MIB, manifest.bytes_total)
        assert (use["cluster"].budget, use["cluster"].committed) == (10 * MIB, 3 * MIB)
        assert (await owner.figures())['bdn_agent_cluster_evictions_total{reason="lru"}'] == 1


async def test_an_eviction_reaches_the_tier_that_it_names(
    owning: Owning, rig: Rig, mirror: AgentMirror, manifest: Manifest
) -> None:
    other = mirror.publish({"theirs": THEIRS})
    async with owning() as owner:
        agent = owner.agent
        await staged(agent, mirror, other)
        await owner.ask(FIRST, manifest)

        for dry_run in (True, False):
            (item,) = await owner.evict(all=True, dry_run=dry_run)
            assert (item.tier, item.manifest, item.bytes) == ("cluster", str(manifest.digest), CHUNK_SIZE)
            assert not item.refused
        assert (await owner.use()).committed == 0
        assert [holding.manifest for holding in await agent.holdings.all()] == [str(other.digest)]
        assert not list((rig.cache / "cluster" / "chunks").iterdir())
        refused = await agent.evictions.evict(EvictCommand(id="f", all=True))
        assert [(item.tier, item.refused) for item in refused] == [("node", True)]


async def test_a_chunk_of_a_whole_file_is_kept_once(owning: Owning, mirror: AgentMirror, manifest: Manifest) -> None:
    async with owning() as owner:
        await owner.ask(FIRST, manifest)
        await staged(owner.agent, mirror, manifest)
        assert mirror.chunk_requests[digest_of(FIRST)] == 1  # the stage took it from the cluster tier
        await owner.agent.housekeeping.reap()

        assert (await owner.use()).committed == 0
        assert await owner.ask(FIRST, manifest) == FIRST


async def test_who_asks_during_a_fill_waits_for_it(owning: Owning, mirror: AgentMirror, manifest: Manifest) -> None:
    gate, reading = mirror.hold(digest_of(FIRST))
    async with owning() as owner:
        stage = await owner.agent.stages.start("job", mirror.grant(manifest))
        await reading.wait()
        asked = asyncio.ensure_future(owner.ask(FIRST, manifest))
        await owner.ask(LAST, manifest)
        gate.set()
        assert await asked == FIRST
        await owner.agent.stages.finish(stage.record.id)
        assert mirror.chunk_requests[digest_of(FIRST)] == 1


async def test_a_dedicated_cluster_cache_stages_nothing_and_has_the_whole_budget(
    owning: Owning, mirror: AgentMirror, manifest: Manifest
) -> None:
    async with owning(roles="cluster", cache_bytes=30 * MIB, cluster_cache_bytes=None) as owner:
        with pytest.raises(InvalidRequestError, match="BDN_AGENT_ROLES"):
            await owner.agent.stages.start("job", mirror.grant(manifest))
        tiers = await owner.agent.holdings.tiers()
        assert tiers.keys() == mirror.heartbeats[-1].tiers.keys() == {"cluster"}
        assert tiers["cluster"].budget == 30 * MIB


async def test_a_suspected_wrong_chunk_is_fetched_again(
    owning: Owning, mirror: AgentMirror, manifest: Manifest
) -> None:
    async with owning() as owner:
        for is_suspect in (False, True):
            assert await owner.ask(FIRST, manifest, is_suspect=is_suspect) == FIRST
        assert mirror.chunk_requests == {digest_of(FIRST): 1}
        flip(owner.agent.cache.chunks.tier.files.path(manifest.digest, digest_of(FIRST)), 9)
        assert await owner.ask(FIRST, manifest, is_suspect=True) == FIRST
        assert mirror.chunk_requests == {digest_of(FIRST): 2}


# --- Chunks that are evicted while peers read them or wait for them: right bytes or a clean error, right counts ---


async def test_a_peer_that_has_begun_to_read_a_chunk_gets_the_rest_of_it(
    owning: Owning, mirror: AgentMirror, manifest: Manifest
) -> None:
    head = f"Host: localhost\r\nAuthorization: Bearer {mirror.grant(manifest)}\r\n{MANIFEST_HEADER}: {manifest.digest}"
    async with owning() as owner:
        reader, writer = await asyncio.open_connection("127.0.0.1", owner.agent.data_port)
        writer.write(f"GET {chunk_path(digest_of(FIRST))} HTTP/1.1\r\n{head}\r\n\r\n".encode())
        while b"200 OK" not in (answer := await reader.readuntil(b"\r\n\r\n")):
            assert b"102" in answer
        begun = await reader.readexactly(1000)

        assert [item.bytes for item in await owner.evict()] == [CHUNK_SIZE]
        await owner.check_counts()
        assert (await owner.use()).committed == 0
        assert begun + await reader.readexactly(CHUNK_SIZE - 1000) == FIRST
        writer.close()


async def test_a_peer_that_waits_for_a_chunk_gets_it_although_its_manifest_is_evicted_meanwhile(
    owning: Owning, mirror: AgentMirror, manifest: Manifest
) -> None:
    gate, reading = mirror.hold(digest_of(FIRST))
    async with owning() as owner:
        asked = asyncio.ensure_future(owner.ask(FIRST, manifest))
        await reading.wait()
        assert not await owner.evict()  # its room is counted until it has come
        gate.set()

        assert await asked == FIRST
        assert mirror.chunk_requests[digest_of(FIRST)] == 1
        await owner.check_counts()
        assert (await owner.use()).committed == CHUNK_SIZE


def fill_up(disk: Path, name: str) -> None:
    """Others take all that is left, but for a little that the agent writes its records with."""
    free = os.statvfs(disk)
    (disk / name).write_bytes(bytes(free.f_bavail * free.f_frsize - MIB // 4))


@needs_mounts
async def test_when_others_fill_the_disk_files_go_before_chunks_that_the_cluster_needs(
    mirror: AgentMirror, tmp_path: Path, peer: ConnectionPool, manifest: Manifest
) -> None:
    mine = mirror.publish({"mine": noise(9 * MIB, 2)})
    with mounted_tmpfs(tmp_path / "disk", "40m") as disk:
        given = {"cache_bytes": 10**12, "cluster_cache_bytes": 8 * MIB, "headroom_bytes": 4 * MIB, "keep_percent": 0}
        async with asked_agent(Rig(mirror, disk, given), peer) as owner:
            agent = owner.agent
            await agent.stages.release((await staged(agent, mirror, mine)).id)
            await owner.ask(FIRST, manifest)

            async def held() -> dict[str, int]:
                await agent.housekeeping.reap()
                return {tier: use.committed for tier, use in (await agent.holdings.tiers()).items()}

            assert await held() == {"node": 9 * MIB, "cluster": CHUNK_SIZE}
            fill_up(disk, "foreign")
            assert await held() == {"node": 0, "cluster": CHUNK_SIZE}
            fill_up(disk, "more")
            assert await held() == {"node": 0, "cluster": 0}
            await owner.check_counts()
