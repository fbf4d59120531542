"""One held file or chunk is read again and, where it is damaged, repaired or quarantined. Read ``file`` first."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.core.chunk import Digest, FileLayout
from bdn.core.errors import BdnError, DiskFailedError
from bdn.wire.operation_schema import Outcome
from node_agent.background_tasks import in_thread
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.cache.node_cache import NodeCache
from node_agent.scrub.findings import (
    Damage,
    DamageReports,
    Findings,
    ScrubRecord,
    ScrubTarget,
    event_about,
    single_chunk,
)
from node_agent.scrub.reading import ScrubReader
from node_agent.scrub.repair import FileRepair, check_writable, identity, rewrite, truncate
from node_agent.scrub.repair_source import RepairSource

logger = logging.getLogger(__name__)
_GONE: Final = Damage("it is not on the disk any more")
_NOT_ITS_NAME: Final = Damage("its bytes are not what its name says, and nobody can say which of them")


@dataclass(frozen=True)
class Scrubber:
    """Verifies and repairs, one repair at a time: whoever comes to the same chunk meanwhile reads again, and finds it right.

    A file is recorded as suspect before it is touched: after a kill in the middle it is read before anything else.
    """

    cache: NodeCache
    tier: ClusterTier
    reader: ScrubReader
    repair: FileRepair
    source: RepairSource
    record: ScrubRecord
    reports: DamageReports
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    # --- what is held ---

    async def file(self, manifest: Digest, content: Digest, findings: Findings) -> None:
        """A whole file of the node tier; one that is not whole, or not held, is passed over."""
        size = self.cache.index.ledger.size_of(content)
        if size is None or not self._is_whole(content):
            return
        target = ScrubTarget(self.repair.places.file(content), content, manifest)
        layout = await self.source.layout(content, size)
        try:
            wrong = await self._look(target, layout, size, findings)
        except FileNotFoundError:
            wrong, layout = [_GONE], None
        if wrong and self._is_whole(content):  # otherwise it was evicted meanwhile
            await self._treat(target, layout, wrong, findings)

    async def chunk(self, manifest: Digest, chunk: Digest, findings: Findings) -> None:
        """A chunk of the cluster tier. A wrong one is dropped: it is fetched again when somebody wants it."""
        size = self.tier.index.ledger.size_of(chunk)
        if size is None or not self.tier.holds(chunk):
            return
        target = ScrubTarget(self.tier.files.path(manifest, chunk), chunk, manifest, "cluster")
        layout = single_chunk(chunk, size)
        try:
            wrong = await self.reader.read(target.path, layout, "cluster", findings)
            still = await self.reader.confirm(target, layout, wrong)
        except FileNotFoundError:
            return  # evicted; or taken away by somebody else, which whoever opens it finds out
        if still and findings.is_repairing:
            await in_thread(self.tier.lose, chunk)
            reason = f"{still[0].reason}; it was dropped, and is fetched again when somebody wants it"
            await self._tell(target, [Damage(reason, still[0].chunk)], "lost", findings)
        else:
            await self._tell(target, still, "damaged", findings)

    async def copy(self, target: ScrubTarget, size: int, findings: Findings) -> None:
        """A staged file with bytes of its own. It is never taken away: a job may be reading it."""
        layout = await self.source.layout(target.content, size)
        try:
            left = await self._look(target, layout, size, findings)
            if left and layout is not None:
                async with self._turn:
                    left = await self.reader.confirm(target, layout, left)
                    left = await self._rewrite(target, layout, left, findings) if findings.is_repairing else left
        except FileNotFoundError:
            left = [_GONE]
        await self._tell(target, left, "damaged", findings)

    async def _look(
        self, target: ScrubTarget, layout: FileLayout | None, size: int, findings: Findings
    ) -> list[Damage]:
        if layout is not None:
            return await self.reader.read(target.path, layout, target.tier, findings)
        is_right = await self.reader.is_right(target.path, target.content, size, findings)
        return [] if is_right else [_NOT_ITS_NAME]

    # --- what is wrong ---

    async def _treat(
        self, target: ScrubTarget, layout: FileLayout | None, wrong: Sequence[Damage], findings: Findings
    ) -> None:
        async with self._turn:
            try:
                still = wrong if layout is None else await self.reader.confirm(target, layout, wrong)
            except FileNotFoundError:
                return  # evicted
            if not findings.is_repairing or not still:
                await self._tell(target, still, "damaged", findings)
                return
            self.record.suspects.add(target.content)
            await self._save_suspects()
            with self.cache.chunks.withheld(target.content):
                await self._repair(target, layout, still, findings)
            self.record.suspects.clear(target.content)

    async def _repair(
        self, target: ScrubTarget, layout: FileLayout | None, wrong: Sequence[Damage], findings: Findings
    ) -> None:
        if layout is None:
            await self._replace(target, wrong, findings)
            return
        left = await self._rewrite(target, layout, wrong, findings)
        if any(one.is_of_the_disk for one in left):
            await self._replace(target, left, findings)
        elif left:
            indices = frozenset(one.chunk.index for one in left if one.chunk)
            await self.cache.withdraw(target.content, partial(self.repair.to_part, layout, indices))
            await self._lost(target, left, findings)

    async def _rewrite(
        self, target: ScrubTarget, layout: FileLayout, wrong: Sequence[Damage], findings: Findings
    ) -> list[Damage]:
        """Put the right bytes in place; returns what could not be repaired, with the reason."""
        left: list[Damage] = []
        for one in wrong:
            try:
                await self._rewrite_one(target, layout, one)
            except BdnError as error:
                reason = f"{one.reason}; {error}"
                left.append(Damage(reason, one.chunk, one.found, is_of_the_disk=isinstance(error, DiskFailedError)))
            else:
                await self._tell(target, [one], "repaired", findings)
        return left

    async def _rewrite_one(self, target: ScrubTarget, layout: FileLayout, wrong: Damage) -> None:
        if wrong.chunk is None:
            await in_thread(truncate, target.path, layout.size)
        else:
            await in_thread(check_writable, target.path)
            put = partial(rewrite, target.path, wrong.chunk, self.source.buffers)
            await self.source.fetch(target.content, wrong.chunk, put)

    async def _replace(self, target: ScrubTarget, wrong: Sequence[Damage], findings: Findings) -> None:
        """Another file in its place, here and in views: this one is gone, or its disk does not keep what is written."""
        earlier = await in_thread(identity, target.path)
        await self.cache.withdraw(target.content, partial(self.repair.to_quarantine, target.content))
        try:
            await self.source.refill(target.content)
        except BdnError as error:
            reasons = [Damage(f"{one.reason}; {error}", one.chunk) for one in wrong]
            await self._lost(target, reasons, findings)
            if earlier:
                await in_thread(self.repair.mark_lacking, target.content, earlier)
        else:
            if earlier:
                await in_thread(self.repair.relink, target.content, earlier)
            await self._tell(target, wrong, "repaired", findings)

    async def _lost(self, target: ScrubTarget, wrong: Sequence[Damage], findings: Findings) -> None:
        await self._tell(target, wrong, "lost", findings)
        self.reader.events.lost()
        jobs = self.reports.jobs_with(self.cache.index.named_by(target.content))
        seen = f"these jobs see it as it is: {', '.join(jobs)}" if jobs else "no job sees it"
        logger.error("file %s is not served any more, and is filled again by the next stage; %s", target.content, seen)

    # --- inside ---

    async def _save_suspects(self) -> None:
        """A disk that is full or read-only prevents no repair, and no look at what comes next."""
        try:
            await in_thread(self.record.save)
        except DiskFailedError as error:
            logger.warning("the suspects of the scrub are not noted: %s", error)

    def _is_whole(self, content: Digest) -> bool:
        return self.cache.index.ledger.is_committed(content)

    async def _tell(self, target: ScrubTarget, wrong: Sequence[Damage], outcome: Outcome, findings: Findings) -> None:
        for one in wrong:
            item = await in_thread(self.reports.item, target, one, outcome)
            logger.warning("%s chunk %s of %s: %s (%s)", item.tier, item.chunk, item.path, outcome, one.reason)
            findings.items.append(item)
            await in_thread(self.cache.events.decided, [event_about(item)])
            self.reader.events.damaged(target.tier, outcome)
