"""Workers claim mirrors from the database and run them. Any number may run; they resume mirrors of killed workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import (
    BdnError,
    Fact,
    InternalError,
    PushGivenUpError,
    StoreUnavailableError,
    single_error,
)
from bdn.core.listing import ListingWriter
from bdn.core.manifest import Root
from bdn.core.pace.retry import Outage
from bdn.core.source.upstream import Resolution, Source, UpstreamFile
from bdn.core.source.uri import CheckpointUri, WeightsSource
from bdn.core.store import organisation_of, reader_of, team_of
from bdn.mirror.chunks.writer import SetWriter, put_manifest
from bdn.mirror.db import checkpoints, chunks, events, manifests, mirrors
from bdn.mirror.db.chunks import SetEndedError
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.db.errors import DatabaseUnavailableError
from bdn.mirror.db.identities import Known
from bdn.mirror.db.mirrors import MirrorState, listing_owner
from bdn.mirror.db.recall import is_alike, recall_key
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow
from bdn.mirror.db.waiting import NEW_WORK, SingleFlight, cancel_topic, in_background
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.ingest.copy_missing import CopyMissing
from bdn.mirror.ingest.progress import ClaimLostError, CopyProgress, SourceCounters
from bdn.mirror.ingest.room import RoomForSources
from bdn.mirror.ingest.survey import Survey, Surveyor
from bdn.mirror.upstream.checkpoints import pinned
from bdn.traces import spans
from bdn.wire.mirror_schema import WeightsSourceBody
from bdn.wire.shapes import body_of

logger = logging.getLogger(__name__)

CLAIM_SECONDS: Final = 15.0
RENEW_SECONDS: Final = 3.0
FLUSH_SECONDS: Final = 0.5
POLL_SECONDS: Final = 1.0
_REPAIR: Final = "repair"  # the job in identity tokens, in place of a mirror


@dataclass(frozen=True)
class Worker:
    """Works on up to ``jobs`` mirrors at once, and on one more of an organisation without a running mirror.

    So the mirrors of one organisation, however slow, do not delay the first mirror of another.
    """

    database: Database
    ingest: Ingest
    jobs: int
    on_transferred: Callable[[int], None]
    at_work: dict[str, CopyProgress]  # by mirror; callers in this process read progress here
    name: str = field(default_factory=lambda: f"{socket.gethostname()[:200]}:{os.getpid()}:{os.urandom(4).hex()}")
    _claims: Iterator[int] = field(default_factory=itertools.count)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work in the background until the block ends; then release unfinished mirrors."""
        try:
            async with in_background(self._take_work()):
                yield
        finally:
            async with self.database.write() as session:
                await mirrors.release_claims(session, self.name)

    async def _take_work(self) -> None:
        free = asyncio.Semaphore(self.jobs + 1)
        new_work = self.database.watch.topic(NEW_WORK)
        at_work: set[asyncio.Task[None]] = set()
        organisation = ""  # of the last claim

        def ended(work: asyncio.Task[None]) -> None:
            at_work.discard(work)
            free.release()
            new_work.change()  # retries a claim that was limited to idle organisations

        async with asyncio.TaskGroup() as works:
            while True:
                await free.acquire()
                changes = new_work.changes
                # A new name for each claim: this very worker may claim a mirror again after its claim expired.
                claimant = f"{self.name}:{next(self._claims)}"
                claimed = None
                with self._surviving():
                    now = self.database.now()
                    async with self.database.write() as session:
                        claimed = await mirrors.claim(
                            session,
                            claimant,
                            now=now,
                            until=now + CLAIM_SECONDS,
                            after=organisation,
                            only_idle=len(at_work) >= self.jobs,
                        )
                if claimed is not None:
                    mirror_id, organisation = claimed
                    work = works.create_task(self._work(mirror_id, claimant))
                    at_work.add(work)
                    work.add_done_callback(ended)
                else:
                    free.release()
                    await new_work.changed(changes, POLL_SECONDS)

    @staticmethod
    @contextmanager
    def _surviving(mirror_id: str | None = None) -> Iterator[None]:
        """A failure of one mirror ends neither the worker nor its other mirrors. None: of the claim of the next one."""
        facts = {} if mirror_id is None else {"mirror": mirror_id}
        resumes = f"a worker resumes the mirror when its claim expires ({CLAIM_SECONDS:.0f} s)"
        try:
            yield
        except BdnError as error:  # the database is away: the claim expires, and the mirror is resumed when it is back
            what = f"mirroring interrupted; {resumes}" if mirror_id else "cannot claim a mirror now; retrying"
            logger.warning(what, extra={**facts, "error": str(error)})
        except Exception:
            logger.exception(
                f"worker failed; {resumes}" if mirror_id else "worker failed to claim a mirror", extra=facts
            )

    async def _work(self, mirror_id: str, claimant: str) -> None:
        progress = self.at_work[mirror_id] = CopyProgress(self.database, mirror_id, claimant, self.on_transferred)
        with self._surviving(mirror_id):
            try:
                async with self.database.read() as session:
                    mirror = await mirrors.get(session, mirror_id, None)
                logger.info("mirroring", extra={"mirror": mirror_id, "sources": len(mirror.sources)})
                await self._run(mirror, progress)
            except ClaimLostError:
                said = "lost the claim on a mirror: canceled, or claimed by another worker"
                logger.info(said, extra={"mirror": mirror_id})
                async with self.database.write() as session:
                    await mirrors.release_claims(session, claimant)
            finally:
                # Another entry if the claim expired and this very worker claimed the mirror again.
                if self.at_work.get(mirror_id) is progress:
                    del self.at_work[mirror_id]
                self.database.watch.notify(mirror_id)  # nothing is under way any more

    async def _run(self, mirror: MirrorState, progress: CopyProgress) -> None:
        row = mirror.row
        failure: BdnError | None = None
        try:
            async with in_background(self._keep_claim(row.id, progress.claimant)), in_background(self._flush(progress)):
                with spans.work("mirror", row.traceparent, mirror=row.id, sources=len(mirror.sources)):
                    await self.ingest.run(mirror, progress)
        except asyncio.CancelledError:
            with suppress(BdnError, ClaimLostError):
                await progress.flush()
            raise
        except ClaimLostError:
            with suppress(ClaimLostError):
                await progress.flush()  # of a canceled mirror
            raise
        except DatabaseUnavailableError:
            raise
        except BdnError as error:
            failure = error
        except Exception as error:
            logger.exception("mirroring failed", extra={"mirror": row.id})
            failure = InternalError(f"{type(error).__name__} while mirroring")
        await progress.flush()
        if _is_stopping():
            raise asyncio.CancelledError
        now, counters = self.database.now(), progress.counters.values()
        async with progress.writing() as session:
            error_body = body_of(failure).model_dump() if failure else None
            status = "FAILED" if failure else "READY"
            await mirrors.finish(session, row.id, status, now=now, error=error_body)
        figures: dict[str, object] = {
            "mirror": row.id,
            "organisation": row.organisation,
            "bytes": sum(one.transferred + one.reused for one in counters),
            "transferred": sum(one.transferred for one in counters),
            "seconds": round(now - (row.started_at or row.created_at), 3),
        }
        if failure:
            logger.warning("mirror failed", extra={**figures, "code": failure.code, "error": str(failure)})
        else:
            logger.info("mirror ready", extra=figures)

    async def _keep_claim(self, mirror_id: str, claimant: str) -> None:
        cancel = self.database.watch.topic(cancel_topic(mirror_id))
        while True:
            changes = cancel.changes
            async with self.database.write() as session:
                if not await mirrors.renew_claim(session, mirror_id, claimant, self.database.now() + CLAIM_SECONDS):
                    raise ClaimLostError
            await cancel.changed(changes, RENEW_SECONDS)

    @staticmethod
    async def _flush(progress: CopyProgress) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await progress.flush()


def _is_stopping() -> bool:
    """Whether this task was canceled, also when a task group that failed at the same moment lost it (Python 3.11)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(frozen=True)
class Ingest:
    """Runs one mirror from SYNCING to READY or FAILED. Resumable at any point: stored chunks are not fetched again."""

    database: Database
    surveyor: Surveyor
    copier: Copier
    room: RoomForSources
    _copies: SingleFlight[str, Known] = field(default_factory=SingleFlight)

    async def run(self, mirror: MirrorState, progress: CopyProgress) -> None:
        """Work on all sources that are not READY; a source's failure does not stop other sources.

        Raises:
            BdnError: the first source's failure, after all sources have ended.
            PushGivenUpError: the mirror is a push whose client makes no more calls.
            ClaimLostError, DatabaseUnavailableError: at once; this worker lost the mirror, or cannot work on it now.
        """
        if mirrors.is_push(mirror):
            raise PushGivenUpError(mirror.sources[0].source)
        failures: dict[int, BdnError] = {}

        async def one(row: MirrorSourceRow) -> None:
            try:
                await self._waiting_for_the_store(mirror.row, row, progress)
            except (ClaimLostError, DatabaseUnavailableError):
                raise
            except BdnError as error:
                failures[row.position] = error
            except Exception as error:
                logger.exception("mirroring a source failed", extra={"mirror": row.mirror_id, "source": row.source})
                failures[row.position] = InternalError(f"{type(error).__name__} while mirroring {row.source}")
            else:
                return
            body = body_of(failures[row.position]).model_dump()
            async with progress.writing() as session:
                await mirrors.update_source(session, row.mirror_id, row.position, status="FAILED", error=body)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for row in mirror.sources:
                    if row.status != "READY":
                        group.create_task(one(row))
        if failures:
            raise failures[min(failures)]

    async def _waiting_for_the_store(self, mirror: MirrorRow, row: MirrorSourceRow, progress: CopyProgress) -> None:
        """Copy a source, and retry while the store is away, as long as for upstreams.

        Stored chunks are not fetched again.
        """
        retries = self.copier.reader.retries
        policy = replace(retries.policy, attempts=1)  # each attempt makes many requests
        outage = Outage(policy)
        while True:
            began = retries.budgets.clock()
            try:
                with spans.span("source", position=row.position, source=row.source):
                    return await self._source(mirror, row, progress)
            except DatabaseUnavailableError:
                raise
            except StoreUnavailableError as error:
                counters = progress.counters[row.position]
                if counters.transferred > row.bytes_transferred:  # the store was available meanwhile
                    outage = Outage(policy)
                row.bytes_transferred, row.bytes_reused = counters.transferred, counters.reused
                failure = error
            await progress.flush()  # the next attempt starts from the counts in the database
            await retries.wait_out(failure, outage, began)

    async def _source(self, mirror: MirrorRow, row: MirrorSourceRow, progress: CopyProgress) -> None:
        organisation, team = mirror.organisation, mirror.team or None
        reader = reader_of(organisation, team)
        wanted = WeightsSourceBody.model_validate(row.request).to_core()
        progress.counters[row.position] = SourceCounters(row.bytes_transferred, row.bytes_reused)
        async with self.surveyor.open(wanted, organisation, row.mirror_id, row.resolved_revision, team) as source:
            with spans.span("resolve"):
                resolution = await source.resolve()
            if await self._reuse_published(reader, row, wanted, resolution, progress):
                return
            async with self.database.write() as session:
                owner = f"{row.mirror_id}/{row.position}"
                is_resumed = await chunks.of(session, chunks.filling, owner) is not None
                set_id = await chunks.of(session, chunks.begin, owner)
            progress.has_strays |= is_resumed
            writer = SetWriter(self.database, self.copier.store, set_id, organisation)
            try:
                before = partial(self.surveyor.before, wanted, organisation)
                with spans.span("list") as span:
                    survey = await self.surveyor.survey(wanted, source, resolution, writer.hold, before)
                    span.set(files=len(survey.files), bytes=survey.bytes_total, bytes_missing=survey.bytes_missing)
                await self._announce(row, survey, progress)
                await self.room.check(row.source, survey)
                await self._copy(row, source, survey, writer, progress)
                root = await asyncio.to_thread(put_manifest, survey.placed(), writer.put)
                listing = await self._write_listing(survey, row, organisation)
                if progress.has_strays:
                    names = await asyncio.to_thread(_names, survey, root)
                    async with progress.writing() as session:
                        await chunks.of(session, chunks.keep_only, set_id, names, self.database.now())
                revision = survey.resolution.revision
                del survey  # hundreds of megabytes for a million files
                with spans.span("publish", manifest=str(root.digest)):
                    await self._publish(
                        reader,
                        row,
                        wanted,
                        writer=writer,
                        root=root,
                        listing=listing,
                        progress=progress,
                        revision=revision,
                    )
            except SetEndedError:
                raise ClaimLostError from None  # the mirror was canceled

    async def restore(self, row: MirrorSourceRow, organisation: str, team: str | None, writer: SetWriter) -> None:
        """Copy what the store lost of a READY source again, as it was resolved then.

        Manifests that refer to these chunks have them again. Raises ``BdnError``.
        """
        wanted = WeightsSourceBody.model_validate(row.request).to_core()
        progress = CopyProgress(self.database, None, "", lambda _: None, {0: SourceCounters()})
        async with self.surveyor.open(wanted, organisation, _REPAIR, row.resolved_revision, team) as source:
            survey = await self.surveyor.survey(wanted, source, None, writer.hold)
            copying = CopyMissing(self.copier, self._copies, progress, writer, source, row.source, 0, survey)
            await copying.run()
            await asyncio.to_thread(put_manifest, survey.placed(), writer.put)

    async def _write_listing(self, survey: Survey, row: MirrorSourceRow, organisation: str) -> Digest:
        """Store what the upstream listed, for the next mirror of the source, in a set that no grant opens."""
        async with self.database.write() as session:
            set_id = await chunks.of(session, chunks.begin, listing_owner(row.mirror_id, row.position))
        writer = SetWriter(self.database, self.copier.store, set_id, organisation)
        files, is_whole = (survey.files, False) if survey.tree is None else (survey.tree, True)
        return await asyncio.to_thread(write_listing, files, writer, is_whole=is_whole)

    async def _copy(
        self, row: MirrorSourceRow, source: Source, survey: Survey, writer: SetWriter, progress: CopyProgress
    ) -> None:
        copying = CopyMissing(self.copier, self._copies, progress, writer, source, row.source, row.position, survey)
        with spans.span("copy", files=len(survey.files), bytes=survey.bytes_missing):
            await copying.run()
            await progress.flush()

    async def _reuse_published(
        self, reader: str, row: MirrorSourceRow, wanted: WeightsSource, resolution: Resolution, progress: CopyProgress
    ) -> bool:
        """Whether this commit was published before.

        If so, it is READY without a listing, because a commit never changes.

        If some of it is damaged, it is surveyed like a new commit, and what is damaged is fetched. A bucket has no
        commits and must be listed. Access was checked: resolving sent this request's credentials to the upstream.
        """
        async with progress.writing() as session:
            known = await published_before(session, reader, wanted, resolution.revision)
            if known is None or known.manifest is None:
                return False
            await manifests.lock(session, [known.manifest])  # a concurrent eviction or collection is over, or waits
            found = await published_before(session, reader, wanted, resolution.revision)
            if found is None or found.manifest != known.manifest:
                return False
            counters = progress.counters[row.position]
            counters.reused = max(0, (found.bytes_total or 0) - counters.transferred)
            await manifests.touch(session, [found.manifest], self.database.now())
            await mirrors.lift_tombstone(session, organisation_of(reader), found.manifest)
            await mirrors.update_source(
                session,
                row.mirror_id,
                row.position,
                status="READY",
                error=None,
                resolved_revision=found.resolved_revision,
                manifest=found.manifest,
                recall_key=found.recall_key,
                files_total=found.files_total,
                bytes_total=found.bytes_total,
                bytes_reused=counters.reused,
                warnings=found.warnings,
            )
            if found.listing is not None:
                await mirrors.take_listing(session, found, row.mirror_id, row.position)
            facts = {"mirror": row.mirror_id, "source": row.source, "revision": resolution.revision}
            event = events.event_of("reused", facts, found.manifest, organisation=organisation_of(reader))
            await events.record(session, self.database.now(), [event])
        return True

    async def _announce(self, row: MirrorSourceRow, survey: Survey, progress: CopyProgress) -> None:
        """Write the totals, before the first byte. What an earlier attempt transferred is not counted as reused again."""
        counters = progress.counters[row.position]
        counters.reused = max(0, survey.bytes_total - counters.transferred - survey.bytes_missing)
        async with progress.writing() as session:
            await mirrors.update_source(
                session,
                row.mirror_id,
                row.position,
                status="SYNCING",
                error=None,
                resolved_revision=survey.resolution.revision,
                files_total=len(survey.files),
                bytes_total=survey.bytes_total,
                bytes_reused=counters.reused,
                warnings=list(survey.warnings),
            )

    async def _publish(
        self,
        reader: str,
        row: MirrorSourceRow,
        wanted: WeightsSource,
        *,
        writer: SetWriter,
        root: Root,
        listing: Digest,
        progress: CopyProgress,
        revision: str | None,
    ) -> None:
        name, organisation = root.digest.hex, organisation_of(reader)
        async with progress.writing() as session:
            now = self.database.now()
            await manifests.publish(session, writer.set_id, root, now)
            await chunks.of(session, chunks.publish_of, listing_owner(row.mirror_id, row.position))
            await mirrors.lift_tombstone(session, organisation, name)
            await mirrors.update_source(
                session,
                row.mirror_id,
                row.position,
                status="READY",
                manifest=name,
                recall_key=recall_key(reader, wanted, revision),
                listing=listing.hex,
            )
            counters = progress.counters[row.position]
            facts: dict[str, Fact] = {
                "mirror": row.mirror_id,
                "source": row.source,
                "revision": revision,
                "files": root.files_total,
                "transferred": counters.transferred,
                "reused": counters.reused,
            }
            await events.record(session, now, [events.event_of("mirrored", facts, name, organisation=organisation)])
        logger.info("manifest published", extra={"mirror": row.mirror_id, "manifest": str(root.digest)})


def write_listing(files: Iterable[UpstreamFile], writer: SetWriter, *, is_whole: bool) -> Digest:
    """Put a listing of files in path order. Blocking."""
    listing = ListingWriter(is_whole=is_whole)
    for file in files:
        for page in listing.add(file):
            writer.put(page.digest, page.content)
    for document in listing.finish():
        writer.put(document.digest, document.content)
    return document.digest


def _names(survey: Survey, root: Root) -> set[Digest]:
    chunks = {chunk for one in survey.known.values() for chunk in one.chunks.values()}
    return {root.digest, *(page.digest for page in root.pages), *chunks}


async def published_before(
    session: ReadSession, reader: str, wanted: WeightsSource, revision: str | None, *, is_newest: bool = False
) -> MirrorSourceRow | None:
    """A READY source of this organisation or team with the same repository, revision and patterns, and without damage.

    With ``is_newest`` and without a revision: the newest one requested by this name. For a whole checkpoint: its push.
    """
    rows: list[MirrorSourceRow] = []
    organisation = organisation_of(reader)
    if key := recall_key(reader, wanted, revision):
        rows = await mirrors.recalled(session, organisation, key)
    elif is_newest:
        rows = await mirrors.ready_from(session, organisation, str(wanted.source))
    rows = [row for row in rows if is_alike(row.request, wanted)]
    if isinstance(wanted.source, CheckpointUri) and revision and not (wanted.patterns.allow or wanted.patterns.ignore):
        rows = [await checkpoints.pushed(session, organisation, pinned(wanted.source, revision), team_of(reader))]
    for row in rows:
        set_id = (await manifests.set_ids(session, [row.manifest or ""])).get(row.manifest or "")
        if set_id and not await chunks.of(session, chunks.is_damaged, set_id):
            return row
    return None
