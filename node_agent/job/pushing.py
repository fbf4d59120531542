"""Push files to the mirror as a checkpoint: upload the missing chunks, then commit atomically."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from blake3 import blake3

from bdn.core.chunk import ByteRange, Digest, chunk_count, chunk_range, digest_of
from bdn.core.errors import BdnError, DiskFailedError, NotFoundError, QuotaExceededError, single_error
from bdn.core.manifest import Cutter, is_small, slab_cutter
from bdn.disk.threads import in_thread
from bdn.net.api_clients import MirrorClient
from bdn.net.client import OutageRetry, at_port
from bdn.net.http1.connection import FileBody
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool, reason_of
from bdn.transfer.batching import Batched
from bdn.transfer.byte_threads import ByteThreads
from bdn.wire.http_fields import authorization, push_path
from bdn.wire.mirror_schema import Mirror
from bdn.wire.push_schema import CHUNKS_AT_ONCE, CheckpointDetails, ChunkList, CommitRequest, PushedFile, PushRequest
from bdn.wire.shapes import ServiceUnreachableError, error_from
from node_agent.job.tree import ChangedError, OpenFile

NAMERS: Final = 2  # with 1 a push was a tenth slower, with 4 no faster
Pace = Callable[[int], float]
_Result = TypeVar("_Result")
_Put = Callable[[Digest, FileBody | memoryview], None]
_ATTEMPTS: Final = 3
# The push has ended, or the mirror lost some of its chunks.
_AGAIN: Final = frozenset({"NOT_FOUND", "CHUNKS_MISSING"})
_ANSWER_BYTES: Final = 64 * 1024
_HELD: Final = 204
_GROUPS: Final = 3  # at once: one is hashed while others are sent
# small, so that sending begins soon; each group is twice as large as the previous one
_FIRST_GROUP_BYTES: Final = 32 * 1024**2
_GROUP_BYTES: Final = 256 * 1024**2
_PIECE: Final = 1024 * 1024  # read and hashed at once: fits the cache of a core


@dataclass(frozen=True)
class SentFile:
    """A file to send; ``path`` is relative to the checkpoint.

    ``opened`` opens the file, in a thread. For files of 1 MiB or more, ``known`` holds digests of chunks that need
    not be read, and ``on_known`` is called in a thread for each further chunk that the mirror has.
    """

    path: str
    size: int
    opened: Callable[[], AbstractContextManager[OpenFile]]
    known: Mapping[int, Digest]
    on_known: Callable[[int, Digest], None]


@dataclass(frozen=True)
class Pusher:
    """Pushes to the mirror, with its client's token. All pushes share threads and connections.

    ``namers`` are separate threads, so that hashing does not queue behind uploads.
    """

    mirror: MirrorClient
    pool: ConnectionPool
    namers: ByteThreads
    senders: ByteThreads
    outages: OutageRetry = field(default_factory=OutageRetry)
    pace: Pace | None = None  # seconds to wait before sending this many bytes
    turn: Callable[[], Awaitable[None]] | None = None  # awaited before each read and each attempt to send

    async def push(
        self, source: str, files: Sequence[SentFile], details: CheckpointDetails, check: Callable[[], Awaitable[None]]
    ) -> Mirror:
        """Push a checkpoint; returns a READY mirror. Chunks that the mirror has are not sent.

        ``check`` runs after all chunks are sent and before the commit.

        Raises ``BdnError``: the mirror refuses or is down for longer than an outage, or an error from reading or
        ``check``.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return await self._push_once(source, files, details, check)
            except BdnError as error:
                if error.code not in _AGAIN or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError

    async def _push_once(
        self, source: str, files: Sequence[SentFile], details: CheckpointDetails, check: Callable[[], Awaitable[None]]
    ) -> Mirror:
        push_id, pushed = await self.send(source, files)
        await check()
        request = CommitRequest(files=pushed, details=details)
        return await self.outages.ask(partial(self.mirror.commit, push_id, request), but=_is_quota)

    async def has_committed(self, source: str, push_id: str, at: float) -> bool:
        """Whether the mirror has the version that this push committed at ``at``, or a later version.

        An earlier version means that the database was restored from a backup. Raises ``BdnError`` if the mirror does
        not answer.
        """
        try:
            newest = await self.outages.ask(partial(self.mirror.committed_push, source))
        except BdnError as error:
            if error.code == NotFoundError.code:
                return False
            raise
        return newest.push_id == push_id or newest.committed_at.timestamp() > at

    async def send(self, source: str, files: Sequence[SentFile]) -> tuple[str, list[PushedFile]]:
        """Upload the files, which are sorted by path, for a push that stays open.

        Returns the push's id and the file list for the commit.
        """
        sending = _Sending(self)
        chunks: dict[tuple[str, int], Digest] = {}
        slabs: list[tuple[_Slab, Digest]] = []
        left = _groups(_units(files))
        naming = asyncio.Lock()  # one group at a time: hashing two at once would delay sending the first

        async def send() -> None:
            while True:
                async with naming:
                    group = next(left, ())
                    named = await _all_of(map(sending.name, group))
                if not group:
                    return
                for unit, digest in zip(group, await _all_of(map(sending.send, group, named)), strict=True):
                    if isinstance(unit, _Slab):
                        slabs.append((unit, digest))
                    else:
                        chunks[unit.file.path, unit.index] = digest

        await _all_of([sending.begin(source), *(send() for _ in range(_GROUPS))])
        return sending.push_id, await asyncio.to_thread(_pushed, files, chunks, slabs)


@dataclass(frozen=True, slots=True)
class _Chunk:
    file: SentFile
    index: int
    part: ByteRange

    @property
    def size(self) -> int:
        return self.part.size

    @property
    def buffer_size(self) -> int:
        return min(self.size, _PIECE)

    @property
    def known(self) -> Digest | None:
        return self.file.known.get(self.index)

    def name(self, buffer: memoryview) -> Digest:
        with self.file.opened() as file:
            return file.digest_of(self.part, buffer)

    def put(self, digest: Digest, buffer: memoryview, put: _Put) -> Digest:
        """Send the chunk and return its digest.

        A known digest is recomputed, because the mirror lacks the chunk.
        """
        with self.file.opened() as file:
            if self.known is not None:
                digest = file.digest_of(self.part, buffer)
            try:
                put(digest, FileBody(file.descriptor, self.part))
            except EOFError:
                raise ChangedError(file.path) from None
            except BdnError:
                file.check()  # a write after hashing makes the mirror refuse the chunk
                raise
        return digest


@dataclass(slots=True)
class _Slab:
    """Small files sent as one chunk.

    The files are read each time the slab is hashed or sent; ``digests`` are from the last read.
    """

    files: Sequence[SentFile]
    digests: Sequence[Digest] = ()
    known: Digest | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def buffer_size(self) -> int:
        return self.size

    def name(self, buffer: memoryview) -> Digest:
        return self._read(buffer[: file.size] for file in self.files)

    def put(self, digest: Digest, buffer: memoryview, put: _Put) -> Digest:  # noqa: ARG002 - the files are read again
        """Send the slab with its present content; returns its digest."""
        stops = accumulate(file.size for file in self.files)
        named = self._read(buffer[stop - file.size : stop] for file, stop in zip(self.files, stops, strict=True))
        put(named, buffer)
        return named

    def _read(self, places: Iterable[memoryview]) -> Digest:
        hasher, digests = blake3(), []
        for one, content in zip(self.files, places, strict=True):
            with one.opened() as file:
                file.read(0, content)
            hasher.update(content)
            digests.append(digest_of(content))
        self.digests = digests
        return Digest(hasher.hexdigest())


_Unit = _Chunk | _Slab


def _units(files: Sequence[SentFile]) -> Iterator[_Unit]:
    """Chunks and slabs of files that are sorted by path."""
    cutter: Cutter[SentFile] = slab_cutter()
    for file in files:
        if is_small(file.size):
            yield from map(_Slab, cutter.add(file, file.path, file.size))
        else:
            for index in range(chunk_count(file.size)):
                yield _Chunk(file, index, chunk_range(file.size, index))
    yield from map(_Slab, cutter.finish())


def _groups(units: Iterator[_Unit]) -> Iterator[Sequence[_Unit]]:
    """Batches of units: one presence query per group."""
    group: list[_Unit] = []
    size, most = 0, _FIRST_GROUP_BYTES
    for unit in units:
        if len(group) == CHUNKS_AT_ONCE or size + unit.size > most:
            yield group
            group, size, most = [], 0, min(2 * most, _GROUP_BYTES)
        group.append(unit)
        size += unit.size
    if group:
        yield group


def _pushed(
    files: Sequence[SentFile], chunks: Mapping[tuple[str, int], Digest], slabs: Iterable[tuple[_Slab, Digest]]
) -> list[PushedFile]:
    """The file list for the commit. In a thread: up to a million files."""
    small: dict[str, PushedFile] = {}
    for slab, name in slabs:
        offset = 0
        for file, digest in zip(slab.files, slab.digests, strict=True):
            small[file.path] = PushedFile(
                path=file.path, size=file.size, digest=str(digest), slab=str(name), offset=offset
            )
            offset += file.size
    return [
        small.get(file.path)
        or PushedFile(
            path=file.path,
            size=file.size,
            chunks=[str(chunks[file.path, index]) for index in range(chunk_count(file.size))],
        )
        for file in files
    ]


async def _all_of(works: Iterable[Coroutine[object, object, _Result]]) -> list[_Result]:
    """Returns results in order. The first failure cancels all other work and is raised."""
    with single_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


def _is_quota(error: BdnError) -> bool:
    """Not an outage: the operator can free space, and smaller checkpoints may fit."""
    return error.code == QuotaExceededError.code


def _is_of_disk(error: BdnError) -> bool:
    """A failure of the job's disk, not of the mirror: other checkpoints do not wait for it."""
    return isinstance(error, DiskFailedError)


class _Sending:
    """The chunks of one push. Hashing begins while the push is being opened."""

    def __init__(self, pusher: Pusher) -> None:
        self.push_id = ""
        self._plane = ""
        self._begun = asyncio.Event()
        self._pusher = pusher
        self._missing = Batched(self._ask_missing, CHUNKS_AT_ONCE)
        self._locks: WeakValueDictionary[Digest, asyncio.Lock] = WeakValueDictionary()  # equal chunks are sent once

    async def begin(self, source: str) -> None:
        """Open the push; presence queries and uploads wait for it."""
        request = PushRequest(source=source)
        push = await self._pusher.outages.ask(partial(self._pusher.mirror.begin_push, request))
        self.push_id, self._plane = push.push_id, at_port(self._pusher.mirror.base_url, push.data_port)
        self._begun.set()

    async def name(self, unit: _Unit) -> Digest:
        return unit.known or await self._run(self._pusher.namers, min(unit.size, _PIECE), unit.name)

    async def send(self, unit: _Unit, digest: Digest) -> Digest:
        """Upload the unit unless the mirror has it; returns the digest.

        Presence is queried before each attempt, because an earlier attempt may have succeeded.
        """
        lock = self._locks.setdefault(digest, asyncio.Lock())

        async def attempt() -> Digest:
            async with lock:
                if not await self._missing.of(digest):
                    return digest
                return await self._run(
                    self._pusher.senders, unit.buffer_size, lambda buffer: unit.put(digest, buffer, self._put)
                )

        sent = await self._pusher.outages.ask(attempt, but=lambda error: _is_of_disk(error) or _is_quota(error))
        if isinstance(unit, _Chunk) and sent != unit.known:
            await in_thread(unit.file.on_known, unit.index, sent)
        return sent

    async def _run(self, threads: ByteThreads, size: int, work: Callable[[memoryview], Digest]) -> Digest:
        if self._pusher.turn is not None:
            await self._pusher.turn()
        return await threads.run(size, work)

    async def _ask_missing(self, digests: Sequence[Digest]) -> list[bool]:
        chunks = ChunkList(chunks=[str(digest) for digest in dict.fromkeys(digests)])
        await self._begun.wait()
        missing = set((await self._pusher.mirror.missing(self.push_id, chunks)).chunks)
        return [str(digest) in missing for digest in digests]

    def _put(self, digest: Digest, content: FileBody | memoryview) -> None:
        """The mirror refuses content that does not match the digest. ``EOFError``: the file is shorter now."""
        if self._pusher.pace is not None:
            time.sleep(self._pusher.pace(len(content)))
        url = self._plane + push_path(self.push_id, digest)
        try:
            with self._pusher.pool.request("PUT", url, authorization(self._pusher.mirror.bearer), content) as answer:
                refusal = None if answer.status == _HELD else error_from(answer.status, answer.read(_ANSWER_BYTES))
        except NETWORK_ERRORS as error:
            raise ServiceUnreachableError(self._plane, reason_of(error)) from error
        if refusal is not None:
            raise refusal
