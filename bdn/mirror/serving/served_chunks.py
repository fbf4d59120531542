"""Serves the store's chunks to the data plane and the API."""

import asyncio
import io
from concurrent.futures import Executor
from dataclasses import dataclass

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError
from bdn.core.manifest import Root
from bdn.core.store import ChunkStore
from bdn.mirror.access.access import Access
from bdn.mirror.chunks.damages import ChunkDamagedError, Damages
from bdn.mirror.db import manifests
from bdn.mirror.db.manifests import DocumentDamagedError
from bdn.mirror.db.waiting import answer_of
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.wire.access_schema import DEFAULT_ORGANISATION


@dataclass(frozen=True)
class StoreShelf:
    """A ``ServedChunks``, whose methods run in the data plane's threads; its database queries run on ``loop``.

    ``opened`` is for the API, and reads in ``threads``: a bucket that hangs occupies none of the loop's own threads.
    """

    store: ChunkStore
    access: Access
    damages: Damages
    loop: asyncio.AbstractEventLoop
    threads: Executor

    def authorize(self, request: ChunkRequest) -> str:
        """The organisation of the caller, which has a token or a grant for this chunk."""
        if self.access.token is None:
            return DEFAULT_ORGANISATION
        return answer_of(self.loop, self.access.check_chunk(request.bearer, request.digest))

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        """Open the chunk from the store alone.

        For a client that got wrong bytes (``is_suspect``) the store's bytes are verified first.
        """
        answer_of(self.loop, self._check(request))
        try:
            return self._from_store(request)
        except NotFoundError:
            answer_of(self.loop, self._check_damage(request.digest))
            raise

    async def opened(self, request: ChunkRequest) -> OpenChunk:
        """``open_chunk`` for callers on the loop.

        No thread waits here. Otherwise as many readers as the loop has threads would occupy all of them, waiting for
        examinations that wait for a thread.
        """
        await self._check(request)
        try:
            return await self.loop.run_in_executor(self.threads, self._from_store, request)
        except NotFoundError:
            await self._check_damage(request.digest)
            raise

    async def root(self, manifest: Digest, organisation: str) -> Root:
        """The root of a published manifest. Raises ``DocumentDamagedError``.

        A damaged root is registered, so that it is repaired.
        """
        try:
            return await self.loop.run_in_executor(self.threads, manifests.root_of, self.store, manifest, organisation)
        except DocumentDamagedError:
            await self.damages.examine(manifest, organisation)
            raise

    def _from_store(self, request: ChunkRequest) -> OpenChunk:
        file = self.store.open(request.digest, reader=request.organisation)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        return OpenChunk(file, 0, size)

    async def _check(self, request: ChunkRequest) -> None:
        """Raise ``ChunkDamagedError`` for a chunk that is wrong: its object stays in place until it is put again."""
        if request.is_suspect:
            reason = await self.damages.examine(request.digest, request.organisation)
        else:
            reason = await self.damages.reason_of(request.digest)
        if reason is not None:
            raise ChunkDamagedError(reason, str(request.digest))

    async def _check_damage(self, chunk: Digest) -> None:
        """Raise ``ChunkDamagedError`` for a chunk that is lost."""
        if (reason := (await self.damages.reasons([chunk])).get(chunk)) is not None:
            raise ChunkDamagedError(reason, str(chunk))
