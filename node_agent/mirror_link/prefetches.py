"""Prefetches: manifests come onto this node before a job asks for them, and stay as the cache's ordinary content."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from bdn.core.cache.index import Holder
from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CanceledError, InternalError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.wire.operation_schema import PrefetchCommand, PrefetchReport, Report, Tier
from bdn.wire.stage_schema import BytesFrom
from node_agent.background_tasks import in_thread, to_the_end
from node_agent.cache.cache_events import about_holder
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.records import Held
from node_agent.fetch.fill_context import RetryBudget
from node_agent.fill.provision import FillRequest, Provision
from node_agent.stage.stage import StageProgress
from node_agent.trust import Trust

logger = logging.getLogger(__name__)
_TELL_SECONDS: Final = 2.0  # between two words about progress


class PrefetchCommands:
    """Carries out the mirror's commands. Their manifests are leased while they are being filled, and no longer.

    A fill goes on from what is on disk. ``wake`` is called when there is progress to report. One event loop.
    """

    def __init__(self, provision: Provision, cache: NodeCache, trust: Trust, wake: Callable[[], None]) -> None:
        self._provision = provision
        self._cache = cache
        self._trust = trust
        self._wake = wake
        self._runs: dict[str, _Run] = {}

    async def run(self, command: PrefetchCommand, tell: Callable[[Report], None]) -> None:
        """Fill what the grant names.

        Raises:
            BdnError: it could not be filled, which is recorded; ``CanceledError`` after ``cancel``.
        """
        run = self._runs[command.id] = _Run(command.id, tell, self._wake)
        try:
            await self._fill_unless_canceled(run, command.grant)
        except Exception as error:
            known = error if isinstance(error, BdnError) else InternalError(f"{type(error).__name__}: {error}")
            logger.warning("prefetch %s failed: %s", run.id, known)
            facts = {"code": known.code, "problem": str(known)}
            failed = [about_holder("failed", manifest, run.holder, facts) for manifest in run.manifests]
            await in_thread(self._cache.events.decided, failed)
            raise
        finally:
            run.tell()
            del self._runs[command.id]

    async def cancel(self, prefetch_id: str) -> bool:
        """End a prefetch and its lease, for a forced eviction; False when none is at work under this id."""
        run = self._runs.get(prefetch_id)
        if run is None:
            return False
        run.is_canceled = True
        run.task.cancel()
        await asyncio.wait([run.task])
        return True

    async def _fill_unless_canceled(self, run: _Run, grant: str) -> None:
        try:
            await self._fill(run, grant)
        except asyncio.CancelledError:
            if not run.is_canceled:
                raise  # the agent ends
            run.task.uncancel()
            raise CanceledError(f"prefetch {run.id}, by a forced eviction,") from None

    async def _fill(self, run: _Run, grant: str) -> None:
        granted = self._trust.verify(grant)
        run.manifests = list(dict.fromkeys(mount.manifest for mount in granted.mounts))
        run.holder = Holder(run.id, "prefetch", organisation=granted.organisation)
        try:
            await self._provision.run(FillRequest(run.manifests, grant, run.holder, TrafficClass.PREFETCH, run.begin))
        finally:
            await to_the_end(self._cache.leave(run.id))
        came = zip(run.manifests, run.came(), strict=True)
        arrived = [about_holder("arrived", one, run.holder, bytes_from.model_dump()) for one, bytes_from in came]
        await in_thread(self._cache.events.decided, arrived)


class _Run:
    """One prefetch, and how far it is."""

    def __init__(self, prefetch_id: str, tell: Callable[[Report], None], wake: Callable[[], None]) -> None:
        self.id = prefetch_id
        self.holder = Holder(prefetch_id, "prefetch")
        self.manifests: list[Digest] = []
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - commands run in tasks
        self.task = task
        self.is_canceled = False
        self._tell = tell
        self._wake = wake
        self._bytes_total: int | None = None
        self._watch: _Watch | None = None

    def begin(self, held: Sequence[Held], missing: frozenset[Digest], _: RetryBudget) -> _Watch:
        """What is to come is known."""
        manifests = [one.manifest for one in held]
        self._bytes_total = sum(manifest.bytes_total for manifest in manifests)
        self._watch = _Watch(StageProgress(manifests, missing), len(manifests), self.tell_soon)
        self.tell()
        return self._watch

    def came(self) -> list[BytesFrom]:
        """Where the bytes of each manifest came from."""
        return self._watch.came() if self._watch else []

    def tell(self) -> None:
        """How far it is."""
        total = Counter[str]()
        for one in self.came():
            total.update(one.model_dump())
        report = PrefetchReport(bytes_total=self._bytes_total, bytes_from=BytesFrom(**total))
        self._tell(Report(id=self.id, prefetch=report))

    def tell_soon(self) -> None:
        """There is progress that the mirror shall hear of."""
        self.tell()
        self._wake()


class _Watch:
    """Counts what comes, and says so every few seconds."""

    def __init__(self, progress: StageProgress, manifests: int, wake: Callable[[], None]) -> None:
        self._progress = progress
        self._manifests = manifests
        self._wake = wake
        self._told_at = time.monotonic()

    def report(self, file: Digest, tier: Tier, size: int) -> None:
        self._progress.report(file, tier, size)
        if (now := time.monotonic()) - self._told_at >= _TELL_SECONDS:
            self._told_at = now
            self._wake()

    def restart(self, file: Digest) -> None:
        self._progress.restart(file)

    def finish(self, file: Digest, size: int) -> None:
        self._progress.finish(file, size)

    def came(self) -> list[BytesFrom]:
        return [self._progress.bytes_from(one) for one in range(self._manifests)]
