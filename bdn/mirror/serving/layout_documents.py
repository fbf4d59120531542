"""Layouts as documents: made once for all who ask at the same time, and compressed as they are made."""

import asyncio
import zlib
from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from blake3 import blake3

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError
from bdn.core.store import split_digests
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.db import contents
from bdn.mirror.db.database import Database
from bdn.mirror.db.waiting import SharedReads
from bdn.wire.layout_form import LAYOUT_END, layout_head, write_file, write_files
from bdn.wire.location_schema import Delivery

_LARGE: Final = (
    10_000  # files; of these one document is made at a time: one of a million takes seconds, and over 100 MB
)
_GZIP: Final = 16 + zlib.MAX_WBITS
_PIECE: Final = 1024 * 1024


@dataclass(frozen=True)
class LayoutDocument:
    """The JSON of a ``LayoutBody``, compressed by gzip. ``digest`` and ``size`` are those of the JSON."""

    digest: Digest
    size: int
    gzip: bytes

    @classmethod
    async def of(
        cls,
        manifest: Digest,
        data_port: int | None,
        pages: AsyncIterable[Sequence[contents.ContentLayout]],
        delivery: Delivery = "proxy",
    ) -> "LayoutDocument":
        """Made page by page: a million files are 300 MB of JSON, and a gigabyte before they are. ``NotFoundError``: there is no file."""
        hasher, compressor, size = blake3(), zlib.compressobj(level=1, wbits=_GZIP), 0
        packed: list[bytes] = []

        def add(pieces: Iterable[bytes]) -> None:
            nonlocal size
            for piece in pieces:
                size += len(piece)
                hasher.update(piece)
                packed.append(compressor.compress(piece))

        add([layout_head(manifest, data_port, delivery)])
        is_first = True
        async for page in pages:
            await asyncio.to_thread(add, write_files(map(_file, page), is_first=is_first))
            is_first = is_first and not page
        if is_first:
            raise NotFoundError(f"manifest {manifest}")
        add([LAYOUT_END])
        return cls(Digest(hasher.hexdigest()), size, b"".join((*packed, compressor.flush())))

    def unpacked(self) -> Iterator[bytes]:
        """The JSON, for who does not read gzip."""
        reader = zlib.decompressobj(wbits=_GZIP)
        left = self.gzip
        while not reader.eof:
            yield reader.decompress(left, _PIECE)
            left = reader.unconsumed_tail


def _file(one: contents.ContentLayout) -> str:
    if one.slab is None:
        return write_file(one.digest, one.size, [chunk.hex() for chunk in split_digests(one.chunks)])
    return write_file(one.digest, one.size, [one.digest], (one.slab, one.slab_size, one.offset))


@dataclass(frozen=True)
class LayoutDocuments:
    """Makes them. Nothing is kept: slabs come, go and are damaged, and a layout names those that are sound now."""

    database: Database
    damages: Damages
    data_port: int | None
    delivery: Delivery
    _reads: SharedReads[tuple[Digest, str], LayoutDocument] = field(default_factory=partial(SharedReads, 0.0))
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def of(self, manifest: Digest, owner: str) -> LayoutDocument:
        """Where the bytes lie for this organisation; those who ask while one is made share the next one.

        Raises:
            NotFoundError: there is no such manifest.
            RecordDamagedError: the database has it wrong.
        """

        async def make() -> LayoutDocument:
            async with self.database.read() as session:
                row = await contents.files_total(session, manifest.hex)
            async with self._turn if (row or 0) > _LARGE else nullcontext():
                return await self._made(manifest, owner)

        return await self._reads.of((manifest, owner), make).get()

    async def _made(self, manifest: Digest, owner: str) -> LayoutDocument:
        async with self.database.read() as session:
            with self.damages.records_noted():
                pages = contents.layouts(session, manifest.hex, owner)
                return await LayoutDocument.of(manifest, self.data_port, pages, self.delivery)
