"""The use case: resolve, list, select, diff, copy what is missing, publish. READY means verified and durable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest
from bdn.core.errors import BdnError, ChecksumMismatchError, InternalError, SourceChangedError
from bdn.core.groups import single_error
from bdn.core.layout import FileLayout
from bdn.core.manifest import FileEntry, Manifest
from bdn.core.ports import Source
from bdn.core.upstream import UpstreamFile
from bdn.core.weights import WeightsSource
from bdn.mirror.copier import Copier, LocatedFile
from bdn.mirror.database import Database
from bdn.mirror.flights import Flights
from bdn.mirror.progress import Progress, SourceCounters
from bdn.mirror.repository import contents, mirrors
from bdn.mirror.survey import Survey, Surveyor
from bdn.mirror.tables import MirrorSourceRow
from bdn.wire.errors import body_of
from bdn.wire.weights_schema import WeightsSourceBody

logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 32  # of one source; small files wait for their location, not for a thread
_PUBLISH_ATTEMPTS = 3


@dataclass(frozen=True)
class Ingest:
    """Brings one mirror from SYNCING to READY or FAILED. Resumable at any point: what is stored is not fetched again."""

    database: Database
    surveyor: Surveyor
    copier: Copier
    flights: Flights[FileLayout]

    async def run(self, mirror_id: str, organisation: str, rows: list[MirrorSourceRow], progress: Progress) -> None:
        """Work on all sources that are not done; a source's failure is its own.

        Raises:
            BdnError: the first source's failure, after all sources have come to an end.
        """
        failures: dict[int, BdnError] = {}

        async def one(row: MirrorSourceRow) -> None:
            try:
                await self._source(mirror_id, organisation, row, progress)
            except BdnError as error:
                failures[row.position] = error
            except Exception as error:
                logger.exception("mirroring a source failed", extra={"mirror": mirror_id, "source": row.source})
                failures[row.position] = InternalError(f"{type(error).__name__} while mirroring {row.source}")
            else:
                return
            await progress.flush()
            body = body_of(failures[row.position]).model_dump()
            async with self.database.write() as session:
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
        async with self.surveyor.open(wanted, organisation, row.resolved_revision) as source:
            for _ in range(_PUBLISH_ATTEMPTS):
                survey = await self.surveyor.survey(wanted, source)
                await self._announce(mirror_id, row, survey, progress)
                digests = await self._copy_missing(wanted, source, row.position, survey, progress)
                if await self._publish(mirror_id, row.position, survey, digests, progress):
                    return
        raise InternalError(f"contents of {wanted.source} were evicted as fast as they were copied")

    async def _announce(self, mirror_id: str, row: MirrorSourceRow, survey: Survey, progress: Progress) -> None:
        """Totals, before the first byte. What an earlier attempt transferred is not counted as reused again."""
        missing = survey.bytes_missing
        async with self.database.read() as session:
            for file in survey.diff.missing:
                stored = await contents.copied_chunks(session, file.identity.key) if file.size else {}
                missing -= min(file.size, len(stored) * CHUNK_SIZE)
        counters = progress.counters[row.position]
        counters.reused = max(0, survey.bytes_total - counters.transferred - missing)
        async with self.database.write() as session:
            await mirrors.update_source(
                session,
                mirror_id,
                row.position,
                status="SYNCING",
                resolved_revision=survey.resolution.revision,
                files_total=len(survey.files),
                bytes_total=survey.bytes_total,
                bytes_reused=counters.reused,
                warnings=list(survey.warnings),
            )

    async def _copy_missing(
        self, wanted: WeightsSource, source: Source, position: int, survey: Survey, progress: Progress
    ) -> dict[str, Digest]:
        """Digest by identity key of everything that was missing."""
        digests: dict[str, Digest] = {}

        async def work(files: Iterator[UpstreamFile]) -> None:
            for file in files:
                located = LocatedFile(str(wanted.source), source, file)
                digests[file.identity.key] = await self._copy(located, position, progress)

        files = iter(survey.diff.missing)
        with single_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_FILES_AT_ONCE, len(survey.diff.missing))):
                    group.create_task(work(files))
        return digests

    async def _copy(self, located: LocatedFile, position: int, progress: Progress) -> Digest:
        key = located.file.identity.key

        async def copy() -> FileLayout:
            async with self.database.read() as session:
                stored = await contents.copied_chunks(session, key)
            try:
                return await self.copier.copy(
                    located,
                    stored,
                    lambda index, digest, size: progress.chunk_stored(position, key, index, digest, size),
                )
            except (ChecksumMismatchError, SourceChangedError):
                await self._drop(key, progress)
                raise

        layout, own = await self.flights.run(key, copy)
        if not own:
            progress.reused(position, layout.size)
        progress.file_complete(key, layout)
        return layout.digest

    async def _drop(self, key: str, progress: Progress) -> None:
        """Nothing of a wrong file may be taken for a part of the right one."""
        progress.drop(key)
        async with self.database.write() as session:
            await contents.forget_chunks(session, [key])

    async def _publish(
        self, mirror_id: str, position: int, survey: Survey, digests: dict[str, Digest], progress: Progress
    ) -> bool:
        """False when an eviction took contents that the diff had counted on: look again."""
        manifest = Manifest.of(
            FileEntry(file.path, file.size, survey.diff.held.get(file.path) or digests[file.identity.key])
            for file in survey.files
        )
        await progress.flush()
        async with self.database.write() as session:
            if await contents.publish(session, manifest, time.time()):
                return False
            await mirrors.update_source(session, mirror_id, position, status="READY", manifest=manifest.digest.hex)
        logger.info("manifest published", extra={"mirror": mirror_id, "manifest": str(manifest.digest)})
        return True
