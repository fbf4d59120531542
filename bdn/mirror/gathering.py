"""Everything that a survey found missing, each file once in this process, whoever asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest
from bdn.core.errors import ChecksumMismatchError, NotFoundError, SourceChangedError, StoreUnavailableError
from bdn.core.groups import single_error
from bdn.core.layout import FileLayout
from bdn.core.ports import Source
from bdn.core.upstream import UpstreamFile
from bdn.mirror.copier import ChunkStored, Copier, LocatedFile
from bdn.mirror.database import Database
from bdn.mirror.flights import Flights
from bdn.mirror.patience import Patience
from bdn.mirror.progress import Progress
from bdn.mirror.repository import contents
from bdn.mirror.survey import Survey

_FILES_AT_ONCE: Final = 32  # of one source; small files wait for their location, not for a thread


@dataclass(frozen=True)
class Gathering:
    """Brings the missing files of one source into the store.

    Args:
        name: the source, for messages.
        position: its place in the request, for the counters.
        landed: what other gatherings have brought since before the survey.
    """

    database: Database
    copier: Copier
    flights: Flights[FileLayout]
    patience: Patience
    progress: Progress
    source: Source
    name: str
    position: int
    survey: Survey
    landed: set[str]

    async def run(self) -> dict[str, Digest]:
        """Digest by identity key of everything that was missing."""
        digests: dict[str, Digest] = {}

        async def work(files: Iterator[UpstreamFile]) -> None:
            for file in files:
                digests[file.identity.key] = await self._bring(file)

        files = iter(self.survey.diff.missing)
        with single_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_FILES_AT_ONCE, len(self.survey.diff.missing))):
                    group.create_task(work(files))
        return digests

    async def _bring(self, file: UpstreamFile) -> Digest:
        key = file.identity.key
        missing = self.survey.bytes_missing_of(file)

        def stored(index: int, digest: Digest, size: int) -> None:
            nonlocal missing
            missing -= size
            self.progress.chunk_stored(self.position, key, index, digest, size)

        layout = await self.flights.run(key, lambda: self._find_or_copy(file, stored))
        self.progress.reused(self.position, missing)  # what we did not bring, somebody else did
        self.progress.file_complete(key, layout)
        return layout.digest

    async def _find_or_copy(self, file: UpstreamFile, stored: ChunkStored) -> FileLayout:
        """Look again where that pays: a query for each of a million small files would cost more than it saves.

        A surveys; B brings a file, and later its entry among the flights is forgotten; A's turn comes for this file.
        """
        key = file.identity.key
        half: dict[int, Digest] = {}
        if key in self.landed or file.size > CHUNK_SIZE:
            async with self.database.read() as session:
                held = await contents.layout_by_identity(session, key)
                half = {} if held else await contents.copied_chunks(session, key)
            if held:
                return held
        located = LocatedFile(self.name, self.source, file, self.patience)
        try:
            return await self.copier.copy(located, half, stored)
        except (ChecksumMismatchError, SourceChangedError):
            await self.progress.drop(key)  # nothing of it may be taken for a part of the right file later
            raise
        except NotFoundError as error:
            await self.progress.drop(key)
            raise StoreUnavailableError(f"it lost {error.what} of {file.path!r}; mirror again") from error
