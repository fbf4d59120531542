"""An agent without a network: real disk, cache, stages and views, and bytes that come out of a dictionary."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bdn.core.digest import Digest
from bdn.core.errors import UpstreamUnavailableError
from bdn.core.grant import Grant, GrantedMount
from bdn.core.store.layout import FileLayout
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.records import Held
from node_agent.disk.group_sync import GroupSync
from node_agent.fetch.fill_context import RetryBudget
from node_agent.fill.fill_unit import FillUnit, units_of
from node_agent.fill.packed_parts import PackedParts
from node_agent.fill.part import Part
from node_agent.fill.provision import FillRequest
from node_agent.ground import Ground, open_ground
from node_agent.jobs import open_jobs, stages_of
from node_agent.metrics import Metrics
from node_agent.mirror_link.evictions import Evictions
from node_agent.settings import AgentSettings
from node_agent.stage.housekeeping import Housekeeping
from node_agent.stage.registry import StageBook
from node_agent.stage.stages import Stages
from tests.support.agent.cache_world import World
from tests.support.agent.rig import Clock


@dataclass
class LocalProvision:
    """In place of ``Provision``: the same order of admission, parts and commits, one chunk after the other."""

    world: World
    ground: Ground
    sync: GroupSync
    failing: bool = False  # the next fill breaks off in its middle
    _locks: defaultdict[Digest, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    async def run(self, request: FillRequest) -> list[Held]:
        held = [self.world.manifests[digest] for digest in request.manifests]
        missing = await self.ground.cache.admit(held, request.holder)
        request.begin(held, missing, RetryBudget(0, list))
        for one in held:
            layouts = one.file_layouts(missing).values()
            for unit in units_of(layouts, one.manifest.digest, ""):
                await self._fill(unit)
        return held

    async def _fill(self, unit: FillUnit) -> None:
        """At most one fill per file, as ``Flights`` has it."""
        async with self._locks[unit.chunks[0] if unit.chunks else unit.digests[0]]:
            cache = self.ground.cache
            missing = [digest for digest in unit.digests if not cache.index.ledger.is_committed(digest)]
            await asyncio.sleep(0)
            if missing:
                files = unit.only(missing).files
                await (self._cut(files) if files[0].slice else self._write(files[0]))

    async def _cut(self, files: tuple[FileLayout, ...]) -> None:
        lies = files[0].slice
        assert lies is not None
        parts = PackedParts(self.ground.disk.places, self.sync, self.ground.disk.aside, files)
        try:
            parts.write(memoryview(self.world.chunks[lies.slab]))
            self._break_off()
            await parts.commit()
        finally:
            parts.close()
        for file in files:
            self.ground.cache.commit(file.digest)

    async def _write(self, layout: FileLayout) -> None:
        part = Part(self.ground.disk.places, layout, self.ground.disk.writes)
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
                self.ground.cache.commit(layout.digest)

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

    ground: Ground
    provision: LocalProvision
    stages: Stages
    evictions: Evictions
    housekeeping: Housekeeping

    @property
    def cache(self) -> NodeCache:
        return self.ground.cache

    async def settled(self) -> None:
        """No stage is worked on any more."""
        while working := [stage.task for stage in self.stages.book.all() if stage.task and stage.is_working]:
            await asyncio.wait(working)  # a task that looks through a stage may begin another, that mends it


@asynccontextmanager
async def local_node(
    settings: AgentSettings, world: World, metrics: Metrics, wall: Clock, elapsed: Clock
) -> AsyncIterator[LocalNode]:
    """Opened and resumed. Composed in the order of ``open_agent``."""
    async with AsyncExitStack() as stack:
        book = StageBook()
        ground = await open_ground(stack, settings, book, metrics, wall)
        provision = LocalProvision(world, ground, stack.enter_context(GroupSync(ground.disk.places.root)))
        jobs = await open_jobs(stack, ground, cast("Any", provision), elapsed)
        believing = dataclasses.replace(ground, trust=cast("Any", OpenTrust()))
        evictions = Evictions("c", "n", book, jobs.lifecycle, ground.cache, ground.tier, _no_prefetch)
        await jobs.housekeeping.resume()
        yield LocalNode(ground, provision, stages_of(believing, jobs, _no_keys), evictions, jobs.housekeeping)


async def _no_prefetch(_: str) -> bool:
    return False


async def _no_keys() -> None:
    pass


def content_files(cache: Path) -> dict[str, Path]:
    """Whole files by name."""
    return {path.name: path for path in (cache / "files").glob("??/*") if not path.name.startswith(".")}
