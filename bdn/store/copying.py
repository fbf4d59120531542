"""Copies one store into another, while the first may be in use, until the second lacks nothing.

Both are listed side by side in the order of digests, so a copy holds one page of each, however many chunks there are. A
chunk that the second has with the same size is skipped, so an interrupted copy resumes. A missing chunk is read,
verified and put, which makes it durable. Chunks added behind a listing are found by the next one.
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
from bdn.core.store import MirrorStore, StoredObject
from bdn.store.directory import leave_cache
from bdn.transfer.byte_threads import ByteThreads

_AT_ONCE: Final = 8  # low enough that a bucket makes no read wait
_AHEAD: Final = 2 * _AT_ONCE  # chunks in threads, or waiting for one
_BATCH: Final = 1024  # chunks listed per call in a thread
_ROUNDS: Final = 10  # the most listings, since a mirror may go on writing

Show = Callable[[int, int | None, int], object]  # bytes done, bytes in total, bytes copied


@dataclass
class StoreDifference:
    """Counts of the first store's chunks, of those ``missing`` in the second, and of those only in the second."""

    chunks: int = 0
    bytes: int = 0
    missing_chunks: int = 0
    missing_bytes: int = 0
    target_only: int = 0

    def add(self, ours: StoredObject | None, theirs: StoredObject | None) -> bool:
        """Count one chunk as found in each store. Returns whether it is missing."""
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
    """Results so far. ``wrong`` maps chunks that do not match their digest to the reason; they are not copied.

    ``changed`` counts chunks that changed since they were listed.
    """

    chunks: int = 0
    bytes: int = 0
    changed: int = 0
    wrong: dict[Digest, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CopyReport:
    """The last listing, totals of the copies, and the chunks that were wrong when last read."""

    listed: StoreDifference
    chunks: int
    bytes: int
    wrong: dict[Digest, str]


class _ChangedError(Exception):
    """A chunk was removed or replaced since it was listed; the next listing shows which."""


@dataclass(frozen=True)
class StoreCopy:
    """Copies ``source`` to ``target``; the caller closes them. An interrupted copy leaves no partial chunk."""

    source: MirrorStore
    target: MirrorStore
    progress: Callable[[], AbstractContextManager[Show]]

    async def run(self, *, dry_run: bool) -> CopyReport:
        """Copy until nothing but wrong chunks is missing, at most ``_ROUNDS`` times. A dry run lists once.

        Raises:
            NoRoomError: the missing chunks do not fit on the target's disk.
            StoreUnavailableError: a store does not respond, or the target refuses writes. Chunks copied so far stay.
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

    async def _list(self) -> StoreDifference:
        listed = StoreDifference()
        async for _ in self._missing(listed):
            pass
        disk = await asyncio.to_thread(self.target.disk)
        if disk is not None:
            check_room("the store", [Need("chunks", disk.path, disk.device, listed.missing_bytes, disk.free)])
        return listed

    async def _copy(self, size: int, threads: ByteThreads) -> Copied:
        """Copy each missing chunk once; ``size`` is their sum at the listing."""
        copied, done, free = Copied(), 0, asyncio.Semaphore(_AHEAD)

        async def copy(chunk: StoredObject, show: Show) -> None:
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
                async for missing in self._missing(StoreDifference()):
                    for chunk in missing:
                        await free.acquire()
                        group.create_task(copy(chunk, show))
        return copied

    async def _missing(self, listed: StoreDifference) -> AsyncIterator[list[StoredObject]]:
        """Missing chunks in batches, while both stores are listed and counted."""
        pairs = _pairs(self.source.listed(), self.target.listed())
        while batch := await asyncio.to_thread(lambda: list(islice(pairs, _BATCH))):
            yield [ours for ours, theirs in batch if listed.add(ours, theirs) and ours is not None]

    def _move(self, chunk: StoredObject, buffer: memoryview) -> str | None:
        """Runs in a thread. Returns why the chunk is wrong and was not copied, or None."""
        if self._is_read(chunk, buffer):
            self.target.put(chunk.digest, buffer)
            return None
        reason = self.source.fault(chunk.digest)
        if reason is None:  # repaired meanwhile, or unreadable only for a moment
            raise _ChangedError
        return reason

    def _is_read(self, chunk: StoredObject, buffer: memoryview) -> bool:
        """Whether the chunk was read completely and matches its digest."""
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


_Pair = tuple[StoredObject | None, StoredObject | None]


def _pairs(ours: Iterator[StoredObject], theirs: Iterator[StoredObject]) -> Iterator[_Pair]:
    """Every chunk of either store, as each of them has it."""
    both = heapq.merge(
        ((chunk.digest.hex, 0, chunk) for chunk in ours), ((chunk.digest.hex, 1, chunk) for chunk in theirs)
    )
    for _, found in groupby(both, key=lambda one: one[0]):
        held = {side: chunk for _, side, chunk in found}
        yield held.get(0), held.get(1)
