"""Verifies held files and chunks and repairs or quarantines damage: in rounds, as suspects, or on request.

Read ``Scrubber.file`` first, then ``Rounds.run``.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from bdn.core.chunk import Digest, FileLayout
from bdn.core.errors import BdnError, DiskFailedError
from bdn.core.events import Event
from bdn.core.pace.rounds import Position, ScrubRound
from bdn.disk.durable import disk_errors, write_at_once
from bdn.disk.threads import in_thread
from bdn.wire.operation_schema import DamagedItem, Outcome
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.cache.quarantine import SuspectFiles
from node_agent.scrub.reading import FileDamage, Findings, ScrubReader, ScrubTarget, single_chunk
from node_agent.scrub.repair import FileRepair, RepairSource, check_writable, identity, rewrite, truncate
from node_agent.stage.stage import StageRegistry
from node_agent.stage.warm import StagesFirst

logger = logging.getLogger(__name__)
_TICK_SECONDS: Final = 10.0
_NOTE_SECONDS: Final = 30.0  # between two saves of the position: a restart reads this much twice
_GONE: Final = FileDamage("it is not on the disk any more")
_NOT_ITS_NAME: Final = FileDamage("its content does not match its name, and its damaged chunks are not known")


class _Saved(BaseModel):
    round: ScrubRound
    suspects: tuple[Digest, ...]


class ScrubRecord:
    """The present ``round`` and ``suspects``, as of the last ``save`` on disk. Blocking.

    Losing the file in a power cut costs one round that begins anew.
    """

    def __init__(self, path: Path, suspects: SuspectFiles, now: float) -> None:
        self.round = ScrubRound(now)
        self.suspects = suspects
        self._path = path
        self._lock = threading.Lock()

    def load(self) -> None:
        with suppress(OSError, ValueError):
            saved = _Saved.model_validate_json(self._path.read_bytes())
            self.round = saved.round
            self.suspects.restore(saved.suspects)

    def save(self) -> None:
        saved = _Saved(round=self.round, suspects=self.suspects.all())
        with self._lock, disk_errors(self._path):
            write_at_once(self._path, saved.model_dump_json().encode())


def event_about(item: DamagedItem) -> Event:
    """Omits paths in views: they name the stage, which other organisations must not see."""
    path = "" if item.path is None or item.path.startswith("/") else item.path
    facts = {"tier": item.tier, "reason": item.reason, "path": path}
    return Event.of(item.outcome, facts, manifest=item.manifest, digest=item.chunk)


@dataclass(frozen=True)
class Scrubber:
    """Verifies and repairs, one repair at a time: a second reader of the same chunk reads again and finds it right.

    A file is recorded as suspect before it is changed: after a kill in the middle it is verified before anything
    else.
    """

    cache: NodeCache
    reader: ScrubReader
    repair: FileRepair
    source: RepairSource
    record: ScrubRecord
    registry: StageRegistry
    cluster: str
    node: str
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    # --- what is held ---

    async def left_of(
        self, round_: ScrubRound, seen: set[Digest], only: frozenset[Digest] | None = None
    ) -> AsyncIterator[Position]:
        """The positions that a round has not reached, in order; only manifests in ``only``, if given.

        A file of several manifests is yielded once: ``seen`` contains those yielded before.
        """
        index, tier = self.cache.index, self.cache.chunks.tier
        held = {*index.manifests(), *await in_thread(tier.held)}
        for manifest in round_.manifests(held if only is None else held & only):
            files = tuple(index.contents_of(manifest)) if index.holds(manifest) else ()
            chunks = await in_thread(tier.chunks_of, manifest)
            for position in await in_thread(round_.positions, manifest, files, chunks):
                if position.tier == "node":
                    if position.content in seen:
                        continue
                    if len(index.named_by(position.content)) > 1:
                        seen.add(position.content)
                yield position

    async def look(self, position: Position, findings: Findings) -> None:
        await (self.chunk if position.tier == "cluster" else self.file)(position.manifest, position.content, findings)

    async def file(self, manifest: Digest, content: Digest, findings: Findings) -> None:
        """Verify and repair a whole file of the node tier. Skips contents that are incomplete or not held."""
        size = self.cache.index.ledger.size_of(content)
        if size is None or not self._is_whole(content):
            return
        target = ScrubTarget(self.repair.places.file(content), content, manifest)
        layout = await self.source.layout(content, size)
        files = self.repair.files
        before = await in_thread(files.look, content)
        try:
            wrong = await self._look(target, layout, size, findings)
        except FileNotFoundError:
            wrong, layout = [_GONE], None
        if not wrong:
            await in_thread(files.confirm, content, before)
        elif self._is_whole(content):  # otherwise it was evicted meanwhile
            await self._treat(target, layout, wrong, findings)
            if findings.is_repairing and self._is_whole(content):
                await in_thread(files.verify, content, size)

    async def settle(self, contents: Iterable[Digest]) -> None:
        """Verify changed files that a stage waits for; wrong files are repaired or dropped."""
        for content in contents:
            size = self.cache.index.ledger.size_of(content)
            if size is None or not self._is_whole(content) or await in_thread(self.repair.files.verify, content, size):
                continue
            for manifest in tuple(self.cache.index.named_by(content))[:1]:
                await self.file(manifest, content, Findings())

    async def chunk(self, manifest: Digest, chunk: Digest, findings: Findings) -> None:
        """Verify a chunk of the cluster tier. A wrong chunk is dropped and fetched again on demand."""
        tier = self.cache.chunks.tier
        size = tier.ledger.size_of(chunk)
        if size is None or not tier.holds(chunk):
            return
        target = ScrubTarget(tier.files.path(manifest, chunk), chunk, manifest, "cluster")
        layout = single_chunk(chunk, size)
        try:
            wrong = await self.reader.read(target.path, layout, "cluster", findings)
            still = await self.reader.confirm(target, layout, wrong)
        except FileNotFoundError:
            return  # evicted; or deleted by another process, which the next open detects
        if still and findings.is_repairing:
            await in_thread(tier.lose, chunk)
            reason = f"{still[0].reason}; it was dropped, and is fetched again at the next request"
            await self._tell(target, [FileDamage(reason, still[0].chunk)], "lost", findings)
        else:
            await self._tell(target, still, "damaged", findings)

    async def copy(self, target: ScrubTarget, size: int, findings: Findings) -> None:
        """Verify and repair a staged copy. The file is never removed: a job may be reading it."""
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
    ) -> list[FileDamage]:
        if layout is not None:
            return await self.reader.read(target.path, layout, target.tier, findings)
        is_right = await self.reader.is_right(target.path, target.content, size, findings)
        return [] if is_right else [_NOT_ITS_NAME]

    # --- damage ---

    async def _treat(
        self, target: ScrubTarget, layout: FileLayout | None, wrong: Sequence[FileDamage], findings: Findings
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
        self, target: ScrubTarget, layout: FileLayout | None, wrong: Sequence[FileDamage], findings: Findings
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
        self, target: ScrubTarget, layout: FileLayout, wrong: Sequence[FileDamage], findings: Findings
    ) -> list[FileDamage]:
        """Rewrite the damaged chunks; returns the damages that could not be repaired, with reasons."""
        left: list[FileDamage] = []
        for one in wrong:
            try:
                await self._rewrite_one(target, layout, one)
            except BdnError as error:
                reason = f"{one.reason}; {error}"
                left.append(FileDamage(reason, one.chunk, one.found, is_of_the_disk=isinstance(error, DiskFailedError)))
            else:
                await self._tell(target, [one], "repaired", findings)
        return left

    async def _rewrite_one(self, target: ScrubTarget, layout: FileLayout, wrong: FileDamage) -> None:
        if wrong.chunk is None:
            await in_thread(truncate, target.path, layout.size)
        else:
            await in_thread(check_writable, target.path)
            put = partial(rewrite, target.path, wrong.chunk, self.source.buffers)
            await self.source.fetch(target.content, wrong.chunk, put)

    async def _replace(self, target: ScrubTarget, wrong: Sequence[FileDamage], findings: Findings) -> None:
        """Replace the file in the cache and in views: it is gone, or the disk cannot store its right bytes."""
        earlier = await in_thread(identity, target.path)
        await self.cache.withdraw(target.content, partial(self.repair.to_quarantine, target.content))
        try:
            await self.source.refill(target.content)
        except BdnError as error:
            reasons = [FileDamage(f"{one.reason}; {error}", one.chunk) for one in wrong]
            await self._lost(target, reasons, findings)
            if earlier:
                await in_thread(self.repair.mark_lacking, target.content, earlier)
        else:
            if earlier:
                await in_thread(self.repair.relink, target.content, earlier)
            await self._tell(target, wrong, "repaired", findings)

    async def _lost(self, target: ScrubTarget, wrong: Sequence[FileDamage], findings: Findings) -> None:
        await self._tell(target, wrong, "lost", findings)
        self.reader.metrics.lost_files.inc()
        manifests = self.cache.index.named_by(target.content)
        ready = [stage.record for stage in self.registry.all() if stage.record.state == "READY"]
        jobs = [record.job_id for record in ready if manifests & record.manifests.keys()]
        seen = f"jobs that still see the damaged file: {', '.join(jobs)}" if jobs else "no job sees it"
        logger.error("file %s is lost: no longer served, and filled again by the next stage; %s", target.content, seen)

    # --- internals ---

    async def _save_suspects(self) -> None:
        """A full or read-only disk does not prevent repairs or later checks."""
        try:
            await in_thread(self.record.save)
        except DiskFailedError as error:
            logger.warning("cannot store the list of suspect files: %s; a restart forgets them", error)

    def _is_whole(self, content: Digest) -> bool:
        return self.cache.index.ledger.is_committed(content)

    async def _tell(
        self, target: ScrubTarget, wrong: Sequence[FileDamage], outcome: Outcome, findings: Findings
    ) -> None:
        for one in wrong:
            item = await in_thread(self._item, target, one, outcome)
            facts = item.model_dump(
                include={"tier", "manifest", "path", "chunk", "outcome", "reason"}, exclude_none=True
            )
            logger.warning("a chunk on this disk was wrong", extra=facts)
            findings.items.append(item)
            await in_thread(self.cache.events.decided, [event_about(item)])
            self.reader.metrics.damaged_chunks.labels(target.tier, outcome).inc()

    def _item(self, target: ScrubTarget, damage: FileDamage, outcome: Outcome) -> DamagedItem:
        """With the node, the sources and one of perhaps several paths."""
        manifest, held = str(target.manifest), self.cache.files.records.manifest(target.manifest)
        paths = (entry.path for entry in held.files if entry.digest == target.content) if held else ()
        return DamagedItem(
            tier=target.tier,
            cluster=self.cluster,
            node=self.node,
            manifest=manifest,
            sources=self.registry.sources().get(manifest, []),
            path=target.shown or next(iter(paths), None),
            chunk=str(damage.chunk.digest if damage.chunk else target.content),
            outcome=outcome,
            reason=damage.reason,
        )


# --- in rounds ---


@dataclass
class Rounds:
    """``period_seconds`` 0: no rounds, but suspects are still verified."""

    scrubber: Scrubber
    record: ScrubRecord
    pace: StagesFirst
    period_seconds: float
    clock: Clock
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _noted_at: float = 0.0
    _seen: set[Digest] = field(default_factory=set)  # files of several manifests, verified in this round

    async def run(self) -> None:
        self.record.suspects.on_news = self._wake_from_any_thread()
        while True:
            try:
                await self.catch_up()
            except BdnError as error:
                logger.warning("scrub interrupted: %s; it resumes in %d s", error, _TICK_SECONDS)
            except Exception:
                logger.exception("the scrub failed")  # a bug must not end running stages
            try:
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    async def catch_up(self) -> None:
        """Verify the suspects and, if a round is due, everything.

        Raises ``DiskFailedError`` if progress cannot be saved.
        """
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
        async for position in self.scrubber.left_of(self.record.round, self._seen):
            await self._look_at_suspects()
            await self.scrubber.look(position, Findings(pace=self.pace))
            self.record.round = replace(self.record.round, after=position)
            await self._note(_NOTE_SECONDS)
        self.record.round = replace(self.record.round, after=None, ended=self.clock())
        await self._note(0)

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
