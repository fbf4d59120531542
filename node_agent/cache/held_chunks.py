"""The chunks, manifests and layouts that this node holds: for peers over the data plane, and for its own fills."""

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bdn.core.cache.index import CacheIndex
from bdn.core.chunk import CHUNK_SIZE, Digest, chunk_range, digest_of
from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.core.store import SEAL_SIZE, is_closed_to
from bdn.disk.durable import disk_errors
from bdn.net.chunk_server.served_chunks import ChunkRequest, DocumentRequest, OpenChunk
from bdn.wire.grants import Grant
from bdn.wire.operation_schema import Tier
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.cache.records import Held
from node_agent.disk.places import Places


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a chunk lies in a file of several chunks."""

    file: Digest
    size: int  # of the file
    index: int


class HeldChunks:
    """A ``ServedChunks`` over the cluster tier, the parts that are being filled, and ``files``. Safe for any thread.

    A file of one chunk is found by its own name and costs no memory here; only larger files have entries.
    """

    def __init__(
        self,
        places: Places,
        index: CacheIndex,
        tier: ClusterTier,
        verify: Callable[[str], Grant] | None,
        suspect: Callable[[Digest], object] = lambda _: None,
    ) -> None:
        """``verify`` checks a grant; None lets everybody read, which is right on loopback only.

        ``suspect`` is told of whole files that are not what their name says.
        """
        self._places = places
        self._index = index
        self._tier = tier
        self._verify = verify
        self._suspect = suspect
        self._lock = threading.Lock()
        self._slices: defaultdict[Digest, Counter[ChunkPlace]] = defaultdict(Counter)  # how many manifests say so
        self._by_manifest: dict[Digest, list[tuple[Digest, ChunkPlace]]] = {}
        self._arrived: dict[Digest, set[int]] = {}  # of files that are being filled: which chunks are there
        self._withheld: set[Digest] = set()  # whole files that are being repaired

    # --- what is where ---

    def add(self, held: Held) -> None:
        """Chunks of this manifest can be served. Without its layout, those of larger files cannot."""
        digest = held.manifest.digest
        if held.layout is None or digest in self._by_manifest:
            return
        slices = [
            (chunk, ChunkPlace(file.digest, file.size, index))
            for file in held.layout.files.values()
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

    def arrived(self, file: Digest, index: int) -> None:
        """A verified chunk lies at its place in a file's part: it can be served before the file is whole."""
        with self._lock:
            self._arrived.setdefault(file, set()).add(index)

    def departed(self, file: Digest) -> None:
        """A fill of the file has ended, well or not. A part that is begun anew holds nothing until it is said again."""
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

    # --- for peers ---

    def authorize(self, request: ChunkRequest) -> None:
        """The bearer's grant must allow the manifest of the request or, without one, a held manifest that names the chunk."""
        if self._verify is None:
            return
        if request.bearer is None:
            raise UnauthenticatedError
        grant = self._verify(request.bearer)
        manifests = self.names(request.digest) if request.manifest is None else (request.manifest,)
        if not any(grant.allows(manifest) for manifest in manifests):
            raise NotFoundError(f"chunk {request.digest}")

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        """The chunk, wherever it lies; ``NotFoundError`` when it is not here, or is not the manifest's.

        Who got wrong bytes once says so, and gets none before they have been read here and found right.
        """
        if request.manifest is not None and request.manifest not in self.names(request.digest):
            raise NotFoundError(f"chunk {request.digest}")
        if request.is_suspect and not self.is_right(request.digest):
            raise NotFoundError(f"chunk {request.digest}")
        return self.open_for(request)

    def is_right(self, digest: Digest) -> bool:
        """Whether the chunk is what its name says; what is not is dropped or suspected. ``NotFoundError`` when it is not here."""
        chunk = self.open(digest)
        chunk.file.close()
        return self.read_held(digest, memoryview(bytearray(chunk.size))) is not None

    def names(self, digest: Digest) -> frozenset[Digest]:
        """The held manifests that name this chunk."""
        # The index belongs to the event loop. Copying one of its sets is one step under the interpreter's lock.
        files = {digest, *(place.file for place in self._places_of(digest))}
        return self._tier.index.named_by(digest).union(*map(self._index.named_by, files))

    def open_for(self, request: ChunkRequest) -> OpenChunk:
        """The chunk, to whoever may read its manifest; ``NotFoundError`` when it is not here, or is somebody else's slab.

        Two organisations may have the very same tree, and each has packed it with other files of its own.
        """
        return self._given_to(request, self.open(request.digest))

    def holds_for(self, request: ChunkRequest) -> bool:
        """Whether ``open_for`` opens the chunk now. ``NotFoundError`` when it is here, and never will."""
        found = self._open_held(request.digest)
        if found is not None:
            self._given_to(request, found[0]).file.close()
        return found is not None

    def reader_of(self, bearer: str | None) -> str:
        """The organisation whose grant this is; where grants are not checked, nobody's."""
        return self._verify(bearer).organisation if self._verify is not None and bearer is not None else ""

    def open(self, digest: Digest) -> OpenChunk:
        """The chunk, whoever asks; ``NotFoundError`` when it is not here."""
        found = self._open_held(digest)
        if found is None:
            raise NotFoundError(f"chunk {digest}")
        return found[0]

    def holds(self, digest: Digest) -> bool:
        """Whether the chunk can be opened now."""
        found = self._open_held(digest)
        if found is not None:
            found[0].file.close()
        return found is not None

    # --- for fills ---

    def read_held(self, digest: Digest, buffer: memoryview) -> Tier | None:
        """Fill ``buffer`` with the chunk and say from which tier it came; None when it is not here, or is not readable.

        The bytes are verified, because disks rot. A chunk of the cluster tier that is not what its name says is dropped; a
        file is suspected, so that the scrub looks at it soon, and the chunk is fetched again.
        """
        found = self._open_held(digest)
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
            self._tier.lose(digest)
        elif file is not None:
            self._suspect(file)
        return None

    def has_whole(self, digest: Digest) -> bool:
        """Whether some whole file of this node has the chunk."""
        ledger = self._index.ledger
        return ledger.is_committed(digest) or any(ledger.is_committed(one.file) for one in self._places_of(digest))

    # --- inside ---

    def _given_to(self, request: ChunkRequest, chunk: OpenChunk) -> OpenChunk:
        if self._verify is not None and is_closed_to(self.reader_of(request.bearer), _tail_of(chunk)):
            chunk.file.close()
            raise NotFoundError(f"chunk {request.digest}")
        return chunk

    def _open_held(self, digest: Digest) -> tuple[OpenChunk, Tier, Digest | None] | None:
        """The chunk, its tier, and the whole file that it lies in, if any."""
        file = self._tier.open(digest)
        if file is not None:
            return OpenChunk(file, 0, file.seek(0, 2)), "cluster", None
        places = self._places_of(digest)
        # Parts before files: B looks for a whole file and misses; A lets it appear; B looks for the part, which is gone.
        for place in places:
            if place.index in self._arrived.get(place.file, ()):
                chunk = self._open_slice(self._places.part(place.file), place)
                if chunk is not None:
                    return chunk, "node", None
        for place in (ChunkPlace(digest, 0, 0), *places):
            if place.file in self._withheld:
                continue
            chunk = self._open_slice(self._places.file(place.file), place)
            if chunk is not None:
                return chunk, "node", place.file
        return None

    @staticmethod
    def _open_slice(path: Path, place: ChunkPlace) -> OpenChunk | None:
        with disk_errors(path):
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError:
                return None
        if place.size:
            part = chunk_range(place.size, place.index)
            return OpenChunk(file, part.start, part.size)
        size = file.seek(0, 2)
        if size <= CHUNK_SIZE:
            return OpenChunk(file, 0, size)
        file.close()  # the name of a larger file, which is not the name of a chunk
        return None

    def _places_of(self, digest: Digest) -> tuple[ChunkPlace, ...]:
        with self._lock:
            return tuple(self._slices.get(digest, ()))


def _tail_of(chunk: OpenChunk) -> bytes:
    size = min(SEAL_SIZE, chunk.size)
    with disk_errors(Path(str(chunk.file.name))):
        return os.pread(chunk.file.fileno(), size, chunk.offset + chunk.size - size)


@dataclass(frozen=True)
class HeldDocuments:
    """A ``ServedDocuments`` over the folder ``manifests``. ``verify`` checks a grant; None lets everybody read (loopback only).

    They go out as they lie on the disk: whoever asks checks them, as it would the mirror's.
    """

    places: Places
    verify: Callable[[str], Grant] | None

    def open_document(self, request: DocumentRequest) -> OpenChunk:
        """The document, if the bearer's grant names the manifest; not yours and not there look alike."""
        if self.verify is not None:
            if request.bearer is None:
                raise UnauthenticatedError
            if not self.verify(request.bearer).allows(request.manifest):
                raise NotFoundError(f"manifest {request.manifest}")
        place = self.places.manifest if request.kind == "manifest" else self.places.layout
        path = place(request.manifest)
        with disk_errors(path):
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError:
                raise NotFoundError(f"manifest {request.manifest}") from None
            return OpenChunk(file, 0, file.seek(0, 2))
