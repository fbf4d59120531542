"""One held file or chunk is read again and, where it is wrong, mended or put aside. Read ``file`` first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, DiskFailedError
from bdn.core.store.layout import FileLayout
from bdn.wire.operation_schema import Outcome
from node_agent.background_tasks import in_thread
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.cache.node_cache import NodeCache
from node_agent.disk.places import Places
from node_agent.scrub.findings import Damage, Findings, KnownLayouts, ScrubTarget, Telling, event_about, plain
from node_agent.scrub.reading import Reading
from node_agent.scrub.record import ScrubRecord
from node_agent.scrub.repair import Demotion, Mending, Relinking
from node_agent.scrub.right_bytes import Refill, RightBytes

logger = logging.getLogger(__name__)
_GONE: Final = Damage("it is not on the disk any more")
_NOT_ITS_NAME: Final = Damage("its bytes are not what its name says, and nobody can say which of them")


@dataclass(frozen=True)
class Scrubber:
    """Verifies and repairs. One repair at a time: who comes to the same chunk meanwhile looks again, and finds it right.

    A file is noted as suspect before it is touched: after a kill in the middle it is looked at before anything else.
    """

    places: Places
    cache: NodeCache
    tier: ClusterTier
    layouts: KnownLayouts
    reading: Reading
    right_bytes: RightBytes
    mending: Mending
    demotion: Demotion
    refill: Refill
    relinking: Relinking
    record: ScrubRecord
    telling: Telling
    clock: Callable[[], float]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    # --- what is held ---

    async def file(self, manifest: Digest, content: Digest, findings: Findings) -> None:
        """A whole file of the node tier; one that is not whole, or not held, is passed over."""
        size = self.cache.index.ledger.size_of(content)
        if size is None or not self._is_whole(content):
            return
        subject, layout = ScrubTarget(self.places.file(content), content, manifest), await self._layout(content, size)
        try:
            wrong = await self._look(subject, layout, size, findings)
        except FileNotFoundError:
            wrong, layout = [_GONE], None
        if wrong and self._is_whole(content):  # otherwise it was evicted meanwhile
            await self._treat(subject, layout, wrong, findings)

    async def chunk(self, manifest: Digest, chunk: Digest, findings: Findings) -> None:
        """A chunk of the cluster tier. A wrong one is dropped: it is fetched again when somebody wants it."""
        size = self.tier.index.ledger.size_of(chunk)
        if size is None or not self.tier.holds(chunk):
            return
        subject, layout = (
            ScrubTarget(self.tier.files.path(manifest, chunk), chunk, manifest, "cluster"),
            plain(chunk, size),
        )
        try:
            wrong = await self.reading.read(subject.path, layout, "cluster", findings)
            still = await self.reading.keep(subject, layout, wrong, self.clock())
        except FileNotFoundError:
            return  # evicted; or taken away by somebody else, which whoever opens it finds out
        if still and findings.is_mending:
            await in_thread(self.tier.lose, chunk)
            reason = f"{still[0].reason}; it was dropped, and is fetched again when somebody wants it"
            await self._tell(subject, [Damage(reason, still[0].chunk)], "lost", findings)
        else:
            await self._tell(subject, still, "damaged", findings)

    async def copy(self, subject: ScrubTarget, size: int, findings: Findings) -> None:
        """A staged file with bytes of its own. It is never taken away: a job may be reading it."""
        layout = await self._layout(subject.content, size)
        try:
            left = await self._look(subject, layout, size, findings)
            if left and layout is not None:
                async with self._turn:
                    left = await self.reading.keep(subject, layout, left, self.clock())
                    left = await self._mend(subject, layout, left, findings) if findings.is_mending else left
        except FileNotFoundError:
            left = [_GONE]
        await self._tell(subject, left, "damaged", findings)

    async def _look(
        self, subject: ScrubTarget, layout: FileLayout | None, size: int, findings: Findings
    ) -> list[Damage]:
        if layout is not None:
            return await self.reading.read(subject.path, layout, subject.tier, findings)
        is_right = await self.reading.is_right(subject.path, subject.content, size, findings)
        return [] if is_right else [_NOT_ITS_NAME]

    # --- what is wrong ---

    async def _treat(
        self, subject: ScrubTarget, layout: FileLayout | None, wrong: Sequence[Damage], findings: Findings
    ) -> None:
        async with self._turn:
            try:
                still = wrong if layout is None else await self.reading.keep(subject, layout, wrong, self.clock())
            except FileNotFoundError:
                return  # evicted
            if not findings.is_mending or not still:
                await self._tell(subject, still, "damaged", findings)
                return
            self.record.suspects.add(subject.content)
            await self._note_suspects()
            with self.cache.shelf.withheld(subject.content):
                await self._repair(subject, layout, still, findings)
            self.record.suspects.clear(subject.content)

    async def _repair(
        self, subject: ScrubTarget, layout: FileLayout | None, wrong: Sequence[Damage], findings: Findings
    ) -> None:
        if layout is None:
            await self._replace(subject, wrong, findings)
            return
        left = await self._mend(subject, layout, wrong, findings)
        if any(one.is_of_the_disk for one in left):
            await self._replace(subject, left, findings)
        elif left:
            indices = frozenset(one.chunk.index for one in left if one.chunk)
            await self.cache.put_aside(subject.content, partial(self.demotion.to_part, layout, indices))
            await self._lost(subject, left, findings)

    async def _mend(
        self, subject: ScrubTarget, layout: FileLayout, wrong: Sequence[Damage], findings: Findings
    ) -> list[Damage]:
        """Put the right bytes in, in place; returns what could not be mended, with the reason."""
        left: list[Damage] = []
        for one in wrong:
            try:
                await self._mend_one(subject, layout, one)
            except BdnError as error:
                reason = f"{one.reason}; {error}"
                left.append(Damage(reason, one.chunk, one.found, is_of_the_disk=isinstance(error, DiskFailedError)))
            else:
                await self._tell(subject, [one], "repaired", findings)
        return left

    async def _mend_one(self, subject: ScrubTarget, layout: FileLayout, wrong: Damage) -> None:
        if wrong.chunk is None:
            await in_thread(self.mending.cut, subject.path, layout.size)
        else:
            await in_thread(self.mending.check, subject.path)
            put = partial(self.mending.put_back, subject.path, wrong.chunk)
            await self.right_bytes.bring(subject.content, wrong.chunk, put)

    async def _replace(self, subject: ScrubTarget, wrong: Sequence[Damage], findings: Findings) -> None:
        """Another file in its place, here and in views: this one is gone, or its disk does not keep what is written."""
        earlier = await in_thread(self.relinking.look, subject.path)
        await self.cache.put_aside(subject.content, partial(self.demotion.to_quarantine, subject.content))
        try:
            await self.refill.bring(subject.content)
        except BdnError as error:
            reasons = [Damage(f"{one.reason}; {error}", one.chunk) for one in wrong]
            await self._lost(subject, reasons, findings)
            if earlier:
                await in_thread(self.relinking.leave, subject.content, earlier)
        else:
            if earlier:
                await in_thread(self.relinking.replace, subject.content, earlier)
            await self._tell(subject, wrong, "repaired", findings)

    async def _lost(self, subject: ScrubTarget, wrong: Sequence[Damage], findings: Findings) -> None:
        await self._tell(subject, wrong, "lost", findings)
        self.reading.events.lost()
        jobs = self.telling.jobs_with(self.cache.index.named_by(subject.content))
        seen = f"these jobs see it as it is: {', '.join(jobs)}" if jobs else "no job sees it"
        logger.error("file %s is not served any more, and is filled again by the next stage; %s", subject.content, seen)

    # --- inside ---

    async def _note_suspects(self) -> None:
        """A disk that is full or read-only shall not keep anybody from a repair, nor from looking at what comes next."""
        try:
            await in_thread(self.record.save)
        except DiskFailedError as error:
            logger.warning("the suspects of the scrub are not noted: %s", error)

    def _is_whole(self, content: Digest) -> bool:
        return self.cache.index.ledger.is_committed(content)

    async def _layout(self, content: Digest, size: int) -> FileLayout | None:
        known = await in_thread(self.layouts.find, content, size, self.cache.index.named_by(content))
        if known is None:
            with suppress(BdnError):  # then it can still be said whether the whole is right
                return await self.right_bytes.layout(content)
        return known

    async def _tell(self, subject: ScrubTarget, wrong: Sequence[Damage], outcome: Outcome, findings: Findings) -> None:
        for one in wrong:
            item = await in_thread(self.telling.item, subject, one, outcome)
            logger.warning("%s chunk %s of %s: %s (%s)", item.tier, item.chunk, item.path, outcome, one.reason)
            findings.items.append(item)
            await in_thread(self.cache.events.decided, [event_about(item)])
            self.reading.events.damaged(subject.tier, outcome)
