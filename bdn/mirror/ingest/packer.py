"""Copy a parcel of small files: read one after the other into one buffer, which becomes one object in the store.

A visit to the event loop, a sync and a rename for each of a million files would take hours. So a whole parcel is one visit to
a byte thread, and costs the store what one chunk costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bdn.core.chunk import ByteRange
from bdn.core.digest import Digest, digest_of
from bdn.core.errors import ChecksumMismatchError
from bdn.core.ports import ChunkStore
from bdn.core.source.upstream import Checksum
from bdn.core.store.layout import FileLayout, Slab
from bdn.core.store.slabs import SEAL_SIZE, seal_of
from bdn.mirror.ingest.whole_check import check_at_once
from bdn.mirror.upstream.reader import FileRange, LocatedFile, UpstreamReader

PackedFile = Callable[[LocatedFile, FileLayout, Slab], None]
WrongContent = Callable[[LocatedFile, Digest, ChecksumMismatchError], Awaitable[None]]


@dataclass(frozen=True)
class Packer:
    """Packs parcels into the store."""

    store: ChunkStore
    reader: UpstreamReader

    async def pack(self, parcel: Sequence[LocatedFile], on_packed: PackedFile, on_wrong: WrongContent) -> None:
        """Make every file of the parcel durable in the store.

        An interruption makes a smaller slab of what arrived, and another one of the rest: no file is read twice.

        Args:
            parcel: files of one scope that fit one chunk together, none of them empty.
            on_packed: told of each file once it is durable.
            on_wrong: told of a file that came with the wrong content, and under which name that is kept.

        Raises:
            UpstreamError, AuthRequiredError, StoreUnavailableError: what was told of stays stored.
        """
        loop = asyncio.get_running_loop()
        scope = parcel[0].file.identity.scope
        seal = seal_of(scope)
        left = list(parcel)
        digests: list[Digest] = []  # of the files in the buffer

        def accept(located: LocatedFile, content: memoryview, stated: Checksum | None) -> None:
            if stated is not None:
                check_at_once(stated, content, located.subject)
            digests.append(digest_of(content))

        def store_slab(buffer: memoryview, count: int, size: int) -> None:
            content = buffer[: size + len(seal)]
            content[size:] = seal
            slab = Slab(digest_of(content), len(content), scope)
            self.store.put(slab.digest, content)
            packed, offset = [], 0
            for located, digest in zip(left[:count], digests, strict=True):
                packed.append((located, FileLayout.packed(digest, located.file.size, slab, offset)))
                offset += located.file.size
            del left[:count]
            digests.clear()
            loop.call_soon_threadsafe(tell, packed, slab)

        def tell(packed: list[tuple[LocatedFile, FileLayout]], slab: Slab) -> None:
            for located, layout in packed:
                on_packed(located, layout, slab)

        async def keep_wrong(located: LocatedFile, content: bytes, error: ChecksumMismatchError) -> None:
            digest = digest_of(content)
            await asyncio.to_thread(self.store.put, digest, memoryview(content))
            await on_wrong(located, digest, error)

        wanted = [FileRange(file, ByteRange(0, file.file.size), partial(accept, file)) for file in parcel]
        await self.reader.read(wanted, on_batch=store_slab, spare=SEAL_SIZE, on_wrong=keep_wrong)
