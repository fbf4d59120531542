"""Layouts as documents: made once for all who ask at the same time, and compressed as they are made."""

import asyncio
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from blake3 import blake3

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError
from bdn.core.store import split_digests
from bdn.mirror.damages import Damages
from bdn.mirror.db import contents
from bdn.mirror.db.database import Database
from bdn.mirror.waiting import SharedReads
from bdn.wire.layout_form import write_file, write_layout

_LARGE: Final = 10_000  # files; of these one document is made at a time: one of a million takes seconds, and a gigabyte
_GZIP: Final = 16 + zlib.MAX_WBITS
_PIECE: Final = 1024 * 1024


@dataclass(frozen=True)
class LayoutDocument:
    """The JSON of a ``LayoutBody``, compressed by gzip. ``digest`` and ``size`` are those of the JSON."""

    digest: Digest
    size: int
    gzip: bytes

    @classmethod
    def of(cls, manifest: Digest, data_port: int | None, files: Iterable[contents.ContentLayout]) -> "LayoutDocument":
        """Made piece by piece: a million files are 300 MB of JSON."""
        hasher, compressor, size = blake3(), zlib.compressobj(level=1, wbits=_GZIP), 0
        packed: list[bytes] = []
        for piece in write_layout(manifest, data_port, map(_file, files)):
            size += len(piece)
            hasher.update(piece)
            packed.append(compressor.compress(piece))
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
                found = await self._layouts(manifest, owner)
                return await asyncio.to_thread(LayoutDocument.of, manifest, self.data_port, found)

        return await self._reads.of((manifest, owner), make).get()

    async def _layouts(self, manifest: Digest, owner: str) -> Sequence[contents.ContentLayout]:
        async with self.database.read() as session:
            with self.damages.records_noted():
                found = await contents.layouts(session, manifest.hex, owner)
        if not found:
            raise NotFoundError(f"manifest {manifest}")
        return found
