"""Copies what a survey found missing into the store, each unit once in this process."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import Digest, FileLayout, digest_of
from bdn.core.errors import (
    ChecksumMismatchError,
    SourceChangedError,
    StoreUnavailableError,
    single_error,
)
from bdn.core.source.upstream import Source, UpstreamFile
from bdn.mirror.chunks.writer import SetWriter
from bdn.mirror.db import identities
from bdn.mirror.db.identities import Known
from bdn.mirror.db.waiting import SingleFlight
from bdn.mirror.ingest.copier import ChunkLostError, Copier
from bdn.mirror.ingest.progress import CopyProgress
from bdn.mirror.ingest.survey import Survey, Unit
from bdn.mirror.upstream.reader import LocatedFile
from bdn.traces.spans import Counted, batches
from bdn.transfer.under_way import UnderWay

_LARGE_AT_ONCE: Final = 8  # files of several chunks of one source; each of them occupies many threads
_SMALL_AT_ONCE: Final = 32  # files of one chunk; while one is recorded, the threads read others
_SLABS_AT_ONCE: Final = 8  # of 8 MiB of memory each
_SHARES: Final[tuple[tuple[Callable[[Unit], bool], int], ...]] = (
    (lambda unit: unit.is_slab, _SLABS_AT_ONCE),
    (lambda unit: not unit.is_slab and unit.files[0].is_one_chunk, _SMALL_AT_ONCE),
    (lambda unit: not unit.is_slab and not unit.files[0].is_one_chunk, _LARGE_AT_ONCE),
)


@dataclass(frozen=True)
class CopyMissing:
    """Copies what is missing of one source into the store, for one set.

    Args:
        copies: running copies of all mirrors of this process, by the keys of units.
        name: the source, for messages.
        position: its index in the request, for the counters.
    """

    copier: Copier
    copies: SingleFlight[str, Known]
    progress: CopyProgress
    writer: SetWriter
    source: Source
    name: str
    position: int
    survey: Survey

    async def run(self) -> None:
        """Copy everything that is missing; then ``survey.known`` contains every unit. Raises ``SetEndedError``."""
        with single_error(), batches("chunks", self.survey.bytes_missing) as traced:
            async with asyncio.TaskGroup() as group:
                for is_wanted, count in _SHARES:
                    self._share(group, is_wanted, count, traced)

    def _share(self, group: asyncio.TaskGroup, is_wanted: Callable[[Unit], bool], count: int, traced: Counted) -> None:
        """Start ``count`` tasks that draw from the same units."""
        units = filter(is_wanted, self.survey.missing())

        async def work() -> None:
            for unit in units:
                await self._copy(unit, traced)

        for _ in range(count):
            group.create_task(work())

    async def _copy(self, unit: Unit, traced: Counted) -> None:
        """Copy a unit or wait for a running copy of it.

        If the set cannot refer to its chunks then, copy here after all.
        """
        missing = stored = self.survey.bytes_missing_of(unit)

        def arrived(size: int) -> None:
            nonlocal missing
            missing -= size
            traced.add(size)
            self.progress.transferred(self.position, size)

        known: Known | None = None
        while known is None:
            is_ours = False

            async def ours() -> Known:
                nonlocal is_ours
                is_ours = True
                return await self._find_or_copy(unit, arrived)

            found = await self.copies.run(unit.key, ours)
            known = found if is_ours else await self._held(found)
        self.survey.known[unit.key] = known
        # Bytes that this mirror did not copy were copied by another; bytes that turned out not to be stored are not
        # reused.
        self.progress.reused(self.position, max(missing, stored - unit.size))

    async def _held(self, found: Known) -> Known | None:
        """What another mirror copied, once the set refers to all of it; otherwise None."""
        chunks = set(found.chunks.values())
        return found if found.digest and chunks == set(await self.writer.hold(chunks)) else None

    async def _find_or_copy(self, unit: Unit, arrived: Callable[[int], None]) -> Known:
        """Query again: another mirror may have copied it since the survey."""
        async with self.progress.database.read() as session:
            now = (await identities.find(session, [unit.key])).get(unit.key)
        if now is not None:
            now = now.without(set(now.chunks.values()).difference(await self.writer.hold(now.chunks.values())))
        if now is not None and now.digest is not None:
            return now
        if unit.is_slab:
            known = await self._pack(unit, arrived)
        else:
            known = await self._copy_file(unit, now or self.survey.known.get(unit.key), arrived)
        await self.progress.unit_complete(known)
        return known

    async def _pack(self, unit: Unit, arrived: Callable[[int], None]) -> Known:
        async def on_wrong(located: LocatedFile, content: bytes, error: ChecksumMismatchError) -> None:
            digest = digest_of(content)
            await asyncio.to_thread(self.writer.put, digest, content)
            await self._quarantine(located.file, unit.key, error, [digest])

        located = [LocatedFile(self.name, self.source, file) for file in unit.files]
        packed = await self.copier.pack(located, self.survey.prior, self.writer.put, on_wrong, self._under_way)
        arrived(packed.fetched)
        raw = b"".join(map(Digest.to_bytes, packed.digests))
        return Known(unit.key, unit.size, packed.slab, raw, is_slab=True)

    async def _copy_file(self, unit: Unit, half: Known | None, arrived: Callable[[int], None]) -> Known:
        """Copy a file; if its content is wrong, once more from the start (see ``UpstreamReader``).

        Which chunk was wrong is known when all of them have been read again. It may be one of an earlier attempt:
        worker A stored it, and failed before the whole could be checked; worker B resumed.
        """
        try:
            layout = await self._copy_once(unit, half, arrived)
        except ChecksumMismatchError as error:
            await self._quarantine(unit.files[0], unit.key, error)
            try:
                layout = await self._copy_once(unit, None, arrived)
            except ChecksumMismatchError as again:
                await self._quarantine(unit.files[0], unit.key, again)
                raise
        return Known(unit.key, unit.size, layout.digest, b"".join(map(Digest.to_bytes, layout.chunks)))

    async def _copy_once(self, unit: Unit, half: Known | None, arrived: Callable[[int], None]) -> FileLayout:
        (file,) = unit.files

        def stored(index: int, digest: Digest, size: int) -> None:
            arrived(size)
            self.progress.chunk_stored(unit.key, index, digest)

        try:
            self.progress.begin_file(unit.key, unit.size, half)
            located = LocatedFile(self.name, self.source, file)
            stored_before = half.chunks if half else {}
            try:
                return await self.copier.copy(located, stored_before, self.writer.put_early, stored, self._under_way)
            finally:
                await self.writer.settle()
        except SourceChangedError:
            await self.progress.drop(unit.key)  # its chunks are not parts of the right file
            raise
        except ChunkLostError as error:
            await self.progress.lost(unit.key, error.chunk)
            raise StoreUnavailableError(f"{error} of {file.path!r} is missing; mirror again") from error

    @property
    def _under_way(self) -> UnderWay:
        return self.progress.counters[self.position].under_way

    async def _quarantine(
        self, file: UpstreamFile, key: str, error: ChecksumMismatchError, kept: Sequence[Digest] = ()
    ) -> None:
        await self.progress.quarantine(self.name, file, key, error, kept)
