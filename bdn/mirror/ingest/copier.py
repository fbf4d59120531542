"""Copy one upstream file into the store, chunk by chunk and in parallel: one range request makes one chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bdn.core.chunk import chunk_count, chunk_range
from bdn.core.digest import Digest, digest_of
from bdn.core.errors import NotFoundError
from bdn.core.groups import single_error
from bdn.core.ports import ChunkStore
from bdn.core.source.upstream import Checksum
from bdn.core.store.layout import FileLayout, PlacedChunk
from bdn.mirror.ingest.whole_check import WholeCheck, check_at_once, whole_check
from bdn.mirror.upstream.reader import FileRange, LocatedFile, UpstreamReader

ChunkStored = Callable[[int, Digest, int], None]


@dataclass(frozen=True)
class Copier:
    """Copies files into the store."""

    store: ChunkStore
    reader: UpstreamReader

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
        expected = await self._expected(located)
        check = whole_check(expected, file.size, chunks, self._read_back) if expected is not None else None
        loop = asyncio.get_running_loop()

        def told(index: int, digest: Digest) -> None:
            if index not in chunks:
                chunks[index] = digest
                on_stored(index, digest, chunk_range(file.size, index).size)

        def accept(index: int, content: memoryview, stated: Checksum | None) -> None:
            digest = digest_of(content)
            self.store.put(digest, content)
            # Tell before checking: the check may wait for other chunks, and wrong content is evidence.
            loop.call_soon_threadsafe(told, index, digest)
            if check is not None:
                check.take(index, digest, content)
            elif stated is not None and len(content) == file.size:
                check_at_once(stated, content, located.subject)

        async def work(indexes: Iterator[int]) -> None:
            for index in indexes:

                def accept_chunk(content: memoryview, stated: Checksum | None, index: int = index) -> None:
                    accept(index, content, stated)

                wanted = FileRange(located, chunk_range(file.size, index), accept_chunk)
                await self.reader.read([wanted], on_cancel=None if check is None else check.stop)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.reader.threads.count, chunk_count(file.size) - len(chunks))):
                    group.create_task(work(missing))
        layout = FileLayout.of(file.size, tuple(chunks[index] for index in range(len(chunks))))
        if check is not None:
            await self._check(located, layout, check)
        return layout

    @staticmethod
    async def _expected(located: LocatedFile) -> Checksum | None:
        """The whole file's checksum, as far as it can be known before its first byte."""
        file = located.file
        if file.checksum is not None or chunk_count(file.size) <= 1:
            return file.checksum
        return (await located.location()).checksum

    async def _check(self, located: LocatedFile, layout: FileLayout, check: WholeCheck) -> None:
        """Read back the chunks that were not checked when they arrived, each in its own visit to a byte thread."""
        chunks = layout.placed()
        for index in check.left():
            chunk = chunks[index]

            def read_back(buffer: memoryview, chunk: PlacedChunk = chunk) -> None:
                self._read_back(chunk.digest, buffer)
                check.take_back(chunk.index, buffer)

            await self.reader.threads.run(chunk.range.size, read_back)
        check.check(located.subject)

    def _read_back(self, digest: Digest, buffer: memoryview) -> None:
        done = 0
        with self.store.open(digest) as file:
            while done < len(buffer) and (count := file.readinto(buffer[done:])):  # type: ignore[attr-defined] # see store
                done += count
        if done != len(buffer):
            raise NotFoundError(f"chunk {digest}")
