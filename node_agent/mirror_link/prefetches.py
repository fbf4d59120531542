"""Prefetches: manifests come onto this node before a job asks for them, and stay as the cache's ordinary content."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from bdn.core.cache.leases import Holder
from bdn.core.digest import Digest
from bdn.core.errors import BdnError, CanceledError, InternalError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.wire.errors import ErrorBody, body_of
from bdn.wire.operation_schema import PrefetchCommand, PrefetchReport, ReportedState, Tier
from bdn.wire.stage_schema import BytesFrom
from node_agent.background_tasks import BackgroundTasks, in_thread, to_the_end
from node_agent.cache.cache_events import about_holder
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.records import Held
from node_agent.fetch.fill_context import RetryBudget
from node_agent.fill.provision import FillRequest, Provision
from node_agent.stage.stage import StageProgress
from node_agent.trust import Trust

logger = logging.getLogger(__name__)
_TELL_SECONDS: Final = 2.0  # between two words about progress


class Prefetches:
    """Carries out the mirror's commands. Their manifests are leased while they are being filled, and no longer.

    Nothing is recorded here: the mirror repeats what was not reported, and a fill goes on from what is on disk. ``wake`` is
    called when there is something to report. One event loop.
    """

    def __init__(
        self,
        background: BackgroundTasks,
        provision: Provision,
        cache: NodeCache,
        trust: Trust,
        wake: Callable[[], None],
    ) -> None:
        self._background = background
        self._provision = provision
        self._cache = cache
        self._trust = trust
        self._wake = wake
        self._runs: dict[str, _Run] = {}

    def take(self, command: PrefetchCommand) -> None:
        """Begin, unless it is at work or has ended and the mirror has not heard of it."""
        if command.id not in self._runs:
            run = self._runs[command.id] = _Run(command.id, self._wake)
            run.task = self._background.start(self._work(run, command.grant), f"prefetch {command.id}")

    def reports(self) -> list[PrefetchReport]:
        """How far each is; one that has ended is told until ``delivered``."""
        return [run.report() for run in self._runs.values()]

    def delivered(self, reports: Sequence[PrefetchReport]) -> None:
        """The mirror has these."""
        for report in reports:
            if report.state != "RUNNING":
                self._runs.pop(report.id, None)

    async def cancel(self, prefetch_id: str) -> bool:
        """End a prefetch and its lease, for a forced eviction; False when none is at work under this id."""
        run = self._runs.get(prefetch_id)
        if run is None or run.task is None or run.state != "RUNNING":
            return False
        run.task.cancel()
        await asyncio.wait([run.task])
        if run.task.cancelled():  # otherwise it ended before it heard of it
            error = CanceledError(f"prefetch {prefetch_id}, by a forced eviction,")
            await self._fail(run, error)
        return True

    async def _work(self, run: _Run, grant: str) -> None:
        try:
            granted = self._trust.verify(grant)
            run.manifests = list(dict.fromkeys(mount.manifest for mount in granted.mounts))
            run.holder = Holder(run.id, "prefetch", organisation=granted.organisation)
            try:
                await self._provision.run(
                    FillRequest(run.manifests, grant, run.holder, TrafficClass.PREFETCH, run.begin)
                )
            finally:
                await to_the_end(self._cache.leave(run.id))
        except BdnError as error:
            logger.warning("prefetch %s failed: %s", run.id, error)
            await self._fail(run, error)
        except Exception as error:
            logger.exception("prefetch %s failed", run.id)
            await self._fail(run, InternalError(f"{type(error).__name__}: {error}"))
        else:
            came = zip(run.manifests, run.came(), strict=True)
            arrived = [about_holder("arrived", one, run.holder, bytes_from.model_dump()) for one, bytes_from in came]
            await in_thread(self._cache.events.decided, arrived)
            run.end("READY")

    async def _fail(self, run: _Run, error: BdnError) -> None:
        facts = {"code": error.code, "problem": str(error)}
        failed = [about_holder("failed", manifest, run.holder, facts) for manifest in run.manifests]
        await in_thread(self._cache.events.decided, failed)
        run.end("FAILED", error)


class _Run:
    """One prefetch, and how far it is."""

    def __init__(self, prefetch_id: str, wake: Callable[[], None]) -> None:
        self.id = prefetch_id
        self.holder = Holder(prefetch_id, "prefetch")
        self.manifests: list[Digest] = []
        self.task: asyncio.Task[None] | None = None
        self.state: ReportedState = "RUNNING"
        self._wake = wake
        self._error: ErrorBody | None = None
        self._bytes_total: int | None = None
        self._watch: _Watch | None = None

    def begin(self, held: Sequence[Held], missing: frozenset[Digest], _: RetryBudget) -> _Watch:
        """What is to come is known."""
        manifests = [one.manifest for one in held]
        self._bytes_total = sum(manifest.bytes_total for manifest in manifests)
        self._watch = _Watch(StageProgress(manifests, missing), len(manifests), self._wake)
        return self._watch

    def came(self) -> list[BytesFrom]:
        """Where the bytes of each manifest came from."""
        return self._watch.came() if self._watch else []

    def end(self, state: ReportedState, error: BdnError | None = None) -> None:
        """It is over."""
        self.state = state
        self._error = body_of(error) if error else None
        self._wake()

    def report(self) -> PrefetchReport:
        """For the mirror."""
        total = Counter[str]()
        for one in self.came():
            total.update(one.model_dump())
        came = BytesFrom(**total)
        return PrefetchReport(
            id=self.id, state=self.state, bytes_total=self._bytes_total, bytes_from=came, error=self._error
        )


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
