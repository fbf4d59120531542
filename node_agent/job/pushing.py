"""Send files to the mirror as a checkpoint: what it lacks, chunk by chunk, and then all of it at once becomes visible."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.core.chunk import ByteRange, Digest, chunk_count, chunk_range
from bdn.core.errors import BdnError, DiskFailedError, QuotaExceededError, single_error
from bdn.net.api_clients import MirrorClient
from bdn.net.client import OutageRetry
from bdn.net.http1.answer import Answer
from bdn.net.http1.connection import FileBody
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool, reason_of
from bdn.transfer.batching import Batched
from bdn.transfer.byte_threads import ByteThreads
from bdn.wire.http_fields import push_path
from bdn.wire.mirror_schema import Mirror
from bdn.wire.push_schema import CHUNKS_AT_ONCE, CheckpointDetails, ChunkList, CommitRequest, PushedFile, PushRequest
from bdn.wire.shapes import ServiceUnreachableError, error_from
from node_agent.fetch.chain import at_port
from node_agent.job.tree import ChangedError, OpenFile

Pace = Callable[[int], float]
_ATTEMPTS: Final = 3
# The push has ended meanwhile, or the mirror lost some of it.
_AGAIN: Final = frozenset({"NOT_FOUND", "CHUNKS_MISSING"})
_ANSWER_BYTES: Final = 64 * 1024
_HELD: Final = 204
_PIECE: Final = 1024 * 1024  # read and named at once: it stays in the cache of a core


@dataclass(frozen=True)
class SentFile:
    """A file that is to be sent, by its path in the checkpoint.

    ``opened`` opens it, in a thread. ``known`` are the digests of chunks that need not be read to be known; ``on_known`` is told of
    others, in a thread, once the mirror has them.
    """

    path: str
    size: int
    opened: Callable[[], AbstractContextManager[OpenFile]]
    known: Mapping[int, Digest]
    on_known: Callable[[int, Digest], None]


@dataclass(frozen=True)
class Pusher:
    """Pushes to one mirror at ``address``. ``bearer`` is its token for this. Threads and connections are shared by all pushes."""

    mirror: MirrorClient
    address: str
    pool: ConnectionPool
    threads: ByteThreads
    bearer: str | None = field(default=None, repr=False)
    outages: OutageRetry = field(default_factory=OutageRetry)
    pace: Pace | None = None  # how many seconds to wait before so many bytes are sent
    turn: Callable[[], Awaitable[None]] | None = None  # waited for before a chunk is read: others may come first

    async def push(
        self, source: str, files: Sequence[SentFile], details: CheckpointDetails, check: Callable[[], Awaitable[None]]
    ) -> Mirror:
        """The checkpoint as a READY mirror. Nothing that the mirror has is sent, nor sent again.

        ``check`` is asked when all was sent, and before it becomes visible.

        Raises ``BdnError``: what the mirror refuses, and what does not answer for longer than an outage; what reading and ``check`` raise.
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
        push_id, chunks = await self.send(source, files)
        await check()
        request = await asyncio.to_thread(_commit_of, files, chunks, details)
        return await self.outages.ask(partial(self.mirror.commit, push_id, request), but=_is_quota)

    async def send(self, source: str, files: Sequence[SentFile]) -> tuple[str, dict[tuple[str, int], Digest]]:
        """Have the mirror hold all chunks of these files, for a push that goes on. Its id, and the chunks by path and index."""
        push = await self.outages.ask(partial(self.mirror.begin_push, PushRequest(source=source)))
        sending = _Sending(self, push.push_id, at_port(self.address, push.data_port))
        chunks: dict[tuple[str, int], Digest] = {}
        left = ((file, index) for file in files for index in range(chunk_count(file.size)))

        async def send(left: Iterator[tuple[SentFile, int]]) -> None:
            for file, index in left:
                chunks[file.path, index] = await sending.chunk(file, index)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(self.threads.count):
                    group.create_task(send(left))
        return push.push_id, chunks


def _is_quota(error: BdnError) -> bool:
    """Which is no outage: people make room, and other checkpoints may be smaller."""
    return error.code == QuotaExceededError.code


def _is_of_disk(error: BdnError) -> bool:
    """Of the job's own, which is no outage of the mirror: other checkpoints do not wait for it."""
    return isinstance(error, DiskFailedError)


def _commit_of(
    files: Sequence[SentFile], chunks: Mapping[tuple[str, int], Digest], details: CheckpointDetails
) -> CommitRequest:
    pushed = [
        PushedFile(
            path=file.path,
            size=file.size,
            chunks=[str(chunks[file.path, index]) for index in range(chunk_count(file.size))],
        )
        for file in files
    ]
    return CommitRequest(files=pushed, details=details)


class _Sending:
    """The chunks of one push."""

    def __init__(self, pusher: Pusher, push_id: str, plane: str) -> None:
        self._pusher = pusher
        self._push_id = push_id
        self._plane = plane
        self._missing = Batched(self._ask_missing, CHUNKS_AT_ONCE)

    async def chunk(self, file: SentFile, index: int) -> Digest:
        """Read a chunk once, if it is not known, and send it where the mirror lacks it."""
        known, outages = file.known.get(index), self._pusher.outages
        if known is not None and not await outages.ask(partial(self._missing.of, known)):
            return known
        part = chunk_range(file.size, index)
        if self._pusher.turn is not None:
            await self._pusher.turn()

        def work(buffer: memoryview) -> Digest:
            with file.opened() as opened:
                digest = opened.digest_of(part, buffer)
                if not self._is_held(digest):
                    self._put(digest, opened, part)
            file.on_known(index, digest)
            return digest

        size = min(part.size, _PIECE)
        return await outages.ask(partial(self._pusher.threads.run, size, work), but=_is_of_disk)

    async def _ask_missing(self, digests: Sequence[Digest]) -> list[bool]:
        chunks = ChunkList(chunks=[str(digest) for digest in dict.fromkeys(digests)])
        missing = set((await self._pusher.mirror.missing(self._push_id, chunks)).chunks)
        return [str(digest) in missing for digest in digests]

    def _is_held(self, digest: Digest) -> bool:
        """Whether the mirror has it. One that refuses says why when it is sent; one that cannot answer now is not sent anything."""
        with self._asked("HEAD", digest) as answer:
            status = answer.status
        if status >= 500:
            raise error_from(status, b"")
        return status == _HELD

    def _put(self, digest: Digest, file: OpenFile, part: ByteRange) -> None:
        """It may be written to after it was named: then the mirror refuses it, as it is not what its name says."""
        if self._pusher.pace is not None:
            time.sleep(self._pusher.pace(part.size))
        try:
            with self._asked("PUT", digest, FileBody(file.descriptor, part)) as answer:
                refusal = None if answer.status == _HELD else error_from(answer.status, answer.read(_ANSWER_BYTES))
        except EOFError:
            raise ChangedError(file.path) from None
        if refusal is not None:
            file.check()
            raise refusal

    @contextmanager
    def _asked(self, method: str, digest: Digest, content: FileBody | None = None) -> Iterator[Answer]:
        url = self._plane + push_path(self._push_id, digest)
        headers = {"Authorization": f"Bearer {self._pusher.bearer}"} if self._pusher.bearer else {}
        try:
            with self._pusher.pool.request(method, url, headers, content) as answer:
                yield answer
        except NETWORK_ERRORS as error:
            raise ServiceUnreachableError(self._plane, reason_of(error)) from error
