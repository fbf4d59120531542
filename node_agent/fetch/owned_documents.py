"""What an owner knows of manifests: documents that it obtains for its cluster, and which chunks belong to them."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import IO, Final, Self

from bdn.core.chunk import Digest
from bdn.disk.durable import disk_errors
from bdn.net.chunk_server.served_chunks import DocumentRequest, OpenChunk
from bdn.net.client import ContentClient
from bdn.wire.http_fields import DocumentKind
from bdn.wire.layout_form import Layout
from bdn.wire.location_schema import Delivery
from node_agent.background_tasks import in_thread
from node_agent.fetch.documents import Catalogue
from node_agent.fetch.reads_in_progress import ReadsInProgress, landed

_MOST_BYTES: Final = 512 * 1024**2  # a manifest of a million files has up to 200 MB, its layout packed 50 MB
_MOST: Final = 256  # documents: each is an open file
_LAYOUT_SECONDS: Final = 600.0  # an older layout may name slabs that the mirror has no more, or its former data port
_Key = tuple[DocumentKind, Digest, str]
_REMEMBERED: Final = 16  # manifests; one of 140 GB has 17,000 chunks, which take 4 MB
_ListKey = tuple[Digest, str]  # a manifest, and the organisation whose list of it this is: each has slabs of its own


@dataclass(frozen=True, slots=True)
class _Kept:
    file: IO[bytes]
    size: int
    is_packed: bool
    came: float


class KeptDocuments:
    """The documents used last, 256 of ``most_bytes`` together, and the newest whatever its size. Safe for any thread; blocking.

    They lie in files without names: nobody finds them after this process.
    """

    def __init__(
        self, folder: Path, most_bytes: int = _MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._clock = clock
        self._kept: dict[_Key, _Kept] = {}  # the one used last stands last
        self._lock = threading.Lock()

    def keep(self, key: _Key, content: bytes | bytearray, *, is_packed: bool) -> None:
        """Hold a document, in place of an older one. Raises ``DiskFailedError``."""
        with disk_errors(self._folder):
            file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - closed when it is dropped
            left = memoryview(content)
            try:
                while left:
                    left = left[file.write(left) :]
            except BaseException:
                file.close()
                raise
        with self._lock:
            self._drop(key)
            self._kept[key] = _Kept(file, len(content), is_packed, self._clock())
            size = sum(one.size for one in self._kept.values())
            while len(self._kept) > 1 and (size > self._most_bytes or len(self._kept) > _MOST):
                size -= self._drop(next(iter(self._kept)))

    def open(self, key: _Key, longest_seconds: float = inf) -> OpenChunk | None:
        """The document, if it came no longer ago."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                return None
            self._kept[key] = found
            if self._clock() - found.came > longest_seconds:
                return None
            return OpenChunk(os.fdopen(os.dup(found.file.fileno()), "rb"), 0, found.size, found.is_packed)

    def close(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            for key in tuple(self._kept):
                self._drop(key)

    def _drop(self, key: _Key) -> int:
        gone = self._kept.pop(key, None)
        if gone is None:
            return 0
        gone.file.close()
        return gone.size


@dataclass(frozen=True)
class OwnedDocuments:
    """Obtains them from the mirror, and never from a peer, so that no request goes in circles.

    ``seconds`` is what the mirror has for an answer; ``on_obtained`` is told the tier of each.
    """

    client: ContentClient
    kept: KeptDocuments
    seconds: float
    on_obtained: Callable[[str], None]
    _reads: ReadsInProgress = field(default_factory=ReadsInProgress)

    def open(self, request: DocumentRequest, organisation: str) -> OpenChunk | None:
        """The document, if it is kept; for its owner's readers no layout that is too old. May be called from any thread."""
        is_ageing = request.is_owner and request.kind == "layout"
        return self.kept.open(_key(request, organisation), _LAYOUT_SECONDS if is_ageing else inf)

    async def obtain(self, request: DocumentRequest, organisation: str) -> None:
        """It is kept when this returns; one request for all who ask at the same time. Raises the mirror's ``BdnError``."""
        key = _key(request, organisation)
        while (found := self.open(request, organisation)) is None:
            if (flight := self._reads.flight(key)) is not None:
                await landed(flight)
                continue
            with self._reads.lead(key):  # nobody else does: the loop has not turned since we looked
                await self.client.within(self.seconds, self._read(key, request.bearer))
                self.on_obtained("mirror")
        found.file.close()

    async def _read(self, key: _Key, bearer: str | None) -> None:
        kind, manifest, _ = key
        is_packed = kind == "layout"
        read = self.client.packed_layout if is_packed else self.client.canonical
        await in_thread(self.kept.keep, key, await read(manifest, bearer), is_packed=is_packed)


def _key(request: DocumentRequest, organisation: str) -> _Key:
    """A manifest is the same for all; of a layout each organisation has its own, because it has slabs of its own."""
    return request.kind, request.manifest, organisation if request.kind == "layout" else ""


@dataclass(frozen=True)
class ChunkList:
    """The sizes of everything that travels for a manifest: chunks of files, and slabs rather than the files in them."""

    sizes: Mapping[Digest, int]
    data_port: int | None  # of the mirror's data plane; None where it serves chunks itself
    delivery: Delivery

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """From where the manifest's bytes lie. Takes a while for a million files."""
        sizes: dict[Digest, int] = {}
        for file in layout.files.values():
            if file.slice is not None:
                sizes[file.slice.slab] = file.slice.slab_size
            else:
                sizes.update((chunk.digest, chunk.range.size) for chunk in file.placed())
        return cls(sizes, layout.data_port, layout.delivery)


@dataclass(frozen=True)
class ChunkLists:
    """The lists of the manifests that were asked about last. ``known`` may be called from any thread.

    A layout is obtained with a peer's grant, which proves that the peer may read the manifest and that it exists. It comes from
    its own owner in the ring, and is checked against the manifest.
    """

    catalogue: Catalogue
    _known: dict[_ListKey, ChunkList] = field(default_factory=dict)  # the one used last stands last
    _asking: ReadsInProgress = field(default_factory=ReadsInProgress)

    def known(self, manifest: Digest, organisation: str) -> ChunkList | None:
        """The list, if it was obtained and is remembered."""
        return self._known.get((manifest, organisation))

    async def obtain(self, manifest: Digest, organisation: str, bearer: str) -> ChunkList:
        """The list; one request for all who ask at the same time. Raises ``BdnError``: why it cannot be had."""
        key = manifest, organisation
        while (known := self._known.get(key)) is None:
            if (flight := self._asking.flight(key)) is not None:
                await landed(flight)
                continue
            with self._asking.lead(key):  # nobody else does: the loop has not turned since we looked
                held = await self.catalogue.obtain(manifest, bearer, is_complete=False)
                assert held.layout is not None  # noqa: S101 - asked for
                self._remember(key, await in_thread(ChunkList.of, held.layout))
        self._remember(key, known)
        return known

    def _remember(self, key: _ListKey, known: ChunkList) -> None:
        self._known.pop(key, None)
        self._known[key] = known
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
