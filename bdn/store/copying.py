"""A store is copied into another one, beside whoever uses the first, until the other one lacks nothing.

Both are listed side by side, in the order of digests, so that a copy holds a page of each, however many chunks there are. A chunk
that the other one has with the same size is passed over: whatever ended an earlier copy, the next one goes on there. What is
missing is read, compared with its name, and put, which makes it durable. What came behind a listing is found by the next one.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import NotFoundError, StoreUnavailableError, single_error
from bdn.core.room import Need, check_room
from bdn.core.store import MirrorStore, StoredChunk
from bdn.store.directory import leave_cache
from bdn.transfer.byte_threads import ByteThreads

_AT_ONCE: Final = 8  # a bucket that is read by no more never makes one of them wait
_AHEAD: Final = 2 * _AT_ONCE  # chunks that threads have or wait for
_BATCH: Final = 1024  # chunks that one trip to a thread lists
_ROUNDS: Final = 10  # a mirror that goes on writing is not waited for

Show = Callable[[int, int | None, int], object]  # bytes done, all of them, and those that moved


@dataclass
class Listed:
    """What the first store holds, what of that is ``missing`` in the other one, and what that one alone has."""

    chunks: int = 0
    bytes: int = 0
    missing_chunks: int = 0
    missing_bytes: int = 0
    target_only: int = 0

    def add(self, ours: StoredChunk | None, theirs: StoredChunk | None) -> bool:
        """Count one chunk, as each of both has it; whether it is missing."""
        if ours is None:
            self.target_only += 1
            return False
        self.chunks += 1
        self.bytes += ours.size
        is_missing = theirs is None or theirs.size != ours.size
        if is_missing:
            self.missing_chunks += 1
            self.missing_bytes += ours.size
        return is_missing


@dataclass
class Copied:
    """What has been done. ``wrong`` are chunks that are not what their names say, and why; they are not copied.

    ``changed`` counts those that were not as they had been listed any more.
    """

    chunks: int = 0
    bytes: int = 0
    changed: int = 0
    wrong: dict[Digest, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CopyReport:
    """The last listing, what was copied in all, and what was wrong when it was last read."""

    listed: Listed
    chunks: int
    bytes: int
    wrong: dict[Digest, str]


class _ChangedError(Exception):
    """A chunk went, or was replaced, since it was listed: the next listing tells."""


@dataclass(frozen=True)
class StoreCopy:
    """From ``source`` to ``target``, which stay the caller's. Whenever it ends, nothing is left half-done."""

    source: MirrorStore
    target: MirrorStore
    progress: Callable[[], AbstractContextManager[Show]]

    async def run(self, *, dry_run: bool) -> CopyReport:
        """Copy until nothing is missing, or nothing but what is wrong, or it was listed often enough; a rehearsal lists once.

        Raises:
            NoRoomError: what is missing does not fit the target's disk.
            StoreUnavailableError: one of them is away, or the target takes nothing. What was copied stays.
        """
        chunks = size = 0
        wrong: dict[Digest, str] = {}
        with closing(ByteThreads(_AT_ONCE, "store-copy")) as threads:
            for _ in range(_ROUNDS):
                listed = await self._list()
                if dry_run or not listed.missing_chunks:
                    return CopyReport(listed, chunks, size, {})
                copied = await self._copy(listed.missing_bytes, threads)
                chunks, size, wrong = chunks + copied.chunks, size + copied.bytes, copied.wrong
                if not copied.chunks and not copied.changed:
                    return CopyReport(listed, chunks, size, wrong)
        return CopyReport(await self._list(), chunks, size, wrong)

    async def _list(self) -> Listed:
        listed = Listed()
        async for _ in self._missing(listed):
            pass
        disk = await asyncio.to_thread(self.target.disk)
        if disk is not None:
            check_room("the store", [Need("chunks", disk.path, disk.device, listed.missing_bytes, disk.free)])
        return listed

    async def _copy(self, size: int, threads: ByteThreads) -> Copied:
        """All that is missing, once; ``size`` bytes when it was listed."""
        copied, done, free = Copied(), 0, asyncio.Semaphore(_AHEAD)

        async def copy(chunk: StoredChunk, show: Show) -> None:
            nonlocal done
            try:
                reason = await threads.run(min(chunk.size, CHUNK_SIZE), partial(self._move, chunk))
            except _ChangedError:
                copied.changed += 1
            else:
                if reason is None:
                    copied.chunks += 1
                    copied.bytes += chunk.size
                else:
                    copied.wrong[chunk.digest] = reason
            finally:
                free.release()
            done += chunk.size
            show(done, size, copied.bytes)

        with single_error(), self.progress() as show:
            async with asyncio.TaskGroup() as group:
                async for missing in self._missing(Listed()):
                    for chunk in missing:
                        await free.acquire()
                        group.create_task(copy(chunk, show))
        return copied

    async def _missing(self, listed: Listed) -> AsyncIterator[list[StoredChunk]]:
        """What is missing, some at a time, as both are listed and counted."""
        pairs = _pairs(self.source.listed(), self.target.listed())
        while batch := await asyncio.to_thread(lambda: list(islice(pairs, _BATCH))):
            yield [ours for ours, theirs in batch if listed.add(ours, theirs) and ours is not None]

    def _move(self, chunk: StoredChunk, buffer: memoryview) -> str | None:
        """In a thread. Why the chunk is wrong, when it is; then it was not moved."""
        if self._is_read(chunk, buffer):
            self.target.put(chunk.digest, buffer)
            return None
        reason = self.source.fault(chunk.digest)
        if reason is None:  # somebody has repaired it, or it could not be read for a moment
            raise _ChangedError
        return reason

    def _is_read(self, chunk: StoredChunk, buffer: memoryview) -> bool:
        """Whether all of the buffer is the chunk."""
        done = 0
        try:
            with self.source.open(chunk.digest) as file:
                while done < len(buffer) and (count := file.readinto(buffer[done:])):  # type: ignore[attr-defined] # see store
                    done += count
                leave_cache(file)
        except NotFoundError:
            raise _ChangedError from None
        except (StoreUnavailableError, OSError):
            return False
        return done == chunk.size and digest_of(buffer) == chunk.digest


_Pair = tuple[StoredChunk | None, StoredChunk | None]


def _pairs(ours: Iterator[StoredChunk], theirs: Iterator[StoredChunk]) -> Iterator[_Pair]:
    """Every chunk of both, as each of them has it."""
    both = heapq.merge(
        ((chunk.digest.hex, 0, chunk) for chunk in ours), ((chunk.digest.hex, 1, chunk) for chunk in theirs)
    )
    for _, found in groupby(both, key=lambda one: one[0]):
        held = {side: chunk for _, side, chunk in found}
        yield held.get(0), held.get(1)
