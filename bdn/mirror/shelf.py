"""The store's chunks on the data plane."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError
from bdn.core.ports import ChunkStore
from bdn.core.store.layout import Slice
from bdn.mirror.access import Access
from bdn.mirror.repository import layouts
from bdn.mirror.verifying.damages import ChunkDamagedError, Damages
from bdn.wire.chunk_server.shelf import ChunkRequest, OpenChunk

_ANSWER_SECONDS = 30
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class StoreShelf:
    """A ``ChunkShelf``. Its methods run in the data plane's threads; what they ask of the database runs on ``loop``."""

    store: ChunkStore
    access: Access
    damages: Damages
    loop: asyncio.AbstractEventLoop

    def authorize(self, request: ChunkRequest) -> None:
        """Refuse whoever has no token and no grant for this chunk."""
        if self.access.token is None:
            return
        self._wait_for(self.access.check_chunk(request.bearer, request.digest))

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        """What is not here is nowhere: the mirror obtains nothing for a reader, whatever manifest he names.

        Who got wrong bytes once says so, and gets none before they have been read here and found right.
        """
        if request.is_suspect:
            self._wait_for(self.damages.examine(request.digest))
        return self.open(request.digest)

    def open(self, digest: Digest) -> OpenChunk:
        """The chunk as a file, or as the part of a slab that it is.

        So everything that a manifest or a layout names can be read by its name, on this plane and on the other, also by
        who knows nothing of slabs. The database is asked for what the store has no object of, and for nothing else.
        """
        try:
            file = self.store.open(digest)
        except NotFoundError:
            place, size = self._wait_for(self._slice(digest))
            return OpenChunk(self.store.open(place.slab), place.offset, size)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        return OpenChunk(file, 0, size)

    async def _slice(self, content: Digest) -> tuple[Slice, int]:
        async with self.access.database.read() as session:
            found = await layouts.a_slice(session, content.hex)
        reason = await self.damages.reason(found[0].slab if found else content)
        if reason is not None:
            raise ChunkDamagedError(reason, str(content))
        if found is None:
            raise NotFoundError(f"chunk {content}")
        return found

    def _wait_for(self, answer: Coroutine[Any, Any, _Answer]) -> _Answer:
        return asyncio.run_coroutine_threadsafe(answer, self.loop).result(_ANSWER_SECONDS)
