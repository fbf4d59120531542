"""Copy one upstream file into the store, chunk by chunk and in parallel: one range request makes one chunk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from bdn.core.chunk import chunk_count, chunk_range
from bdn.core.digest import Digest, digest_of
from bdn.core.errors import AuthRequiredError, NotFoundError
from bdn.core.groups import single_error
from bdn.core.ports import ChunkStore, Location
from bdn.core.source.upstream import Checksum
from bdn.core.store.layout import FileLayout, PlacedChunk
from bdn.mirror.ingest.whole_check import WholeCheck, check_at_once, whole_check
from bdn.mirror.upstream.budget import Slot
from bdn.mirror.upstream.budgets import UpstreamBudgets
from bdn.mirror.upstream.located_file import LocatedFile
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest

ChunkStored = Callable[[int, Digest, int], None]


@dataclass(frozen=True, slots=True)
class _Copying:
    """One file on its way. ``tell`` says from any thread that a chunk is durable."""

    located: LocatedFile
    check: WholeCheck | None
    tell: Callable[[int, Digest], object]


@dataclass(frozen=True)
class Copier:
    """Copies files with shared threads, connections and store."""

    store: ChunkStore
    ranges: RangedReader
    threads: ByteThreads
    budgets: UpstreamBudgets

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

        def told(index: int, digest: Digest) -> None:
            if index not in chunks:
                chunks[index] = digest
                on_stored(index, digest, chunk_range(file.size, index).size)

        loop = asyncio.get_running_loop()
        copying = _Copying(located, check, lambda index, digest: loop.call_soon_threadsafe(told, index, digest))

        async def work(indexes: Iterator[int]) -> None:
            for index in indexes:
                await self._copy_chunk(copying, index)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.threads.count, chunk_count(file.size) - len(chunks))):
                    group.create_task(work(missing))
        layout = FileLayout.of(file.size, tuple(chunks[index] for index in range(len(chunks))))
        if check is not None:
            await self._check(located, layout, check)
        return layout

    @staticmethod
    async def _expected(located: LocatedFile) -> Checksum | None:
        """The whole file's checksum, as far as it can be known before its first byte."""
        file = located.file
        if file.checksum is not None or file.size == 0 or chunk_count(file.size) == 1:
            return file.checksum
        return (await located.location()).checksum

    async def _copy_chunk(self, copying: _Copying, index: int) -> None:
        located = copying.located
        location = await located.location()
        try:
            await self._fetch(copying, location, index)
        except LocationRefusedError:
            # Signed URLs expire in the middle of a long file. A fresh one that is refused as well is a refusal.
            location = await located.location(refused=location)
        else:
            return
        try:
            await self._fetch(copying, location, index)
        except LocationRefusedError as error:
            raise AuthRequiredError(error.source, error.reason) from None

    async def _fetch(self, copying: _Copying, location: Location, index: int) -> None:
        located, check = copying.located, copying.check
        file = located.file
        request = RangeRequest(located.name, file.path, chunk_range(file.size, index), file.size)

        stop = threading.Event()

        def hurry() -> None:
            stop.set()
            if check is not None:
                check.stop()

        def fetch(slot: Slot, buffer: memoryview) -> None:
            with slot.asking() as asked:
                stated = self.ranges.read_into(location, request, buffer, lambda: not stop.is_set())
                asked.size = len(buffer)
            digest = digest_of(buffer)
            self.store.put(digest, buffer)
            copying.tell(index, digest)  # now: the check may have to wait for other chunks, or find evidence
            if check is not None:
                check.take(index, digest, buffer)
            elif request.range.size == file.size and (expected := location.checksum or stated):
                check_at_once(expected, buffer, located.subject)

        async def once() -> None:
            async with self.budgets.of(location.url).slot() as slot:
                await self.threads.run(request.range.size, partial(fetch, slot), on_cancel=hurry)

        await located.patience.run(once, located.allowance)

    async def _check(self, located: LocatedFile, layout: FileLayout, check: WholeCheck) -> None:
        """Read back what was not checked on its way, chunk by chunk, so that others get their turn in between."""
        chunks = layout.placed()
        for index in check.left():
            await self.threads.run(chunks[index].range.size, partial(self._take_back, chunks[index], check))
        check.check(located.subject)

    def _take_back(self, chunk: PlacedChunk, check: WholeCheck, buffer: memoryview) -> None:
        self._read_back(chunk.digest, buffer)
        check.take_back(chunk.index, buffer)

    def _read_back(self, digest: Digest, buffer: memoryview) -> None:
        done = 0
        with self.store.open(digest) as file:
            while done < len(buffer) and (count := file.readinto(buffer[done:])):  # type: ignore[attr-defined] # see store
                done += count
        if done != len(buffer):
            raise NotFoundError(f"chunk {digest}")
