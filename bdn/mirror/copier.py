"""Copy one upstream file into the store, chunk by chunk and in parallel: one range request makes one chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from bdn.core.chunk import chunk_count, chunk_range
from bdn.core.digest import Digest, digest_of
from bdn.core.errors import AuthRequiredError
from bdn.core.groups import single_error
from bdn.core.layout import FileLayout
from bdn.core.ports import ChunkStore, Location, Source
from bdn.core.upstream import Checksum, UpstreamFile
from bdn.mirror.patience import Patience
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.checksums import RunningChecksum
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest

_REREAD_BYTES = 1024 * 1024

ChunkStored = Callable[[int, Digest, int], None]


@dataclass
class LocatedFile:
    """A file of an open source, with a location that is asked for once and renewed when the upstream refuses it."""

    name: str  # the source, for messages
    source: Source
    file: UpstreamFile
    patience: Patience
    _location: Location | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def location(self, refused: Location | None = None) -> Location:
        """Where to read; a fresh one when ``refused`` is still the current one."""
        async with self._lock:
            if self._location is None or self._location is refused:
                self._location = await self.patience.run(lambda: self.source.locate(self.file))
            return self._location


@dataclass(frozen=True)
class Copier:
    """Copies files with shared threads, connections and store."""

    store: ChunkStore
    ranges: RangedReader
    threads: ByteThreads

    async def copy(self, located: LocatedFile, stored: Mapping[int, Digest], on_stored: ChunkStored) -> FileLayout:
        """Make every chunk of the file durable in the store.

        Args:
            located: what to copy.
            stored: chunks that the store holds already, from an earlier attempt.
            on_stored: told of each further chunk (index, digest, size) once it is durable.

        Raises:
            UpstreamError, AuthRequiredError, StoreUnavailableError: chunks that were stored stay stored.
        """
        file = located.file
        chunks = dict(stored)
        missing = iter([index for index in range(chunk_count(file.size)) if index not in chunks])

        async def work(indexes: Iterator[int]) -> None:
            for index in indexes:
                chunks[index] = await self._copy_chunk(located, index)
                on_stored(index, chunks[index], chunk_range(file.size, index).size)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.threads.count, chunk_count(file.size) - len(chunks))):
                    group.create_task(work(missing))
        layout = FileLayout.of(file.size, tuple(chunks[index] for index in range(len(chunks))))
        if file.checksum is not None and len(chunks) != 1:
            await self._check_whole(located.name, file, file.checksum, layout)
        return layout

    async def _copy_chunk(self, located: LocatedFile, index: int) -> Digest:
        file = located.file
        request = RangeRequest(located.name, file.path, chunk_range(file.size, index), file.size)
        location = await located.location()
        try:
            return await self._fetch(located, location, request)
        except LocationRefusedError:
            # Signed URLs expire in the middle of a long file. A fresh one that is refused as well is a refusal.
            location = await located.location(refused=location)
        try:
            return await self._fetch(located, location, request)
        except LocationRefusedError as error:
            raise AuthRequiredError(error.source, error.reason) from None

    async def _fetch(self, located: LocatedFile, location: Location, request: RangeRequest) -> Digest:
        def fetch(buffer: memoryview) -> Digest:
            self.ranges.read_into(location, request, buffer)
            if located.file.checksum is not None and request.range.size == located.file.size:
                checksum = RunningChecksum(located.file.checksum, located.file.size)
                checksum.update(buffer)
                checksum.check(f"{request.path!r} of {request.source}")
            digest = digest_of(buffer)
            self.store.put(digest, buffer)
            return digest

        return await located.patience.run(lambda: self.threads.run(request.range.size, fetch))

    async def _check_whole(self, name: str, file: UpstreamFile, expected: Checksum, layout: FileLayout) -> None:
        """Read a file of several chunks back in order and compare its checksum. Empty files come here, too.

        Chunk by chunk, so that others get their turn in between and canceling does not wait for a whole file.
        """
        checksum = RunningChecksum(expected, file.size)

        def take(digest: Digest, buffer: memoryview) -> None:
            with self.store.open(digest) as chunk:
                while count := chunk.readinto(buffer):  # type: ignore[attr-defined] # every raw and memory file has it
                    checksum.update(buffer[:count])

        for digest in layout.chunks:
            await self.threads.run(_REREAD_BYTES, partial(take, digest))
        checksum.check(f"{file.path!r} of {name}")
