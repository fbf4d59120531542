"""Space on real disks, and what is counted is what is there, at each step."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Self

import pytest

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CacheFullError
from bdn.core.layout import Manifest
from node_agent.app import Agent
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.space import Room
from node_agent.disk.places import Places
from node_agent.metrics import AgentMetrics
from node_agent.settings import AgentSettings
from node_agent.stage.stage import StageRegistry
from tests.support.agent.cache import cached, put
from tests.support.agent.local_node import open_disk_and_tiers
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.mounts import mounted_quota, mounted_tmpfs, needs_mounts, needs_quota
from tests.support.agent.rig import Rig, disk_bytes, staged
from tests.support.content.layouts import held_of, whole
from tests.support.content.names import stage
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("space")


class Gauge:
    """A thread that reads the disk all the while, and remembers the most that was in use."""

    def __init__(self, disk: Path) -> None:
        self.most = 0
        self._disk = disk
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            found = os.statvfs(self._disk)
            self.most = max(self.most, (found.f_blocks - found.f_bfree) * found.f_frsize)


@needs_mounts
async def test_ten_stages_at_once_on_a_small_disk_never_fill_it(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    budget = 48 * MIB
    with mounted_tmpfs(tmp_path / "disk", "64m") as disk, Gauge(disk) as gauge:
        rig = Rig(mirror, disk, {"cache_bytes": budget, "cluster_cache_bytes": 0, "byte_threads": 4})
        async with rig.agent() as agent:
            for turn in range(at_scale(2, 12)):
                trees = [{"f": noise(size * MIB, 100 * turn + size)} for size in range(1, 11)]
                jobs = [staged(agent, mirror, mirror.publish(one), job=f"{turn}") for one in trees]
                outcomes = await asyncio.gather(*jobs, return_exceptions=True)
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        assert isinstance(outcome, BdnError), outcome
                        assert outcome.code == "CACHE_FULL", outcome  # never the kernel's ENOSPC
                        tally.add(refused=1)
                for stage in agent.stages.registry.all():
                    if stage.record.state == "READY":
                        await agent.stages.release(stage.record.id)
                assert agent.cache.index.ledger.used_bytes == disk_bytes(rig.cache) <= budget
                tally.add(scenarios=10)
    assert gauge.most <= budget + 4 * MIB, "records and views are small; content is not"


async def used(agent: Agent, mirror: AgentMirror, manifest: Manifest) -> None:
    """Staged and released."""
    held = await staged(agent, mirror, manifest, job=str(manifest.digest))
    await agent.stages.release(held.id)


@needs_mounts
async def test_a_neighbour_that_fills_the_disk_does_not_empty_the_cache_and_stages_still_swap(
    mirror: AgentMirror, tmp_path: Path
) -> None:
    with mounted_tmpfs(tmp_path / "disk", "64m") as disk:
        rig = Rig(mirror, disk, {"cache_bytes": 32 * MIB, "cluster_cache_bytes": 0, "headroom_bytes": 8 * MIB})
        async with rig.agent() as agent:
            for number in range(8):
                await used(agent, mirror, mirror.publish({"f": noise(4 * MIB, number)}))
            foreign = disk / "foreign"
            for _ in range(5):  # a neighbour takes the headroom, and whatever we give up
                with foreign.open("ab") as file:
                    found = os.statvfs(disk)
                    file.write(bytes(max(0, found.f_bavail * found.f_frsize - 2 * MIB)))
                await agent.housekeeping.reap()
                assert agent.cache.index.ledger.committed_bytes >= 16 * MIB
            assert agent.cache.index.ledger.committed_bytes == 16 * MIB  # half of what is allowed
            use = (await agent.holdings.tiers())["node"]
            assert (use.budget, use.committed) == (16 * MIB, 16 * MIB)
            assert use.pressed > 0
            held = set(agent.cache.index.manifests())

            await used(agent, mirror, mirror.publish({"f": noise(4 * MIB, 99)}))

            assert len(held - set(agent.cache.index.manifests())) == 1  # as much went as came
            assert agent.cache.index.ledger.committed_bytes == 16 * MIB
            foreign.unlink()
            await agent.housekeeping.reap()
            use = (await agent.holdings.tiers())["node"]
            assert (use.budget, use.pressed) == (32 * MIB, 0)


@needs_mounts
async def test_too_few_inodes_refuse_before_the_first_byte(mirror: AgentMirror, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "64m,nr_inodes=700") as disk:
        async with Rig(mirror, disk, {"cluster_cache_bytes": 0}).agent() as agent:
            few = await staged(agent, mirror, mirror.publish({"few": b"few"}), job="few")
            many = mirror.publish({f"{number}": b"%d" % number for number in range(900)})
            mirror.forget()
            with pytest.raises(BdnError) as caught:
                await staged(agent, mirror, many, job="many")
            facts = caught.value.details()
            assert (caught.value.code, facts["needed_files"], mirror.requests) == ("CACHE_FULL", 900, 0)
            assert 0 < int(str(facts["free_files"])) < 700
            assert CacheFullError.transient
            assert tree(Path(few.mounts[0].path)) == {"few": b"few"}
            again = await staged(agent, mirror, mirror.publish({"more": b"more"}), job="more")
            assert again.state == "READY"


@needs_quota
async def test_a_quota_fails_the_stage_that_it_stops(mirror: AgentMirror, tmp_path: Path) -> None:
    """statvfs knows nothing of it: the file system has room for all."""
    with mounted_quota(tmp_path / "disk", tmp_path / "image", "24M") as place:
        rig, files = Rig(mirror, place, {"cluster_cache_bytes": 0}), {"f": noise(6 * MIB, 1)}
        async with rig.agent() as agent:
            stage = await staged(agent, mirror, mirror.publish(files))
            held = agent.cache.index.manifests()
            with pytest.raises(BdnError, match="Disk quota exceeded; the cache may have no more than its quota"):
                await staged(agent, mirror, mirror.publish({"g": noise(30 * MIB, 2)}), job="large")
            assert set(held) <= set(agent.cache.index.manifests())
            assert tree(Path(stage.mounts[0].path)) == files
            small = await staged(agent, mirror, mirror.publish({"h": noise(MIB, 3)}), job="small")
            assert small.state == "READY"


# --- What is counted is what is there, while others delete and files become whole ---


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


def four_files(cache: Path) -> tuple[Places, list[Manifest]]:
    """Of a mebibyte each, used one after the other."""
    places, first = cached(cache, {"f": noise(MIB, 0)})
    return places, [first, *(put(places, {"f": noise(MIB, one)}, used=1000.0 + one) for one in range(1, 4))]


async def test_what_a_stage_is_deleting_for_itself_is_not_evicted_once_more_for_the_room_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is being deleted it is held no more, and not free yet: the disk seems to be smaller than it is."""
    places, held = four_files(tmp_path / "cache")
    new = held_of({"f": whole(noise(MIB, 9))})
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
        admission = asyncio.create_task(cache.admit([new], stage("new")))
        assert await asyncio.to_thread(began.wait, 60)
        trimming = asyncio.create_task(cache.trim())
        await lock.is_awaited.wait()
        go.set()
        await asyncio.gather(admission, trimming)
        assert cache.index.manifests() == (*(one.digest for one in held[1:]), new.root.digest)
        assert cache.index.ledger.used_bytes == 4 * MIB


async def test_a_file_that_is_just_becoming_whole_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It bears its name on disk already and is no part any more; who counts it has not heard of that."""
    places, old = cached(tmp_path / "cache", {"f": noise(3 * MIB, 1)})
    new = held_of({"f": whole(noise(MIB, 2))})
    async with a_cache(tmp_path) as cache:
        await cache.admit([new], stage("new"))
        (content,) = new.manifest.contents
        places.file(content).write_bytes(noise(MIB, 2))
        monkeypatch.setattr(os, "statvfs", a_disk_of(4 * MIB, places.root))
        look, rooms = cache.space.room, list[int]()

        def room(padding: int = 0) -> Room:
            found = look(padding)
            rooms.append(found.budgets.node)
            cache.index.commit(content)
            return found

        monkeypatch.setattr(cache.space, "room", room)
        await cache.trim()
        assert rooms == [3 * MIB, 4 * MIB]
        assert set(cache.index.manifests()) == {old.digest, new.root.digest}
        assert cache.index.ledger.committed_bytes == 4 * MIB


async def test_what_is_over_the_budget_goes_as_far_as_it_is_over_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, held = four_files(tmp_path / "cache")
    async with a_cache(tmp_path) as cache:
        for size, left in ((4, 4), (3, 3), (1, 1), (0, 0)):
            monkeypatch.setattr(os, "statvfs", a_disk_of(size * MIB, places.root))
            await cache.trim()
            assert cache.index.manifests() == tuple(one.digest for one in held[4 - left :])
            assert disk_bytes(places.root) == left * MIB
