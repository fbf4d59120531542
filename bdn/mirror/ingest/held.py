"""What is there already, for a copy that is about to count on it: kept in the store from now on, or else not there.

A looks at the rows, finds a file complete, and counts on its chunks; a collection, which saw that nobody names the file,
forgets it and deletes the chunks; A records the file again, and publishes what is not there. So whoever counts on a chunk
that it did not put itself keeps it first, and looks at rows before, never after: see ``CollectableStore.collect``.

What is known by identity alone, in a survey, needs no such care: publishing looks whether it is still recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.ports import ChunkStore
from bdn.core.source.upstream import Identity
from bdn.core.store.layout import FileLayout
from bdn.mirror.db import contents
from bdn.mirror.db.database import Database


@dataclass(frozen=True)
class Held:
    """Looks, and keeps."""

    database: Database
    store: ChunkStore
    clock: Callable[[], float] = time.time

    async def layout(self, identity: Identity) -> FileLayout | None:
        """The complete content that an identity maps to."""
        async with self.database.read() as session:
            found = await contents.layout_by_identity(session, identity)
        return found if found is not None and await self.keep(found) else None

    async def parts(self, identity_key: str) -> dict[int, Digest]:
        """The chunks of a half-copied file that is about to be gone on with."""
        async with self.database.read() as session:
            recorded = await contents.copied_chunks(session, identity_key)
        if recorded:
            async with self.database.write() as session:
                await contents.renew_chunks(session, identity_key, self.clock())
        return await asyncio.to_thread(
            lambda: {index: digest for index, digest in recorded.items() if self.store.keep(digest)}
        )

    async def keep(self, layout: FileLayout) -> bool:
        """Whether every object in which the content lies is kept now."""
        objects = layout.chunks if layout.slice is None else (layout.slice.slab,)
        return await asyncio.to_thread(lambda: all(self.store.keep(digest) for digest in objects))
