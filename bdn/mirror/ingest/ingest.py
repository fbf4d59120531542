"""The use case: resolve, list, select, diff, copy what is missing, publish. READY means verified and durable."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, Fact, InternalError
from bdn.core.events import Event
from bdn.core.groups import single_error
from bdn.core.ports import Resolution
from bdn.core.source.uri import HuggingFaceUri, SourceUri, parse_source
from bdn.core.source.weights import WeightsSource
from bdn.mirror.damages import Damages
from bdn.mirror.db import contents, damaged, events, mirrors
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.db.errors import DatabaseUnavailableError
from bdn.mirror.db.tables import MirrorSourceRow
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.ingest.copy_missing import CopiesInProgress, CopyMissing, StoredContents
from bdn.mirror.ingest.packer import Packer
from bdn.mirror.ingest.progress import ClaimLostError, Progress, SourceCounters
from bdn.mirror.ingest.survey import Survey, Surveyor, manifest_of
from bdn.wire.errors import body_of
from bdn.wire.weights_schema import WeightsSourceBody, body_from

logger = logging.getLogger(__name__)

_PUBLISH_ATTEMPTS = 3


@dataclass(frozen=True)
class Ingest:
    """Takes one mirror from SYNCING to READY or FAILED. Resumable at any point: what is stored is not fetched again."""

    database: Database
    surveyor: Surveyor
    copier: Copier
    packer: Packer
    copies: CopiesInProgress
    damages: Damages

    async def run(self, mirror_id: str, organisation: str, rows: list[MirrorSourceRow], progress: Progress) -> None:
        """Work on all sources that are not done; a source's failure is its own.

        Raises:
            BdnError: the first source's failure, after all sources have come to an end.
            ClaimLostError, DatabaseUnavailableError: at once; the mirror is not this worker's any more, or not now.
        """
        failures: dict[int, BdnError] = {}

        async def one(row: MirrorSourceRow) -> None:
            try:
                await self._source(mirror_id, organisation, row, progress)
            except (ClaimLostError, DatabaseUnavailableError):
                raise
            except BdnError as error:
                failures[row.position] = error
            except Exception as error:
                logger.exception("mirroring a source failed", extra={"mirror": mirror_id, "source": row.source})
                failures[row.position] = InternalError(f"{type(error).__name__} while mirroring {row.source}")
            else:
                return
            body = body_of(failures[row.position]).model_dump()
            async with progress.writing() as session:
                await mirrors.update_source(session, mirror_id, row.position, status="FAILED", error=body)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    if row.status != "READY":
                        group.create_task(one(row))
        if failures:
            raise failures[min(failures)]

    async def _source(self, mirror_id: str, organisation: str, row: MirrorSourceRow, progress: Progress) -> None:
        wanted = WeightsSourceBody.model_validate(row.request).to_core()
        progress.counters[row.position] = SourceCounters(row.bytes_transferred, row.bytes_reused)
        async with self.surveyor.open(wanted, organisation, mirror_id, row.resolved_revision) as source:
            resolution = await source.resolve()
            if await self._reuse_published(organisation, row, wanted, resolution, progress):
                return
            for _ in range(_PUBLISH_ATTEMPTS):
                with self.copies.recorded_by_others(mirror_id) as recorded:
                    survey = await self.surveyor.survey(wanted, source, resolution)
                    await self._announce(mirror_id, row, survey, progress)
                    copying = CopyMissing(
                        StoredContents(self.database, self.copier.store),
                        self.copier,
                        self.packer,
                        self.copies,
                        progress,
                        source,
                        str(wanted.source),
                        row.position,
                        survey,
                        recorded,
                    )
                    digests = await copying.run()
                if await self._publish(organisation, row, survey, digests, progress):
                    return
        raise InternalError(f"contents of {wanted.source} were collected as fast as they were copied")

    async def _reuse_published(
        self, organisation: str, row: MirrorSourceRow, wanted: WeightsSource, resolution: Resolution, progress: Progress
    ) -> bool:
        """Whether this commit was published before; then it is READY without being listed, because a commit never changes.

        Not where some of it is damaged: then it is surveyed like a new one, and what is damaged is fetched. A bucket has no
        commits and has to be listed. Access was checked: resolving asked the upstream with the credentials of this request.
        """
        async with progress.writing() as session:
            found = await _published_before(session, organisation, wanted, resolution.revision)
            if found is None or found.manifest is None:
                return False
            counters = progress.counters[row.position]
            counters.reused = max(0, (found.bytes_total or 0) - counters.transferred)
            await contents.touch(session, [found.manifest], time.time())
            await mirrors.update_source(
                session,
                row.mirror_id,
                row.position,
                status="READY",
                error=None,
                resolved_revision=found.resolved_revision,
                manifest=found.manifest,
                files_total=found.files_total,
                bytes_total=found.bytes_total,
                bytes_reused=counters.reused,
                warnings=found.warnings,
            )
            facts = {"mirror": row.mirror_id, "source": str(wanted.source), "revision": resolution.revision}
            event = Event.of("reused", facts, manifest=f"b3:{found.manifest}", organisation=organisation)
            await events.record(session, [event], time.time())
        return True

    async def _announce(self, mirror_id: str, row: MirrorSourceRow, survey: Survey, progress: Progress) -> None:
        """Totals, before the first byte. What an earlier attempt transferred is not counted as reused again."""
        counters = progress.counters[row.position]
        counters.reused = max(0, survey.bytes_total - counters.transferred - survey.bytes_missing)
        async with progress.writing() as session:
            await mirrors.update_source(
                session,
                mirror_id,
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
        self, organisation: str, row: MirrorSourceRow, survey: Survey, digests: dict[str, Digest], progress: Progress
    ) -> bool:
        """False when contents that the diff had counted on were collected or found damaged: look again."""
        manifest = await asyncio.to_thread(manifest_of, survey, digests)
        await progress.flush()
        await self.damages.heal()  # what was damaged and came again counts from now on
        async with progress.writing() as session:
            if await contents.publish(session, manifest, time.time(), organisation):
                return False
            await mirrors.update_source(
                session, row.mirror_id, row.position, status="READY", manifest=manifest.digest.hex
            )
            counters = progress.counters[row.position]
            facts: dict[str, Fact] = {
                "mirror": row.mirror_id,
                "source": row.source,
                "revision": survey.resolution.revision,
                "files": len(manifest.files),
                "transferred": counters.transferred,
                "reused": counters.reused,
            }
            event = Event.of("mirrored", facts, manifest=manifest.digest, organisation=organisation)
            await events.record(session, [event], time.time())
        logger.info("manifest published", extra={"mirror": row.mirror_id, "manifest": str(manifest.digest)})
        return True


async def _published_before(
    session: ReadSession, organisation: str, wanted: WeightsSource, revision: str | None
) -> MirrorSourceRow | None:
    """The newest READY source of this organisation with the same repository, revision and patterns, none of it damaged."""
    if revision is None:
        return None
    body = body_from(wanted)
    for row in await mirrors.ready_at(session, organisation, revision):
        same_patterns = (
            row.request.get("allow_patterns") == body.allow_patterns
            and row.request.get("ignore_patterns") == body.ignore_patterns
        )
        is_same = same_patterns and _without_revision(parse_source(row.source)) == _without_revision(wanted.source)
        if is_same and not await damaged.is_lost(session, row.manifest or "", organisation):
            return row
    return None


def _without_revision(uri: SourceUri) -> SourceUri:
    return replace(uri, revision=None) if isinstance(uri, HuggingFaceUri) else uri
