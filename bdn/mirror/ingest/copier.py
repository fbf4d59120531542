"""Copy upstream files into the store: a large one chunk by chunk and in parallel, small ones together as a slab.

One range request makes one chunk. A file's checksum is computed while its chunks pass through the byte threads, in whatever
order they come: reading a large file back afterwards would cost as much disk as writing it did.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

from bdn.core.chunk import (
    Buffer,
    ByteRange,
    Digest,
    FileLayout,
    PlacedChunk,
    Slice,
    chunk_count,
    chunk_range,
    digest_of,
)
from bdn.core.errors import ChecksumMismatchError, NotFoundError, single_error
from bdn.core.source.upstream import Checksum
from bdn.core.store import ChunkStore
from bdn.mirror.upstream.reader import FileRange, LocatedFile, UpstreamReader
from bdn.transfer.checksums import OrderedChecksum, PartChecksums, RunningChecksum, part_checksum
from bdn.transfer.ranged import RangesIgnoredError
from bdn.transfer.under_way import Arriving, UnderWay

logger = logging.getLogger(__name__)

ChunkStored = Callable[[int, Digest, int], None]
WrongContent = Callable[[LocatedFile, bytes, ChecksumMismatchError], Awaitable[None]]
Put = Callable[[Digest, Buffer], object]  # makes a chunk durable in the store; blocking
_PARCEL_FILES: Final = (
    64  # of a slab, read one after the other by one thread; more would make a tail where an upstream is far
)


class Packed(NamedTuple):
    """A slab, the files in it, and how many bytes came from the upstream."""

    slab: Digest
    digests: Sequence[Digest]
    fetched: int


class ChunkLostError(Exception):
    """The store has lost a chunk that counts as stored."""

    def __init__(self, chunk: Digest) -> None:
        super().__init__(f"chunk {chunk}")
        self.chunk = chunk


@dataclass(frozen=True)
class Copier:
    """Copies files into the store, and packs small ones into slabs."""

    store: ChunkStore
    reader: UpstreamReader

    async def copy(
        self, located: LocatedFile, stored: Mapping[int, Digest], put: Put, on_stored: ChunkStored, under_way: UnderWay
    ) -> FileLayout:
        """Make every chunk of the file durable in the store.

        Args:
            located: what to copy.
            stored: chunks that the store holds already, from an earlier attempt.
            put: stores a further chunk.
            on_stored: told of each further chunk (index, digest, size) once it is durable.
            under_way: what has come and was not told of.

        Raises:
            UpstreamError, AuthRequiredError, StoreUnavailableError: chunks that were stored stay stored.
        """
        file = located.file
        chunks = dict(stored)

        def told(index: int, digest: Digest, arriving: Arriving) -> None:
            arriving.received = 0
            if index not in chunks:
                chunks[index] = digest
                on_stored(index, digest, chunk_range(file.size, index).size)

        try:
            check = await self._copy_chunks(self.reader, located, chunks, put=put, told=told, under_way=under_way)
        except RangesIgnoredError:
            logger.warning("%s: the server ignores Range; the file is read in order, by one request", located.subject)
            with self.reader.in_order() as reader:
                check = await self._copy_chunks(reader, located, chunks, put=put, told=told, under_way=under_way)
        layout = FileLayout.of(file.size, tuple(chunks[index] for index in range(len(chunks))))
        if check is not None:
            await self._check(located, layout, check)
        return layout

    async def _copy_chunks(
        self,
        reader: UpstreamReader,
        located: LocatedFile,
        chunks: Mapping[int, Digest],
        *,
        put: Put,
        told: Callable[[int, Digest, Arriving], None],
        under_way: UnderWay,
    ) -> WholeCheck | None:
        """Store every chunk that is not among ``chunks``; ``told`` adds it. Returns the check of the whole, with what is left of it."""
        size, loop = located.file.size, asyncio.get_running_loop()
        expected = await self._expected(located)
        check = whole_check(expected, size, chunks, self._read_back) if expected is not None else None
        missing = [index for index in range(chunk_count(size)) if index not in chunks]
        left = iter(missing)

        def accept(index: int, arriving: Arriving, content: memoryview, stated: Checksum | None) -> None:
            digest = digest_of(content)
            put(digest, content)
            # Tell before checking: the check may wait for other chunks, and wrong content is evidence.
            loop.call_soon_threadsafe(told, index, digest, arriving)
            if check is not None:
                check.take(index, digest, content)
            elif stated is not None and len(content) == size:
                check_at_once(stated, content, located.subject)

        async def work() -> None:
            for index in left:
                with under_way.read() as arriving:
                    wanted = FileRange(located, chunk_range(size, index), partial(accept, index, arriving))
                    on_cancel = None if check is None else check.stop
                    await reader.read([wanted], on_cancel=on_cancel, arriving=arriving)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(reader.ranges_at_once, len(missing))):
                    group.create_task(work())
        return check

    async def pack(
        self,
        files: Sequence[LocatedFile],
        prior: Mapping[str, FileLayout],
        put: Put,
        on_wrong: WrongContent,
        under_way: UnderWay,
    ) -> Packed:
        """Make the slab of these files durable in the store.

        Args:
            files: all files of the slab, in their order; none is empty.
            prior: where some of them lie in the store already, by the keys of their identities.
            put: stores the slab.
            on_wrong: told of a file that came with the wrong content.
            under_way: what has come and was not stored.

        Raises:
            UpstreamError, AuthRequiredError, StoreUnavailableError: nothing of it is stored.
        """
        slab = bytearray(sum(located.file.size for located in files))
        digests: dict[int, Digest] = {}
        offsets = list(accumulate((located.file.size for located in files), initial=0))

        def accept(number: int, content: memoryview, stated: Checksum | None) -> None:
            if stated is not None:
                check_at_once(stated, content, files[number].subject)
            slab[offsets[number] : offsets[number + 1]] = content
            digests[number] = digest_of(content)

        left: Sequence[int] = range(len(files))
        if prior:
            left = await asyncio.to_thread(self._read_prior, files, prior, slab, offsets, digests)
        with ExitStack() as stack, single_error():  # what has come is under way until the slab is stored
            async with asyncio.TaskGroup() as group:
                for parcel in _parcels(left):
                    wanted = [
                        FileRange(files[one], ByteRange(0, files[one].file.size), partial(accept, one))
                        for one in parcel
                    ]
                    arriving = stack.enter_context(under_way.read())
                    group.create_task(self.reader.read(wanted, on_wrong=on_wrong, arriving=arriving))
            digest = digest_of(slab)
            await self.reader.threads.run(0, lambda _: put(digest, slab))
        fetched = sum(files[number].file.size for number in left)
        return Packed(digest, [digests[number] for number in range(len(files))], fetched)

    def _read_prior(
        self,
        files: Sequence[LocatedFile],
        prior: Mapping[str, FileLayout],
        slab: bytearray,
        offsets: Sequence[int],
        digests: dict[int, Digest],
    ) -> list[int]:
        """Take from the store what lies there. Returns the numbers of the files that do not. Blocking."""
        left: list[int] = []
        for number, located in enumerate(files):
            layout = prior.get(located.file.identity.key)
            part = memoryview(slab)[offsets[number] : offsets[number + 1]]
            if layout is None or layout.slice is None or not self._read_slice(layout, layout.slice, part):
                left.append(number)
            else:
                digests[number] = layout.digest
        return left

    def _read_slice(self, layout: FileLayout, lies: Slice, part: memoryview) -> bool:
        try:
            with self.store.open(lies.slab) as file:
                file.seek(lies.offset)
                part[:] = file.read(len(part))
        except (NotFoundError, ValueError):
            return False
        return digest_of(part) == layout.digest

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
        try:
            with self.store.open(digest) as file:
                while done < len(buffer) and (count := file.readinto(buffer[done:])):  # type: ignore[attr-defined] # see store
                    done += count
        except NotFoundError:
            raise ChunkLostError(digest) from None
        if done != len(buffer):
            raise ChunkLostError(digest)


def _parcels(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Numbers of files that one thread reads, one after the other."""
    parcel: list[int] = []
    for number in numbers:
        parcel.append(number)
        if len(parcel) == _PARCEL_FILES:
            yield parcel
            parcel = []
    if parcel:
        yield parcel


TURN_SECONDS: Final = 1.0  # how long a byte thread that holds a chunk waits for the chunk before it

ReadBack = Callable[[Digest, memoryview], None]


def check_at_once(expected: Checksum, content: Buffer, subject: str) -> None:
    """For a file whose bytes are all in one buffer: raise ``ChecksumMismatchError`` unless it is the right file."""
    checksum = RunningChecksum(expected, len(content))
    checksum.update(content)
    checksum.check(subject)


def whole_check(expected: Checksum, size: int, stored: Mapping[int, Digest], read_back: ReadBack) -> WholeCheck:
    """The check for a file of ``size`` bytes of which the chunks ``stored`` will not be fetched.

    ``take`` gets each chunk that was fetched, once it is stored and while it is hot, in byte threads and in any order, and may
    use up its buffer. Then the chunks that are ``left`` have to be read back, in this order, and given to ``take_back``; then
    ``check`` raises ``ChecksumMismatchError`` unless it is the right file. After ``stop`` no thread waits any more.
    """
    if expected.kind.is_combinable:
        return _Parts(expected, size)
    return _InOrder(expected, size, stored, read_back)


class _Parts:
    """Each chunk's checksum by itself; they are combined at the end."""

    def __init__(self, expected: Checksum, size: int) -> None:
        self._parts = PartChecksums(expected, size)

    def take(self, index: int, digest: Digest, buffer: memoryview) -> None:  # noqa: ARG002 - nothing is read back here
        self.take_back(index, buffer)

    def left(self) -> Sequence[int]:
        return self._parts.missing

    def take_back(self, index: int, content: Buffer) -> None:
        self._parts.offer(index, part_checksum(self._parts.kind, content))

    def check(self, subject: str) -> None:
        self._parts.check(subject)

    def stop(self) -> None:
        """Nobody ever waits."""


class _InOrder:
    """One after the other: a chunk that arrives too early waits a moment for the chunk before it, in its thread.

    Then it is passed over, and a later caller reads it back, as it does chunks that were stored before.
    """

    def __init__(self, expected: Checksum, size: int, stored: Mapping[int, Digest], read_back: ReadBack) -> None:
        self._size = size
        self._ordered = OrderedChecksum(expected, size)
        self._passed_over = dict(stored)
        self._read_back = read_back
        self._catching_up = threading.Lock()
        self._stopped = False
        self._rest: RunningChecksum | None = None

    def take(self, index: int, digest: Digest, buffer: memoryview) -> None:
        wait_seconds = 0.0 if self._ordered.next_index in self._passed_over else TURN_SECONDS
        if not self._ordered.offer(index, buffer, wait_seconds):
            self._passed_over[index] = digest
        # A passes 5 over; B has just taken 4, and saw no 5. So both look, and at the end ``left`` does.
        if self._catching_up.acquire(blocking=False):
            try:
                self._catch_up(buffer)
            finally:
                self._catching_up.release()

    def _catch_up(self, buffer: memoryview) -> None:
        while not self._stopped and (index := self._ordered.next_index) in self._passed_over:
            size = chunk_range(self._size, index).size
            if size > len(buffer):  # that of the last chunk, which is shorter: somebody else will come by
                return
            self._read_back(self._passed_over[index], buffer[:size])
            self._ordered.offer(index, buffer[:size], 0)

    def left(self) -> Sequence[int]:
        start, self._rest = self._ordered.hand_over()
        return range(start, chunk_count(self._size))

    def take_back(self, index: int, content: Buffer) -> None:  # noqa: ARG002 - they come in order
        if self._rest is not None:
            self._rest.update(content)

    def check(self, subject: str) -> None:
        if self._rest is not None:
            self._rest.check(subject)

    def stop(self) -> None:
        self._stopped = True
        self._ordered.hand_over()


WholeCheck = _Parts | _InOrder
