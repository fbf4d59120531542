"""The data plane's view of the cache: every chunk of a whole file, served from its place in that file."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.cache_index import CacheIndex
from bdn.core.chunk import CHUNK_SIZE, chunk_range
from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.core.grant import Grant
from bdn.wire.chunk_server import OpenChunk
from node_agent.cache.records import Held
from node_agent.disk.durable import disk_errors
from node_agent.disk.places import Places


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a chunk lies in a file of several chunks."""

    file: Digest
    size: int  # of the file
    index: int


class NodeShelf:
    """A ``ChunkShelf`` over ``files``. Its methods run in the data plane's threads and ask nobody but the disk.

    A file of one chunk is found by its own name and costs no memory here; only larger files have entries.
    """

    def __init__(self, places: Places, index: CacheIndex, verify: Callable[[str], Grant] | None) -> None:
        """``verify`` checks a grant; None lets everybody read, which is right on loopback only."""
        self._places = places
        self._index = index
        self._verify = verify
        self._lock = threading.Lock()
        self._slices: defaultdict[Digest, Counter[Slice]] = defaultdict(Counter)  # how many manifests say so
        self._by_manifest: dict[Digest, list[tuple[Digest, Slice]]] = {}

    def add(self, held: Held) -> None:
        """Chunks of this manifest can be served. A malformed layout is left out: it can only make chunks unfindable."""
        digest = held.manifest.digest
        if held.layout is None or digest in self._by_manifest:
            return
        slices = [
            (Digest.parse(chunk), Slice(Digest.parse(file.digest), file.size, index))
            for file in held.layout.files
            if len(file.chunks) > 1
            for index, chunk in enumerate(file.chunks)
        ]
        with self._lock:
            self._by_manifest[digest] = slices
            for chunk, place in slices:
                self._slices[chunk][place] += 1

    def remove(self, manifest: Digest) -> None:
        """The manifest is gone; what another manifest names as well stays."""
        with self._lock:
            for chunk, place in self._by_manifest.pop(manifest, ()):
                self._slices[chunk] -= Counter((place,))
                if not self._slices[chunk]:
                    del self._slices[chunk]

    def authorize(self, bearer: str | None, digest: Digest) -> None:
        """The bearer's grant must allow a held manifest that names the chunk."""
        if self._verify is None:
            return
        if bearer is None:
            raise UnauthenticatedError
        grant = self._verify(bearer)
        files = {digest, *(place.file for place in self._places_of(digest))}
        # The index belongs to the event loop. Copying one of its sets is one step under the interpreter's lock.
        if not any(grant.allows(manifest) for file in files for manifest in self._index.named_by(file)):
            raise NotFoundError(f"chunk {digest}")

    def open_chunk(self, digest: Digest) -> OpenChunk:
        """The chunk inside the first file that has it; ``NotFoundError`` when none is whole on this disk."""
        for place in (Slice(digest, 0, 0), *self._places_of(digest)):
            path = self._places.file(place.file)
            with disk_errors(path):
                try:
                    file = path.open("rb", buffering=0)
                except FileNotFoundError:
                    continue
            if place.size:
                part = chunk_range(place.size, place.index)
                return OpenChunk(file, part.start, part.size)
            size = file.seek(0, 2)
            if size <= CHUNK_SIZE:
                return OpenChunk(file, 0, size)
            file.close()  # the name of a larger file, which is not the name of a chunk
        raise NotFoundError(f"chunk {digest}")

    def _places_of(self, digest: Digest) -> tuple[Slice, ...]:
        with self._lock:
            return tuple(self._slices.get(digest, ()))
