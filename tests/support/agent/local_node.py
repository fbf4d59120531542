"""An agent without a network: real disk, cache, stages and views, and bytes that come out of a dictionary."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from bdn.core.chunk import Digest, FileLayout
from bdn.core.errors import UpstreamUnavailableError
from bdn.core.layout import Manifest
from bdn.wire.grants import Grant, GrantedMount
from node_agent.background_tasks import BackgroundTasks
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.tiers import CacheTiers, open_tiers
from node_agent.disk.cache_directory import CacheDirectory, open_cache_directory
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.fetch.fill_context import RetryBudget, in_order
from node_agent.fill.part import PackedParts, PartialFile
from node_agent.fill.progress import FillProgress
from node_agent.fill.provision import FillRequest
from node_agent.journal import Journal
from node_agent.metrics import AgentMetrics
from node_agent.mirror_link.commands import EvictionCommands
from node_agent.settings import AgentSettings
from node_agent.stage.housekeeping import Housekeeping
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.records import StageRecords
from node_agent.stage.stage import StageRegistry
from node_agent.stage.stages import StageService
from node_agent.stage.view.exposure import choose
from node_agent.stage.view.views import Views
from node_agent.stage.warm import StagesFirst, Warmer
from tests.fakes.clock import Clock
from tests.support.agent.cache_world import World


@dataclass
class LocalProvision:
    """In place of ``Provision``: the same order of admission, parts and commits, one chunk after the other."""

    world: World
    disk: CacheDirectory
    tiers: CacheTiers
    failing: bool = False  # the next fill breaks off in its middle
    _locks: defaultdict[Digest, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    @property
    def cache(self) -> NodeCache:
        return self.tiers.node

    async def run(self, request: FillRequest) -> list[Manifest]:
        held = [self.world.manifests[digest] for digest in dict.fromkeys(request.manifests)]
        manifests = [self.world.manifests[digest].manifest for digest in request.manifests]
        missing = await self.tiers.node.admit(held, request.holder)
        request.begin(manifests, FillProgress(manifests, missing, RetryBudget(0, list)))
        for one in held:
            for unit in in_order(one.layout, one.file_layouts(missing)):
                await self._fill(unit.files())
        return manifests

    async def _fill(self, unit: list[FileLayout]) -> None:
        """At most one fill per file, as ``Flights`` has it."""
        async with self._locks[next(iter(unit[0].fetched), unit[0].digest)]:
            cache = self.tiers.node
            files = tuple(file for file in unit if not cache.index.ledger.is_committed(file.digest))
            await asyncio.sleep(0)
            if files:
                await (self._cut(files) if files[0].slice else self._write(files[0]))

    async def _cut(self, files: tuple[FileLayout, ...]) -> None:
        lies = files[0].slice
        assert lies is not None
        parts = PackedParts(self.disk, files)
        try:
            parts.write(memoryview(self.world.chunks[lies.slab]))
            self._break_off()
            await parts.commit()
        finally:
            parts.close()
        for file in files:
            self.tiers.node.index.commit(file.digest)

    async def _write(self, layout: FileLayout) -> None:
        part = PartialFile(self.disk.files, layout, self.disk.writes)
        try:
            part.open()
            for chunk in layout.placed():
                content = bytearray(self.world.chunks[chunk.digest])
                if not part.holds(chunk, memoryview(bytearray(len(content)))):
                    part.write(chunk, memoryview(content))
                await asyncio.sleep(0)
                self._break_off()
            part.commit()
        finally:
            part.close()
            if part.is_committed:
                self.tiers.node.index.commit(layout.digest)

    def _break_off(self) -> None:
        if self.failing:
            self.failing = False
            raise UpstreamUnavailableError("the mirror", "it went away")


class OpenTrust:
    """Believes every token: it names the manifests."""

    def verify(self, token: str) -> Grant:
        mounts = [
            GrantedMount(f"/m{index}", Digest.parse(name), "hf://o/r") for index, name in enumerate(token.split())
        ]
        return Grant("org", tuple(mounts), 1e12)


@dataclass(frozen=True)
class LocalNode:
    """What ``open_agent`` opens, as far as there is no network in it."""

    disk: CacheDirectory
    tiers: CacheTiers
    provision: LocalProvision
    stages: StageService
    evictions: EvictionCommands
    housekeeping: Housekeeping

    @property
    def cache(self) -> NodeCache:
        return self.tiers.node

    async def settled(self) -> None:
        """No stage is worked on any more."""
        while working := [stage.task for stage in self.stages.registry.all() if stage.task and stage.is_working]:
            await asyncio.wait(working)  # a task that looks through a stage may begin another, that mends it


async def open_disk_and_tiers(
    stack: AsyncExitStack, settings: AgentSettings, metrics: AgentMetrics, clock: Callable[[], float]
) -> tuple[CacheDirectory, Journal, CacheTiers]:
    """As ``open_agent`` opens them."""
    disk = await open_cache_directory(stack, Places(settings.effective_cache_dir, settings.mounts_dir))
    journal = Journal(disk.places.journal, clock, metrics.lost_events.inc)
    stack.callback(journal.close)
    journal.open()
    tiers = await open_tiers(
        settings,
        disk,
        journal,
        on_evicted=metrics.evicted,
        verify=OpenTrust().verify,
        on_change=lambda: None,
        clock=clock,
    )
    return disk, journal, tiers


@asynccontextmanager
async def local_node(
    settings: AgentSettings, world: World, metrics: AgentMetrics, wall: Clock, elapsed: Clock
) -> AsyncIterator[LocalNode]:
    """Opened and resumed, in the order of ``open_agent``."""
    async with AsyncExitStack() as stack:
        registry = StageRegistry()
        disk, _, tiers = await open_disk_and_tiers(stack, settings, metrics, wall)
        provision = LocalProvision(world, disk, tiers)
        background = await stack.enter_async_context(BackgroundTasks())
        views = Views(disk.files, choose(settings.exposure, disk.places))
        warmer = Warmer(background, views, StagesFirst(registry, settings.warm_rate))
        records, on_ready = StageRecords(disk.places), metrics.ready_seconds.observe
        source = cast("Any", provision)

        async def settle(contents: Iterable[Digest]) -> None:
            """What a kill between a link and its note left is right; what is wrong is filled again."""
            for content in contents:
                if not disk.files.verify(content, tiers.node.index.ledger.size_of(content) or 0):
                    await tiers.node.withdraw(content, partial(_taken, disk.files, content))

        lifecycle = Lifecycle(registry, background, source, warmer, views, records, wall, elapsed, on_ready, settle)
        housekeeping = Housekeeping(lifecycle, disk.is_rebooted)
        stages = StageService(registry, lifecycle, _believed, is_node=True)
        evictions = EvictionCommands("c", "n", lifecycle, _no_prefetch)
        await housekeeping.resume()
        yield LocalNode(disk, tiers, provision, stages, evictions, housekeeping)


async def _no_prefetch(_: str) -> bool:
    return False


def _taken(files: WholeFiles, content: Digest) -> bool:
    files.forget((content,))
    files.places.file(content).unlink(missing_ok=True)
    return False


async def _believed(token: str) -> Grant:
    return OpenTrust().verify(token)


def content_files(cache: Path) -> dict[str, Path]:
    """Whole files by name."""
    return {path.name: path for path in (cache / "files").glob("??/*") if not path.name.startswith(".")}
