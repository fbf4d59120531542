"""Copies upstream files into the store: a large file chunk by chunk and in parallel, small ones together as a slab.

One range request makes one chunk. A file's checksum is computed while its chunks pass through the byte threads, in any
order: reading a large file back afterwards would cost as much disk bandwidth as writing it.
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
_PARCEL_FILES: Final = 64  # of a slab, read in sequence by one thread; more would leave a tail if an upstream is far


class Packed(NamedTuple):
    """A slab, the files in it, and the bytes that came from the upstream."""

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
    store: ChunkStore
    reader: UpstreamReader

    async def copy(
        self, located: LocatedFile, stored: Mapping[int, Digest], put: Put, on_stored: ChunkStored, under_way: UnderWay
    ) -> FileLayout:
        """Make every chunk of the file durable in the store.

        Args:
            located: what to copy.
            stored: chunks that an earlier attempt stored.
            put: stores a further chunk.
            on_stored: called with index, digest and size of each further chunk once it is durable.
            under_way: bytes that arrived and were not reported yet.

        Raises:
            UpstreamError, AuthRequiredError, StoreUnavailableError: stored chunks stay stored.
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
            logger.warning("%s: the server ignores Range; reading the file in order, with one request", located.subject)
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
        """Store every chunk that is not in ``chunks``; the callback adds each to it.

        Returns the check of the whole file, to be completed.
        """
        size, loop = located.file.size, asyncio.get_running_loop()
        expected = await self._expected(located)
        check = whole_check(expected, size, chunks, self._read_back) if expected is not None else None
        missing = [index for index in range(chunk_count(size)) if index not in chunks]
        left = iter(missing)

        def accept(index: int, arriving: Arriving, content: memoryview, stated: Checksum | None) -> None:
            digest = digest_of(content)
            put(digest, content)
            # Report before checking: the check may wait for other chunks, and wrong content is evidence.
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
            prior: layouts of files that the store has already, by the keys of their identities.
            put: stores the slab.
            on_wrong: called with a file that arrived with the wrong content.
            under_way: bytes that arrived and were not stored yet.

        Raises:
            UpstreamError, AuthRequiredError, StoreUnavailableError: nothing is stored.
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
        with ExitStack() as stack, single_error():  # arrived bytes are under way until the slab is stored
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
        """Read files that the store has into ``slab``. Returns the numbers of the other files. Blocking."""
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
        """The whole file's checksum, if it can be known before the first byte."""
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
    """Groups of files; one thread reads a group in sequence."""
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
    """Raise ``ChecksumMismatchError`` if a file whose bytes are all in one buffer is wrong."""
    checksum = RunningChecksum(expected, len(content))
    checksum.update(content)
    checksum.check(subject)


def whole_check(expected: Checksum, size: int, stored: Mapping[int, Digest], read_back: ReadBack) -> WholeCheck:
    """The check for a file of ``size`` bytes of which the chunks ``stored`` will not be fetched.

    ``take`` gets each fetched chunk once it is stored, while it is in the CPU's cache, in byte threads and in any
    order; it may overwrite the chunk's buffer. Then the caller reads back the chunks that are ``left``, in order, and
    gives them to ``take_back``. Then ``check`` raises ``ChecksumMismatchError`` if the file is wrong. After ``stop`` no
    thread waits any more.
    """
    if expected.kind.is_combinable:
        return _Parts(expected, size)
    return _InOrder(expected, size, stored, read_back)


class _Parts:
    """Computes each chunk's checksum by itself, and combines them at the end."""

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
        """Nothing to do: no thread ever waits."""


class _InOrder:
    """Checks in order: a chunk that arrives early waits a moment in its thread for the chunk before it.

    After that it is passed over, and a later caller reads it back, as it does chunks that were stored before.
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
        # Thread A passes over 5; thread B has just taken 4, and saw no 5. So both catch up here, and ``left`` does at
        # the end.
        if self._catching_up.acquire(blocking=False):
            try:
                self._catch_up(buffer)
            finally:
                self._catching_up.release()

    def _catch_up(self, buffer: memoryview) -> None:
        while not self._stopped and (index := self._ordered.next_index) in self._passed_over:
            size = chunk_range(self._size, index).size
            if size > len(buffer):  # buffer of the last chunk, which is shorter: another thread will catch up
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
