"""Carries out the mirror's commands: evictions, prefetches and verifications. Read ``CommandInbox`` first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bdn.core.cache.index import EvictionPlan, EvictionReason, Holder, Leased, Victim
from bdn.core.chunk import Digest, digest_in
from bdn.core.errors import BdnError, CanceledError, InternalError, InvalidRequestError, LimitExceededError
from bdn.core.layout import Manifest
from bdn.core.pace.rate_limit import TrafficClass
from bdn.core.pace.rounds import ScrubRound
from bdn.disk.threads import in_thread, to_the_end
from bdn.wire.heartbeat_schema import Command, Report
from bdn.wire.operation_schema import (
    EvictCommand,
    EvictedItem,
    EvictReport,
    PathVerification,
    PathVerificationRequest,
    PrefetchCommand,
    PrefetchReport,
    Tier,
    VerifyCommand,
    VerifyReport,
    listed,
)
from bdn.wire.shapes import ErrorBody, body_of
from bdn.wire.stage_schema import BytesFrom
from node_agent.background_tasks import BackgroundTasks, in_steps
from node_agent.cache.cache_events import OnRequest, about_holder
from node_agent.cache.node_cache import NodeCache
from node_agent.fill.progress import FillProgress
from node_agent.fill.provision import FillRequest, Provision
from node_agent.scrub.reading import Findings, ScrubTarget
from node_agent.scrub.repair import FilesOfStages
from node_agent.scrub.scrubber import Scrubber
from node_agent.stage.lifecycle import Lifecycle
from node_agent.trust import Trust

logger = logging.getLogger(__name__)
_REMEMBERED: Final = 1000  # command ids: a delayed answer of the mirror may repeat a command
_LARGEST_REPORT: Final = 3 * 1024**2  # bytes, some 15,000 manifests; the mirror accepts 4 MiB per request
_TELL_SECONDS: Final = 2.0  # between two progress reports of a prefetch


Run = Callable[[Any, Callable[[Report], None]], Awaitable[None]]


@dataclass(eq=False)
class CommandInbox:
    """Accepts each command once by its id, runs it in the background, and reports it until the report is delivered.

    Nothing is stored on disk: to a restarted agent the mirror repeats the commands without a final report.

    ``runs`` maps each field of ``Command`` to its implementation, which reports progress. ``wake`` is called when there
    is something to report, ``on_delivered`` with each final report that the mirror has recorded. One event loop.
    """

    background: BackgroundTasks
    runs: Mapping[str, Run]
    wake: Callable[[], None]
    on_delivered: Callable[[Report], None] = lambda _: None
    _seen: dict[str, None] = field(default_factory=dict)
    _reports: dict[str, Report] = field(default_factory=dict)

    def accept(self, command: Command) -> None:
        """Start the command, unless its id is known."""
        if command.id in self._seen:
            return
        self._seen[command.id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.pop(next(iter(self._seen)))
        self._reports[command.id] = Report(id=command.id, running=True)
        self.background.start(self._run(command), f"command {command.id}")

    def reports(self, *, only_running: bool) -> list[Report]:
        """Progress of each command; final reports until ``delivered``, unless ``only_running``."""
        return [report for report in self._reports.values() if report.running or not only_running]

    def delivered(self, reports: Sequence[Report]) -> None:
        for report in reports:
            if not report.running:
                self._reports.pop(report.id, None)
                self.on_delivered(report)

    async def _run(self, command: Command) -> None:
        """Reports errors instead of raising: a client of the mirror waits for the result."""
        try:
            await self._carry_out(command)
        except BdnError as error:
            self._end(command, body_of(error))
        except Exception as error:
            logger.exception("command %s failed", command.id)
            self._end(command, body_of(InternalError(f"{type(error).__name__}: {error}")))
        else:
            self._end(command, None)

    async def _carry_out(self, command: Command) -> None:
        for name, run in self.runs.items():
            if (asked := getattr(command, name)) is not None:
                await run(asked, self._tell)
                return
        raise InvalidRequestError("this version of the agent does not know the command; use the mirror's version")

    def _tell(self, report: Report) -> None:
        self._reports[report.id] = report.model_copy(update={"running": True})

    def _end(self, command: Command, error: ErrorBody | None) -> None:
        report = self._reports[command.id].model_copy(update={"running": False})
        if (size := len(report.model_dump_json())) > _LARGEST_REPORT:
            report = Report(id=command.id)  # the command was carried out; the journal has the details
            error = error or body_of(
                LimitExceededError(
                    "bytes of the report of a command, which was carried out ('bdn-admin why --node' lists its events)",
                    size,
                    _LARGEST_REPORT,
                )
            )
        self._reports[command.id] = report.model_copy(update={"error": error or report.error})
        self.wake()


# --- Evictions: by manifest, by job, by age or everything ---


@dataclass(frozen=True)
class EvictionCommands:
    """Carries out evictions, atomic per manifest and tier. Victims evicted before a failure stay evicted."""

    cluster: str
    node: str
    lifecycle: Lifecycle
    break_prefetch: Callable[[str], Awaitable[bool]]  # False: no prefetch has this id
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, command: EvictCommand, tell: Callable[[Report], None]) -> None:
        """Runs one command at a time. Raises what ``evict`` raises."""
        async with self._turn:
            tell(Report(id=command.id, evict=EvictReport(items=await self.evict(command))))

    async def evict(self, command: EvictCommand) -> list[EvictedItem]:
        """Evict, or plan in a dry run. Returns victims, and refusals with the holders in the way.

        Raises:
            InvalidRequestError: the command has no selection, or several.
            DiskFailedError, MountFailedError: something could not be removed.
        """
        manifests = self._selected(command)
        items: list[EvictedItem] = []
        if command.tier in (None, "node"):
            items += await self._items("node", await self._evict_node(command, manifests))
        if command.tier in (None, "cluster"):
            items += await self._items("cluster", await self._evict_cluster(command, manifests))
        return items

    async def _evict_node(self, command: EvictCommand, manifests: list[Digest] | None) -> EvictionPlan:
        cache, size = self.lifecycle.cache, command.lru_bytes
        if command.dry_run:
            return await in_steps(cache.index.planning(manifests, size=size, force=command.force))
        await self.lifecycle.release_abandoned()
        broken: dict[Digest, tuple[Holder, ...]] = {}
        if command.force:
            forced = await in_steps(cache.index.planning(manifests, size=size, force=True))
            victims = [one for one in forced.victims if not command.in_the_way(map(str, one.holders))]
            broken = {victim.manifest: victim.holders for victim in victims}
            await self._break_leases(victims)
        account = OnRequest(command, "node", broken)
        # Without force: a stage may have acquired a new lease since the leases were broken; the new lease is respected.
        done = await cache.evict(
            lambda index: index.planning(manifests, size=size), "forced" if command.force else "request", account
        )
        gone = [replace(victim, holders=broken.get(victim.manifest, ())) for victim in done.victims]
        seen = {one.manifest for one in done.victims} | {one.manifest for one in done.refused}
        # A manifest that was only begun went with its last holder; the report names it all the same.
        begun = [
            Victim(manifest, (), 0, holders) for manifest, holders in broken.items() if holders and manifest not in seen
        ]
        also = [*account.spared(done.refused), *map(account, begun)]
        await in_thread(cache.events.decided, also)
        return EvictionPlan((*gone, *begun), tuple(_without_planned(one, command) for one in done.refused))

    async def _evict_cluster(self, command: EvictCommand, manifests: list[Digest] | None) -> EvictionPlan:
        """The cluster tier has no leases: a peer that reads a chunk continues, or reads the chunk elsewhere."""
        tier = self.lifecycle.cache.chunks.tier
        if command.dry_run:
            return EvictionPlan(await in_thread(tier.plan, manifests, command.lru_bytes), ())
        reason: EvictionReason = "forced" if command.force else "request"
        account = OnRequest(command, "cluster", {})
        return EvictionPlan(await in_thread(tier.evict, manifests, command.lru_bytes, reason, account), ())

    async def _break_leases(self, victims: Sequence[Victim]) -> None:
        for victim in victims:
            for holder in victim.holders:
                logger.warning("forced eviction of manifest %s: releasing %s", victim.manifest, holder)
                if await self.break_prefetch(holder.stage_id):
                    continue
                stage = self.lifecycle.registry.get(holder.stage_id)
                if stage is not None:  # otherwise it has ended meanwhile
                    error = CanceledError(f"{holder}, by a forced eviction,")
                    await self.lifecycle.release(stage, error, ending="forced")

    def _selected(self, command: EvictCommand) -> list[Digest] | None:
        """The selected manifests; None: all, or by age. Raises ``InvalidRequestError``."""
        manifests = self._manifests(command)
        if [command.lru_bytes is not None, manifests is not None, command.all].count(True) != 1:
            raise InvalidRequestError("select by exactly one of manifests, job, lru_bytes and all")
        return manifests

    def _manifests(self, command: EvictCommand) -> list[Digest] | None:
        if command.manifests is not None:
            return list(map(digest_in, command.manifests))
        if command.job is None:
            return None
        stages = [stage for stage in self.lifecycle.registry.all() if stage.record.job_id == command.job]
        return list(dict.fromkeys(manifest for stage in stages for manifest in stage.record.manifests))

    async def _items(self, tier: Tier, plan: EvictionPlan) -> list[EvictedItem]:
        sources = self.lifecycle.registry.sources()
        found: tuple[Victim | Leased, ...] = (*plan.victims, *plan.refused)
        return await in_thread(lambda: [self._item(tier, one, sources.get(str(one.manifest), [])) for one in found])

    def _item(self, tier: Tier, one: Victim | Leased, sources: list[str]) -> EvictedItem:
        return EvictedItem(
            tier=tier,
            cluster=self.cluster,
            node=self.node,
            manifest=str(one.manifest),
            sources=sources,
            bytes=one.size if isinstance(one, Victim) else 0,
            refused=isinstance(one, Leased),
            holders=[str(holder) for holder in one.holders],
        )


def _without_planned(leased: Leased, command: EvictCommand) -> Leased:
    """With the holders that are why it was refused; all of them if a planned one came back meanwhile."""
    new = tuple(holder for holder in leased.holders if command.in_the_way([str(holder)]))
    return replace(leased, holders=new or leased.holders)


# --- Prefetches: fill manifests before a job requests them; they stay as ordinary content ---


class PrefetchCommands:
    """Carries out prefetches. Manifests are leased only while they are being filled.

    A fill resumes from the parts on disk. ``wake`` is called when there is progress to report. One event loop.
    """

    def __init__(self, provision: Provision, cache: NodeCache, trust: Trust, wake: Callable[[], None]) -> None:
        self._provision = provision
        self._cache = cache
        self._trust = trust
        self._wake = wake
        self._runs: dict[str, _Run] = {}

    async def run(self, command: PrefetchCommand, tell: Callable[[Report], None]) -> None:
        """Fill the manifests of the grant.

        Raises ``BdnError``: the fill failed, which is recorded as an event; ``CanceledError`` after ``cancel``.
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

    async def keep(self, volume_id: str, grant: str) -> None:
        """Fill the newest checkpoint of an ended run. Raises what ``run`` raises."""
        await self.run(PrefetchCommand(id=f"pre_{volume_id}", grant=grant), lambda _: None)

    async def cancel(self, prefetch_id: str) -> bool:
        """End a prefetch and its lease, for a forced eviction. Returns False if no running prefetch has this id."""
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
        run.holder = Holder(run.id, "prefetch", granted.organisation)
        try:
            await self._provision.run(FillRequest(run.manifests, grant, run.holder, TrafficClass.PREFETCH, run.begin))
        finally:
            await to_the_end(self._cache.leave(run.id))
        came = zip(run.manifests, run.came(), strict=True)
        arrived = [about_holder("arrived", one, run.holder, bytes_from.model_dump()) for one, bytes_from in came]
        await in_thread(self._cache.events.decided, arrived)


class _Run:
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
        self._progress: FillProgress | None = None
        self._told_at = 0.0

    def begin(self, manifests: Sequence[Manifest], progress: FillProgress) -> None:
        self._bytes_total = sum(manifest.bytes_total for manifest in manifests)
        self._progress, self._told_at = progress, time.monotonic()
        progress.on_bytes = self._tell_now_and_then
        self.tell()

    def came(self) -> list[BytesFrom]:
        return self._progress.bytes_from() if self._progress else []

    def tell(self) -> None:
        total = Counter[str]()
        for one in self.came():
            total.update(one.model_dump())
        report = PrefetchReport(bytes_total=self._bytes_total, bytes_from=BytesFrom(**total))
        self._tell(Report(id=self.id, prefetch=report))

    def _tell_now_and_then(self) -> None:
        if (now := time.monotonic()) - self._told_at >= _TELL_SECONDS:
            self._told_at = now
            self.tell()
            self._wake()


# --- Verifications: commands of the mirror, and local requests about a path ---


@dataclass(frozen=True)
class VerificationCommands:
    """Reads held content again and verifies it, for the mirror or for a local client."""

    scrubber: Scrubber
    staged: FilesOfStages

    async def run(self, command: VerifyCommand, tell: Callable[[Report], None]) -> None:
        """Verify all selected content. Findings before an error are reported, too."""
        findings = Findings(command.repair)
        try:
            with self.scrubber.source.grants.using(command.grants):
                await self._verify(command, findings)
        finally:
            verified, error = report_of(findings)
            tell(Report(id=command.id, verify=verified, error=error))

    async def _verify(self, command: VerifyCommand, findings: Findings) -> None:
        async for position in self.scrubber.left_of(ScrubRound(0.0), set(), _named(command)):
            if command.tier in (None, position.tier):
                await self.scrubber.look(position, findings)

    async def look_at(self, request: PathVerificationRequest) -> PathVerification:
        """Verify staged files, and the cache's files that they come from.

        Raises ``NotFoundError``: there are no staged files at this path.
        """
        findings = Findings(request.repair)
        for file in await in_thread(self.staged.find, request.path):
            await self.scrubber.file(file.manifest, file.entry.digest, findings)
            if not await in_thread(_is_same, file.path, self.scrubber.repair.places.file(file.entry.digest)):
                target = ScrubTarget(file.path, file.entry.digest, file.manifest, shown=file.shown)
                await self.scrubber.copy(target, file.entry.size, findings)
        verified, error = report_of(findings)
        return PathVerification(id=request.path, error=error, **verified.model_dump())


def report_of(findings: Findings) -> tuple[VerifyReport, ErrorBody | None]:
    """The findings; if they are too many for a report, a part of them and an error that says so."""
    items, too_many = listed(findings.items)
    return VerifyReport(items=items, chunks_read=findings.chunks_read, bytes_read=findings.bytes_read), too_many


def _named(command: VerifyCommand) -> frozenset[Digest] | None:
    if command.all == (command.manifests is not None):
        raise InvalidRequestError("select by exactly one of manifests and all")
    return None if command.manifests is None else frozenset(map(digest_in, command.manifests))


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # gone, or a link to itself; reading it will report that
        return False
