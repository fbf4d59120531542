"""What is counted is what is there: after a stage that was refused, and while others delete and files become whole."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, DiskFailedError
from bdn.core.manifest import Manifest
from node_agent.app import Agent
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.records import Held
from node_agent.cache.space import Room
from node_agent.metrics import AgentMetrics
from node_agent.settings import AgentSettings
from node_agent.stage.stage import StageRegistry
from tests.support.agent.cache import cached, put
from tests.support.agent.local_node import open_disk_and_tiers
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Rig, disk_bytes, noise, staged
from tests.support.content.names import stage
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("space")


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


async def used(agent: Agent, mirror: AgentMirror, manifest: Manifest) -> None:
    held = await staged(agent, mirror, manifest, job=str(manifest.digest))
    await agent.stages.release(held.id)


def counted(agent: Agent) -> tuple[int, int, list[Digest], set[Digest]]:
    """Bytes whole and promised, manifests by their age, and which of them are whole."""
    index = agent.cache.index
    held = index.manifests()
    return index.ledger.committed_bytes, index.ledger.reserved_bytes, [*held], {*filter(index.is_complete, held)}


def refused(_: object) -> None:
    raise DiskFailedError("files", "Read-only file system")


@pytest.mark.parametrize("why", ["full", "disk"])
async def test_after_a_refused_stage_what_made_room_for_it_is_whole_also_where_the_stage_shared_a_file_with_it(
    mirror: AgentMirror, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    shared = noise(MIB, 1)
    victim = mirror.publish({"shared": shared, "own": noise(MIB, 2)})
    leased, first = mirror.publish({"f": noise(MIB, 3)}), mirror.publish({"f": noise(2 * MIB, 4)})
    second, third = mirror.publish({"shared": shared}), mirror.publish({"f": noise(MIB, 5)})
    async with Rig(mirror, tmp_path, {"cache_bytes": 4 * MIB, "cluster_cache_bytes": 0}).agent() as agent:
        await agent.heartbeats.beat()
        await used(agent, mirror, victim)
        await staged(agent, mirror, leased, job="leased")
        before = counted(agent)
        assert before == (3 * MIB, 0, [victim.digest, leased.digest], {victim.digest, leased.digest})

        # The first makes the victim go, the second brings what they share again, and the third does not fit.
        wanted = [first, second, third] if why == "full" else [first, second]
        with monkeypatch.context() as patched:
            if why == "disk":
                patched.setattr(agent.cache.files.records, "forget", refused)
            with pytest.raises(BdnError) as caught:
                await staged(agent, mirror, *wanted)

        assert caught.value.code == ("CACHE_FULL" if why == "full" else "DISK_FAILED")
        assert counted(agent) == before
        await agent.housekeeping.reap()
        mirror.forget()
        await staged(agent, mirror, victim, job="again")
        assert not mirror.chunk_requests
    tally.add(scenarios=1, refused=1, faults=why == "disk")


def a_disk_of(size: int, cache: Path) -> Callable[[object], SimpleNamespace]:
    """In place of ``os.statvfs``: a disk that has room for that many bytes of content and for nothing else."""

    def look(_: object) -> SimpleNamespace:
        blocks, left = size // 4096, (size - disk_bytes(cache)) // 4096
        return SimpleNamespace(f_blocks=blocks, f_frsize=4096, f_bavail=left, f_files=0)

    return look


class WatchedLock(asyncio.Lock):
    """Says that somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = asyncio.Event()

    async def acquire(self) -> Literal[True]:
        if self.locked():
            self.is_awaited.set()
        return await super().acquire()


@asynccontextmanager
async def a_cache(root: Path) -> AsyncIterator[NodeCache]:
    """What is in this directory, as an agent holds it whose tasks do nothing, and which may have all of the disk."""
    settings = AgentSettings(
        data_dir=root, cache_bytes=100 * MIB, cluster_cache_bytes=0, headroom_bytes=0, keep_percent=0
    )
    async with AsyncExitStack() as stack:
        _, _, tiers = await open_disk_and_tiers(stack, settings, AgentMetrics(StageRegistry()), time.time)
        yield tiers.node


async def test_what_a_stage_is_deleting_for_itself_is_not_evicted_once_more_for_the_room_that_it_takes(
    tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is being deleted it is held no more, and not free yet: the disk seems to be smaller than it is."""
    places, first = cached(tmp_path / "cache", {"f": noise(MIB, 0)})
    held = [first, *(put(places, {"f": noise(MIB, number)}, used=1000.0 + number) for number in range(1, 4))]
    new = AgentMirror().publish({"f": noise(MIB, 9)})
    began, go = threading.Event(), threading.Event()
    async with a_cache(tmp_path) as cache:
        monkeypatch.setattr(os, "statvfs", a_disk_of(4 * MIB, places.root))
        forget = cache.files.records.forget

        def slowly(digest: Digest) -> None:
            began.set()
            assert go.wait(60)
            forget(digest)

        monkeypatch.setattr(cache.files.records, "forget", slowly)
        lock = cache._lock = WatchedLock()
        admission = asyncio.create_task(cache.admit([Held(new, None)], stage("new")))
        assert await asyncio.to_thread(began.wait, 60)
        trimming = asyncio.create_task(cache.trim())
        await lock.is_awaited.wait()
        go.set()
        await asyncio.gather(admission, trimming)
        assert cache.index.manifests() == tuple(one.digest for one in [*held[1:], new])
        assert cache.index.ledger.used_bytes == 4 * MIB
    tally.add(scenarios=1)


async def test_a_file_that_is_just_becoming_whole_costs_no_other(
    tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It bears its name on disk already and is no part any more; who counts it has not heard of that."""
    places, old = cached(tmp_path / "cache", {"f": noise(3 * MIB, 1)})
    new = AgentMirror().publish({"f": noise(MIB, 2)})
    async with a_cache(tmp_path) as cache:
        await cache.admit([Held(new, None)], stage("new"))
        (content,) = new.contents
        places.file(content).write_bytes(noise(MIB, 2))
        monkeypatch.setattr(os, "statvfs", a_disk_of(4 * MIB, places.root))
        look, rooms = cache.space.room, list[int]()

        def room(padding: int = 0) -> Room:
            found = look(padding)
            rooms.append(found.budgets.node)
            cache.commit(content)
            return found

        monkeypatch.setattr(cache.space, "room", room)
        await cache.trim()
        assert rooms == [3 * MIB, 4 * MIB]
        assert set(cache.index.manifests()) == {old.digest, new.digest}
        assert cache.index.ledger.committed_bytes == 4 * MIB
    tally.add(scenarios=1)


async def test_what_is_over_the_budget_goes_as_far_as_it_is_over_and_no_further(
    tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, first = cached(tmp_path / "cache", {"f": noise(MIB, 0)})
    held = [first, *(put(places, {"f": noise(MIB, number)}, used=1000.0 + number) for number in range(1, 4))]
    async with a_cache(tmp_path) as cache:
        for size, left in ((4, 4), (3, 3), (1, 1), (0, 0)):
            monkeypatch.setattr(os, "statvfs", a_disk_of(size * MIB, places.root))
            await cache.trim()
            assert cache.index.manifests() == tuple(one.digest for one in held[4 - left :])
            assert disk_bytes(places.root) == left * MIB
    tally.add(scenarios=4)
