"""The store's chunks on the data plane."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError
from bdn.core.layout import Slice
from bdn.core.ports import ChunkStore
from bdn.mirror.access import Access
from bdn.mirror.repository import layouts
from bdn.wire.chunk_shelf import ChunkRequest, OpenChunk

_ANSWER_SECONDS = 30


@dataclass(frozen=True)
class StoreShelf:
    """A ``ChunkShelf``. Its methods run in the data plane's threads; what they ask of the database runs on ``loop``."""

    store: ChunkStore
    access: Access
    loop: asyncio.AbstractEventLoop

    def authorize(self, request: ChunkRequest) -> None:
        """Refuse whoever has no token and no grant for this chunk."""
        if self.access.token is None:
            return
        check = self.access.check_chunk(request.bearer, request.digest)
        asyncio.run_coroutine_threadsafe(check, self.loop).result(_ANSWER_SECONDS)

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        """What is not here is nowhere: the mirror obtains nothing for a reader, whatever manifest he names."""
        return self.open(request.digest)

    def open(self, digest: Digest) -> OpenChunk:
        """The chunk as a file, or as the part of a slab that it is.

        So everything that a manifest or a layout names can be read by its name, on this plane and on the other, also by
        who knows nothing of slabs. The database is asked for what the store has no object of, and for nothing else.
        """
        try:
            file = self.store.open(digest)
        except NotFoundError:
            found = asyncio.run_coroutine_threadsafe(self._slice(digest), self.loop).result(_ANSWER_SECONDS)
            if found is None:
                raise
            place, size = found
            return OpenChunk(self.store.open(place.slab), place.offset, size)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        return OpenChunk(file, 0, size)

    async def _slice(self, content: Digest) -> tuple[Slice, int] | None:
        async with self.access.database.read() as session:
            return await layouts.a_slice(session, content.hex)
