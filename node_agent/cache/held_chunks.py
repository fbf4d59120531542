"""Finds the chunks that this node holds in whole files, parts and the cluster tier, for fills and for peers."""

import os
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bdn.core.cache.digest_table import DigestTable
from bdn.core.cache.index import CacheIndex
from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, chunk_range, digest_of
from bdn.core.manifest import Root
from bdn.disk.durable import open_existing
from bdn.net.chunk_server.served_chunks import OpenChunk
from bdn.wire.operation_schema import Tier
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.cache.records import Held
from node_agent.disk.whole_files import WholeFiles

_AT_ONCE: Final = 1_000  # chunks added or removed per lock hold: lookups wait that long


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    file: Digest
    size: int  # of the file
    index: int


@dataclass(slots=True)
class _LargeFile:
    """A file of several chunks. ``names`` are the chunks' digests, 32 bytes each."""

    digest: Digest
    size: int
    names: bytes
    manifests: int = 1  # number of manifests that contain it


class HeldChunks:
    """Chunks of the cluster tier, of parts being filled, of whole ``files`` and of manifests' documents. Thread-safe.

    A file of one chunk is found by its own name and needs no memory here; larger files need about 75 bytes per chunk.
    """

    def __init__(
        self, files: WholeFiles, index: CacheIndex, tier: ClusterTier, suspect: Callable[[Digest], object]
    ) -> None:
        """``suspect`` is called for whole files whose bytes do not match their digest."""
        self.tier = tier
        self._whole = files
        self._places = files.places
        self._index = index
        self._suspect = suspect
        self._lock = threading.Lock()
        self._roots: dict[Digest, Root] = {}
        self._by_manifest: dict[Digest, list[int]] = {}  # numbers of the manifest's files of several chunks
        self._documents: dict[Digest, frozenset[Digest]] = {}  # root or page -> manifests that contain it
        self._files: dict[int, _LargeFile] = {}
        self._numbers: dict[Digest, int] = {}  # file -> its number; numbers are not reused
        self._last = 0
        self._chunks = DigestTable(width=8)  # chunk -> place: file number in the high 32 bits, chunk index in the low
        self._also: dict[Digest, array[int]] = {}  # further places of the same chunk
        self._arrived: dict[Digest, set[int]] = {}  # file being filled -> indices of its durable chunks
        self._withheld: set[Digest] = set()  # whole files under repair

    # --- what is where ---

    def add(self, held: Held) -> None:
        """Let chunks and documents of this manifest be served."""
        digest = held.root.digest
        if digest in self._by_manifest:
            return
        with self._lock:
            for document in _documents_of(held.root):
                self._documents[document] = self._documents.get(document, frozenset()) | {digest}
        self._roots[digest] = held.root
        self._by_manifest[digest] = [self._add(file) for file in held.layout.large()]

    def _add(self, file: FileLayout) -> int:
        with self._lock:
            number = self._numbers.get(file.digest)
            if number is not None:
                self._files[number].manifests += 1
                return number
            self._last += 1
            number = self._numbers[file.digest] = self._last
            names = b"".join(chunk.to_bytes() for chunk in file.chunks)
            self._files[number] = _LargeFile(file.digest, file.size, names)
        for start in range(0, len(file.chunks), _AT_ONCE):
            with self._lock:
                for index, chunk in enumerate(file.chunks[start : start + _AT_ONCE], start):
                    place = number << 32 | index
                    if self._chunks.setdefault(chunk, place) != place:
                        self._also.setdefault(chunk, array("Q")).append(place)
        return number

    def remove(self, manifest: Digest) -> None:
        """Remove a manifest. Chunks that another manifest names as well stay."""
        if (root := self._roots.pop(manifest, None)) is not None:
            with self._lock:
                for document in _documents_of(root):
                    left = self._documents.pop(document, frozenset()) - {manifest}
                    if left:
                        self._documents[document] = left
        for number in self._by_manifest.pop(manifest, ()):
            with self._lock:
                file = self._files[number]
                file.manifests -= 1
                if file.manifests:
                    continue
                del self._numbers[file.digest]
            self._remove(number, file)
            with self._lock:
                del self._files[number]

    def _remove(self, number: int, file: _LargeFile) -> None:
        names = list(dict.fromkeys(file.names[at : at + 32] for at in range(0, len(file.names), 32)))
        for start in range(0, len(names), _AT_ONCE):
            with self._lock:
                for chunk in map(Digest.from_bytes, names[start : start + _AT_ONCE]):
                    left = [place for place in self._all_places(chunk) if place >> 32 != number]
                    self._also.pop(chunk, None)
                    if not left:
                        del self._chunks[chunk]
                        continue
                    self._chunks[chunk] = left[0]
                    if len(left) > 1:
                        self._also[chunk] = array("Q", left[1:])

    def arrived(self, file: Digest, index: int) -> None:
        """Register a verified chunk of a file's part: it can be served before the file is whole."""
        with self._lock:
            self._arrived.setdefault(file, set()).add(index)

    def departed(self, file: Digest) -> None:
        """End of a fill, successful or not. A new part holds nothing until ``arrived`` is called again."""
        with self._lock:
            self._arrived.pop(file, None)

    @contextmanager
    def withheld(self, file: Digest) -> Iterator[None]:
        """Serve nothing out of this whole file until the block ends."""
        with self._lock:
            self._withheld.add(file)
        try:
            yield
        finally:
            with self._lock:
                self._withheld.discard(file)

    # --- reading ---

    def open(self, digest: Digest) -> OpenChunk | None:
        found = self._open(digest)
        return found[0] if found is not None else None

    def holds(self, digest: Digest) -> bool:
        chunk = self.open(digest)
        if chunk is not None:
            chunk.file.close()
        return chunk is not None

    def read_held(self, digest: Digest, buffer: memoryview) -> Tier | None:
        """Fill ``buffer`` with the chunk.

        The bytes are verified, because disks corrupt them. A wrong chunk of the cluster tier is dropped. A wrong file
        is suspected, so the scrub reads it soon, and the caller fetches the chunk again.

        Returns:
            The tier of the chunk. None if the chunk is not here, not readable or wrong.
        """
        found = self._open(digest)
        if found is None:
            return None
        chunk, tier, file = found
        with chunk.file:
            try:
                chunk.file.seek(chunk.offset)
                count = chunk.file.readinto(buffer) if chunk.size == len(buffer) else 0  # type: ignore[attr-defined]
            except OSError:
                count = 0
        if count == len(buffer) and digest_of(buffer) == digest:
            return tier
        if tier == "cluster":
            self.tier.lose(digest)
        elif file is not None:
            self._suspect(file)
        return None

    def has_whole(self, digest: Digest) -> bool:
        """Whether a whole file of this node contains the chunk, or the chunk is a document of a held manifest."""
        ledger = self._index.ledger
        if digest in self._documents or ledger.is_committed(digest):
            return True
        return any(ledger.is_committed(one.file) for one in self._places_of(digest))

    def is_right(self, digest: Digest) -> bool:
        """Verify the chunk; drop or suspect it if it is wrong. True if it is right or absent."""
        chunk = self.open(digest)
        if chunk is None:
            return True
        chunk.file.close()
        return self.read_held(digest, memoryview(bytearray(chunk.size))) is not None

    def named_by(self, digest: Digest) -> frozenset[Digest]:
        # The index belongs to the event loop. Copying one of its sets is atomic under the GIL.
        files = {digest, *(place.file for place in self._places_of(digest))}
        names = self._documents.get(digest, frozenset()).union(*map(self._index.named_by, files))
        brought_for = self.tier.manifest_of(digest)
        return names if brought_for is None else names | {brought_for}

    # --- inside ---

    def _open(self, digest: Digest) -> tuple[OpenChunk, Tier, Digest | None] | None:
        """The chunk, its tier, and the whole file that contains it, if any."""
        file = self.tier.open(digest)
        if file is not None:
            return OpenChunk(file, 0, file.seek(0, os.SEEK_END)), "cluster", None
        places = self._places_of(digest)
        # Parts before files. The other order: B finds no whole file; A renames the part to the whole file; B finds no
        # part.
        for place in places:
            if place.index in self._arrived.get(place.file, ()):
                chunk = _open_slice(self._places.part(place.file), place)
                if chunk is not None:
                    return chunk, "node", None
        for place in (ChunkPlace(digest, 0, 0), *places):
            if place.file in self._withheld:
                continue
            chunk = _open_slice(self._places.file(place.file), place)
            if chunk is None:
                continue
            look = partial(os.fstat, chunk.file.fileno())
            if self._whole.is_as_left(place.file, look(), look):
                return chunk, "node", place.file
            chunk.file.close()
            self._suspect(place.file)
        for manifest in self._documents.get(digest, ()):
            if (document := open_existing(self._places.document(manifest, digest))) is not None:
                return OpenChunk(document, 0, document.seek(0, os.SEEK_END)), "node", None
        return None

    def _places_of(self, digest: Digest) -> list[ChunkPlace]:
        with self._lock:
            found = [(self._files[place >> 32], place & 0xFFFFFFFF) for place in self._all_places(digest)]
        return [ChunkPlace(file.digest, file.size, index) for file, index in found]

    def _all_places(self, digest: Digest) -> list[int]:
        """Call with the lock held."""
        place = self._chunks.get(digest)
        return [] if place is None else [place, *self._also.get(digest, ())]


def _documents_of(root: Root) -> Iterator[Digest]:
    yield root.digest
    yield from (page.digest for page in root.pages)


def _open_slice(path: Path, place: ChunkPlace) -> OpenChunk | None:
    file = open_existing(path)
    if file is None:
        return None
    if place.size:
        part = chunk_range(place.size, place.index)
        return OpenChunk(file, part.start, part.size)
    size = file.seek(0, os.SEEK_END)
    if size <= CHUNK_SIZE:
        return OpenChunk(file, 0, size)
    file.close()  # the digest names a larger file, not a chunk
    return None
