"""Everything that a survey found missing, each file once in this process, whoever asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest
from bdn.core.errors import ChecksumMismatchError, NotFoundError, SourceChangedError, StoreUnavailableError
from bdn.core.groups import single_error
from bdn.core.ports import Source
from bdn.core.source.upstream import UpstreamFile
from bdn.core.store.layout import FileLayout, Slab
from bdn.core.store.slabs import is_small, parcels
from bdn.mirror.db.quarantine import WrongFile
from bdn.mirror.ingest.copier import ChunkStored, Copier
from bdn.mirror.ingest.flights import Flights
from bdn.mirror.ingest.held import Held
from bdn.mirror.ingest.packer import Packer
from bdn.mirror.ingest.progress import Progress
from bdn.mirror.ingest.survey import Survey
from bdn.mirror.upstream.located_file import LocatedFile
from bdn.mirror.upstream.retries import Patience

_FILES_AT_ONCE: Final = 8  # of one source; each of them keeps many threads busy
_PARCELS_AT_ONCE: Final = 32  # while one waits for its locations or is recorded, others have the threads

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Gathering:
    """Brings the missing files of one source into the store.

    Args:
        name: the source, for messages.
        position: its place in the request, for the counters.
        landed: what other gatherings have brought since before the survey.
    """

    held: Held
    copier: Copier
    packer: Packer
    flights: Flights[FileLayout]
    patience: Patience
    progress: Progress
    source: Source
    name: str
    position: int
    survey: Survey
    landed: set[str]
    _digests: dict[str, Digest] = field(default_factory=dict)

    async def run(self) -> dict[str, Digest]:
        """Digest by identity key of everything that was missing."""
        missing = self.survey.diff.missing
        large = [file for file in missing if not is_small(file.size)]
        small = parcels(file for file in missing if is_small(file.size))
        with single_error():
            async with asyncio.TaskGroup() as group:
                _share(group, iter(large), self._bring, min(_FILES_AT_ONCE, len(large)))
                _share(group, small, self._bring_parcel, min(_PARCELS_AT_ONCE, len(missing) - len(large)))
        return self._digests

    async def _bring(self, file: UpstreamFile) -> None:
        key = file.identity.key
        missing = self.survey.bytes_missing_of(file)

        def stored(index: int, digest: Digest, size: int) -> None:
            nonlocal missing
            missing -= size
            self.progress.chunk_stored(self.position, key, index, digest, size)

        def packed(size: int) -> None:
            nonlocal missing
            missing -= size

        layout = await self._fly(key, lambda: self._find_or_copy(file, stored, packed))
        # What we did not bring, somebody else did; what was not held after all is not reused.
        self.progress.reused(self.position, max(missing, self.survey.bytes_missing_of(file) - file.size))
        if layout.slice is not None:
            self.progress.lies_in(Slab(layout.slice.slab, layout.slice.slab_size, file.identity.scope))
        self._complete(key, layout)

    async def _fly(self, key: str, work: Callable[[], Awaitable[FileLayout]]) -> FileLayout:
        """What this work brings, or somebody else's.

        A brings a chunk, B asks for the same file and waits; A's mirror ends, and what it brought is older than all that
        runs now. So B keeps what A brought, and brings it itself where it is gone: A's flight ends with A.
        """
        is_ours = False

        async def ours() -> FileLayout:
            nonlocal is_ours
            is_ours = True
            return await work()

        while True:
            layout = await self.flights.run(key, ours)
            if is_ours or await self.held.keep(layout):
                return layout

    async def _find_or_copy(self, file: UpstreamFile, stored: ChunkStored, packed: Callable[[int], None]) -> FileLayout:
        """Look again where that pays: a query for each of a million small files would cost more than it saves.

        A surveys; B brings a file, and later its entry among the flights is forgotten; A's turn comes for this file.
        """
        key = file.identity.key
        half: dict[int, Digest] = {}
        if key in self.landed or file.size > CHUNK_SIZE:
            held = await self.held.layout(file.identity)
            if held is not None:
                return held
            half = await self.held.parts(key)
        if is_small(file.size):
            layouts: list[FileLayout] = []
            await self._pack([file], lambda _, layout: layouts.append(layout))
            packed(file.size)
            return layouts[0]
        return await self._copy(file, half, stored)

    async def _copy(self, file: UpstreamFile, half: Mapping[int, Digest], stored: ChunkStored) -> FileLayout:
        """Once more from the start when it came wrong: a wire may flip a bit, and twice wrong is not chance.

        Which chunk was wrong nobody knows before all of them came again. It may be one of an earlier attempt, too: A stored
        it, and failed before the whole could be checked; B went on from there.
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
            return await self.copier.copy(self._located(file), half, stored)
        except SourceChangedError:
            await self.progress.drop(key)  # nothing of it may be taken for a part of the right file later
            raise
        except NotFoundError as error:
            await self.progress.drop(key)
            raise StoreUnavailableError(f"it lost {error.what} of {file.path!r}; mirror again") from error

    async def _bring_parcel(self, parcel: Sequence[UpstreamFile]) -> None:
        """Those that nobody is at work on go together; the others are waited for one by one, or found."""
        ours: list[UpstreamFile] = []
        others: list[UpstreamFile] = []
        for file in parcel:
            is_ours = file.identity.key not in self.landed and self.flights.lead(file.identity.key)
            (ours if is_ours else others).append(file)
        flying = {file.identity.key for file in ours}

        def landed(file: UpstreamFile, layout: FileLayout) -> None:
            key = file.identity.key
            flying.discard(key)
            self.flights.land(key, layout)
            self._complete(key, layout)

        try:
            if ours:
                await self._pack(ours, landed)
        finally:
            for key in flying:
                self.flights.give_up(key)
        for file in others:
            await self._bring(file)

    async def _pack(self, files: Sequence[UpstreamFile], landed: Callable[[UpstreamFile, FileLayout], None]) -> None:
        def packed(located: LocatedFile, layout: FileLayout, slab: Slab) -> None:
            self.progress.packed(self.position, slab, layout.size)
            landed(located.file, layout)

        async def came_wrong(located: LocatedFile, kept: Digest, error: ChecksumMismatchError) -> None:
            await self._quarantine(located.file, error, kept)

        await self.packer.pack([self._located(file) for file in files], packed, came_wrong)

    async def _quarantine(self, file: UpstreamFile, error: ChecksumMismatchError, *kept: Digest) -> str:
        """The name of the evidence."""
        wrong = WrongFile(self.name, file.path, file.size, error, kept)
        return await self.progress.quarantine(file.identity.key, wrong)

    def _located(self, file: UpstreamFile) -> LocatedFile:
        return LocatedFile(self.name, self.source, file, self.patience)

    def _complete(self, key: str, layout: FileLayout) -> None:
        self._digests[key] = layout.digest
        self.progress.file_complete(key, layout)


def _share(
    group: asyncio.TaskGroup, items: Iterator[_Item], bring: Callable[[_Item], Awaitable[None]], count: int
) -> None:
    """Start ``count`` tasks that draw from the same items."""

    async def work() -> None:
        for item in items:
            await bring(item)

    for _ in range(count):
        group.create_task(work())
