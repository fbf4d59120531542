"""Copy into the store what a survey found missing, each file once in this process."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, Slab
from bdn.core.errors import (
    ChecksumMismatchError,
    NotFoundError,
    SourceChangedError,
    StoreUnavailableError,
    single_error,
)
from bdn.core.source.upstream import Source, UpstreamFile
from bdn.core.store import is_small, parcels
from bdn.mirror.ingest.copier import ChunkStored, Copier
from bdn.mirror.ingest.progress import CopiesInProgress, Progress, StoredContents
from bdn.mirror.ingest.survey import Survey
from bdn.mirror.upstream.reader import LocatedFile
from bdn.transfer.under_way import UnderWay

_FILES_AT_ONCE: Final = 8  # of one source; each of them keeps many threads busy
_PARCELS_AT_ONCE: Final = 32  # while one waits for its locations or is recorded, others have the threads

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class CopyMissing:
    """Copies the missing files of one source into the store.

    Args:
        name: the source, for messages.
        position: its place in the request, for the counters.
        recorded: what other sources have recorded since before the survey.
    """

    stored: StoredContents
    copier: Copier
    copies: CopiesInProgress
    progress: Progress
    source: Source
    name: str
    position: int
    survey: Survey
    recorded: set[str]

    async def run(self) -> None:
        """Copy everything that was missing, and tell ``progress`` of it."""
        large = (file for file in self.survey.missing() if not is_small(file.size))
        small = parcels(file for file in self.survey.missing() if is_small(file.size))
        with single_error():
            async with asyncio.TaskGroup() as group:
                _share(group, large, self._copy_file, _FILES_AT_ONCE)
                _share(group, small, self._copy_parcel, _PARCELS_AT_ONCE)

    async def _copy_file(self, file: UpstreamFile) -> None:
        key = file.identity.key
        missing = self.survey.bytes_missing_of(file)

        def stored(index: int, digest: Digest, size: int) -> None:
            nonlocal missing
            missing -= size
            self.progress.chunk_stored(self.position, key, index, digest, size)

        def packed(size: int) -> None:
            nonlocal missing
            missing -= size

        layout = await self._once(key, lambda: self._find_or_copy(file, stored, packed))
        # What we did not copy, somebody else did; what was not stored after all is not reused.
        self.progress.reused(self.position, max(missing, self.survey.bytes_missing_of(file) - file.size))
        if layout.slice is not None:
            self.progress.lies_in(Slab(layout.slice.slab, layout.slice.slab_size, file.identity.scope))
        self._complete(key, layout)

    async def _once(self, key: str, work: Callable[[], Awaitable[FileLayout]]) -> FileLayout:
        """The layout that this work makes, or that somebody else made.

        A copies a chunk, B asks for the same file and waits; A's mirror ends, and what it copied is older than all mirrors that
        run now, so it may be collected. So B keeps what A copied, and copies it itself where it is gone.
        """
        is_ours = False

        async def ours() -> FileLayout:
            nonlocal is_ours
            is_ours = True
            return await work()

        while True:
            layout = await self.copies.run(key, ours)
            if is_ours or await self.stored.keep(layout):
                return layout

    async def _find_or_copy(self, file: UpstreamFile, stored: ChunkStored, packed: Callable[[int], None]) -> FileLayout:
        """Look again where that pays: a query for each of a million small files would cost more than it saves.

        A surveys; B copies a file and records it, and its entry among the copies is forgotten; then A comes to this file.
        """
        key = file.identity.key
        half: dict[int, Digest] = {}
        if key in self.recorded or file.size > CHUNK_SIZE:
            held = await self.stored.layout(file.identity)
            if held is not None:
                return held
            half = await self.stored.parts(key)
        if is_small(file.size):
            layouts: list[FileLayout] = []
            await self._pack([file], lambda _, layout: layouts.append(layout))
            packed(file.size)
            return layouts[0]
        return await self._copy(file, half, stored)

    async def _copy(self, file: UpstreamFile, half: Mapping[int, Digest], stored: ChunkStored) -> FileLayout:
        """Copy a file, once more from the start when its content is wrong: see ``UpstreamReader``.

        Which chunk was wrong is known when all of them have been read again. It may be one of an earlier attempt: A stored it,
        and failed before the whole could be checked; B resumed.
        """
        try:
            return await self._copy_once(file, half, stored)
        except ChecksumMismatchError as error:
            evidence = await self._quarantine(file, error)
        try:
            layout = await self._copy_once(file, {}, stored)
        except ChecksumMismatchError as error:
            await self._quarantine(file, error)
            raise
        await self.progress.narrow(evidence, layout)
        return layout

    async def _copy_once(self, file: UpstreamFile, half: Mapping[int, Digest], stored: ChunkStored) -> FileLayout:
        key = file.identity.key
        try:
            return await self.copier.copy(self._located(file), half, stored, self._under_way)
        except SourceChangedError:
            await self.progress.drop(key)  # its chunks are not parts of the right file
            raise
        except NotFoundError as error:
            await self.progress.drop(key)
            raise StoreUnavailableError(f"it lost {error.what} of {file.path!r}; mirror again") from error

    async def _copy_parcel(self, parcel: Sequence[UpstreamFile]) -> None:
        """Files that nobody else copies go together; the others are waited for one by one, or found."""
        await self.progress.keep_up()
        ours: list[UpstreamFile] = []
        others: list[UpstreamFile] = []
        for file in parcel:
            is_ours = file.identity.key not in self.recorded and self.copies.lead(file.identity.key)
            (ours if is_ours else others).append(file)
        leading = {file.identity.key for file in ours}

        def landed(file: UpstreamFile, layout: FileLayout) -> None:
            key = file.identity.key
            leading.discard(key)
            self.copies.land(key, layout)
            self._complete(key, layout)

        try:
            if ours:
                await self._pack(ours, landed)
        finally:
            for key in leading:
                self.copies.give_up(key)
        for file in others:
            await self._copy_file(file)

    async def _pack(self, files: Sequence[UpstreamFile], landed: Callable[[UpstreamFile, FileLayout], None]) -> None:
        def packed(located: LocatedFile, layout: FileLayout, slab: Slab) -> None:
            self.progress.packed(self.position, slab, layout.size)
            landed(located.file, layout)

        async def on_wrong(located: LocatedFile, kept: Digest, error: ChecksumMismatchError) -> None:
            await self._quarantine(located.file, error, kept)

        await self.copier.pack([self._located(file) for file in files], packed, on_wrong, self._under_way)

    @property
    def _under_way(self) -> UnderWay:
        return self.progress.counters[self.position].under_way

    async def _quarantine(self, file: UpstreamFile, error: ChecksumMismatchError, *kept: Digest) -> str:
        """The name of the evidence."""
        return await self.progress.quarantine(self.name, file, error.expected, error.actual, kept)

    def _located(self, file: UpstreamFile) -> LocatedFile:
        return LocatedFile(self.name, self.source, file)

    def _complete(self, key: str, layout: FileLayout) -> None:
        self.progress.file_complete(key, layout)


def _share(
    group: asyncio.TaskGroup, items: Iterator[_Item], copy: Callable[[_Item], Awaitable[None]], count: int
) -> None:
    """Start ``count`` tasks that draw from the same items."""

    async def work() -> None:
        for item in items:
            await copy(item)

    for _ in range(count):
        group.create_task(work())
