"""In the background, everything that is held is read again within a period; suspects are read at once. Read ``run`` first."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError
from bdn.core.pace.rate_limit import TokenBucket
from bdn.core.pace.rounds import Position, ScrubRound
from node_agent.background_tasks import in_thread
from node_agent.cache.node_cache import Clock
from node_agent.scrub.findings import Findings, ScrubRecord
from node_agent.scrub.scrubber import Scrubber
from node_agent.stage.stage import StageRegistry

logger = logging.getLogger(__name__)
BURST: Final = 16 * 1024 * 1024
_TICK_SECONDS: Final = 10.0
_NOTE_SECONDS: Final = 30.0  # between two notes of the position: what a restart reads twice
Sleep = Callable[[float], Awaitable[object]]


class StagesFirst:
    """A pace: so many bytes per second, and none while a stage brings files."""

    def __init__(self, registry: StageRegistry, rate: int, sleep: Sleep = asyncio.sleep) -> None:
        self._registry = registry
        self._sleep = sleep
        self._bucket = TokenBucket(rate, BURST, time.monotonic())

    async def __call__(self, size: int) -> None:
        """Return when ``size`` bytes may be read."""
        while busy := [stage for stage in self._registry.all() if not stage.is_terminal]:
            await busy[0].wait(None)
        await self._sleep(self._bucket.reserve(size, time.monotonic()))


@dataclass
class Rounds:
    """``period_seconds`` 0: no rounds; suspects are looked at all the same."""

    scrubber: Scrubber
    record: ScrubRecord
    pace: StagesFirst
    period_seconds: float
    clock: Clock
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _noted_at: float = 0.0
    _seen: set[Digest] = field(default_factory=set)  # what several manifests name, in this round

    async def run(self) -> None:
        """Again and again."""
        self.record.suspects.on_news = self._wake_from_any_thread()
        while True:
            try:
                await self.catch_up()
            except BdnError as error:
                logger.warning("the scrub goes on later: %s", error)
            except Exception:
                logger.exception("the scrub failed")  # a bug, and no reason to end stages that stand
            try:
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    async def catch_up(self) -> None:
        """Look at the suspects and, when it is time, at everything. Raises ``DiskFailedError`` when that cannot be noted."""
        async with self._turn:
            await self._look_at_suspects()
            if not self.period_seconds:
                return
            if self.record.round.is_due(self.period_seconds, self.clock()):
                self.record.round = ScrubRound(self.clock())
                self._seen.clear()
            if self.record.round.is_under_way:
                await self._go_on()

    async def _go_on(self) -> None:
        cache, tier = self.scrubber.cache, self.scrubber.tier
        held = (*cache.index.manifests(), *await in_thread(tier.manifests))
        for manifest in self.record.round.manifests(held):
            files = cache.index.contents_of(manifest) if manifest in cache.index.manifests() else ()
            chunks = await in_thread(tier.chunks_of, manifest)
            for position in await in_thread(self.record.round.positions, manifest, tuple(files), chunks):
                await self._look_at_suspects()
                await self._visit(position)
                self.record.round = replace(self.record.round, after=position)
                await self._note(_NOTE_SECONDS)
        self.record.round = replace(self.record.round, after=None, ended=self.clock())
        await self._note(0)

    async def _visit(self, position: Position) -> None:
        findings = Findings(pace=self.pace)
        if position.tier == "cluster":
            names = await in_thread(self.scrubber.tier.index.named_by, position.content)
            if self._is_new(position.content, len(names)):
                await self.scrubber.chunk(position.manifest, position.content, findings)
        elif self._is_new(position.content, len(self.scrubber.cache.index.named_by(position.content))):
            await self.scrubber.file(position.manifest, position.content, findings)

    def _is_new(self, content: Digest, names: int) -> bool:
        """Whether this round has not read it for another manifest."""
        if names > 1:
            if content in self._seen:
                return False
            self._seen.add(content)
        return True

    async def _look_at_suspects(self) -> None:
        for content in self.record.suspects.all():
            manifest = next(iter(self.scrubber.cache.index.named_by(content)), None)
            if manifest is not None:
                await self.scrubber.file(manifest, content, Findings(pace=self.pace))
            self.record.suspects.clear(content)

    async def _note(self, seconds: float) -> None:
        now = time.monotonic()
        if now - self._noted_at >= seconds:
            self._noted_at = now
            await in_thread(self.record.save)

    def _wake_from_any_thread(self) -> Callable[[], object]:
        loop = asyncio.get_running_loop()
        return lambda: loop.call_soon_threadsafe(self._news.set)
