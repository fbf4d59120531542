"""The chunks, manifests and layouts that this node holds: for peers over the data plane, and for its own fills."""

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

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

    A file of one chunk is found by its own name and costs no memory here; only larger files have entries. It is a
    ``ServedDocuments`` over the folder ``manifests`` as well.
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
        self.tier = tier
        self._places = places
        self._index = index
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
        grant = self._grant(request.bearer)
        if grant is None:
            return
        manifests = self._names(request.digest) if request.manifest is None else (request.manifest,)
        if not any(grant.allows(manifest) for manifest in manifests):
            raise NotFoundError(f"chunk {request.digest}")

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        """The chunk, wherever it lies; ``NotFoundError`` when it is not here, or is not the manifest's."""
        is_of_manifest = request.manifest is None or request.manifest in self._names(request.digest)
        found = self.open_for(request) if is_of_manifest else None
        if found is None:
            raise NotFoundError(f"chunk {request.digest}")
        return found

    def open_for(self, request: ChunkRequest) -> OpenChunk | None:
        """The chunk, to whoever may read its manifest; None when it is not here.

        Who got wrong bytes once says so, and gets none before they have been read here and found right.

        Raises:
            NotFoundError: it is here, and not for this reader: in a wrong file, which the scrub looks at now, or in somebody
                else's slab. Two organisations may have the very same tree, and each has packed it with files of its own.
        """
        if request.is_suspect and not self._is_right(request.digest) and self.holds(request.digest):
            raise NotFoundError(f"chunk {request.digest}")
        found = self._open_held(request.digest)
        if found is None:
            return None
        grant, chunk = self._grant(request.bearer), found[0]
        if grant is not None and is_closed_to(grant.organisation, _tail_of(chunk)):
            chunk.file.close()
            raise NotFoundError(f"chunk {request.digest}")
        return chunk

    def open_document(self, request: DocumentRequest) -> OpenChunk:
        """The document as it lies on the disk, which whoever asks checks; not yours and not there look alike."""
        grant = self._grant(request.bearer)
        place = self._places.manifest if request.kind == "manifest" else self._places.layout
        file = _open(place(request.manifest)) if grant is None or grant.allows(request.manifest) else None
        if file is None:
            raise NotFoundError(f"manifest {request.manifest}")
        return OpenChunk(file, 0, file.seek(0, os.SEEK_END))

    def reader_of(self, bearer: str | None) -> str:
        """The organisation whose grant this is; where grants are not checked, nobody's."""
        grant = self._grant(bearer)
        return grant.organisation if grant else ""

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
            self.tier.lose(digest)
        elif file is not None:
            self._suspect(file)
        return None

    def has_whole(self, digest: Digest) -> bool:
        """Whether some whole file of this node has the chunk."""
        ledger = self._index.ledger
        return ledger.is_committed(digest) or any(ledger.is_committed(one.file) for one in self._places_of(digest))

    # --- inside ---

    def _grant(self, bearer: str | None) -> Grant | None:
        """What the bearer may read; None where everybody may read everything."""
        if self._verify is None:
            return None
        if bearer is None:
            raise UnauthenticatedError
        return self._verify(bearer)

    def _names(self, digest: Digest) -> frozenset[Digest]:
        """The held manifests that name this chunk."""
        # The index belongs to the event loop. Copying one of its sets is one step under the interpreter's lock.
        files = {digest, *(place.file for place in self._places_of(digest))}
        return self.tier.index.named_by(digest).union(*map(self._index.named_by, files))

    def _is_right(self, digest: Digest) -> bool:
        """Whether what is here of the chunk is what its name says; what is not is dropped or suspected."""
        found = self._open_held(digest)
        if found is None:
            return True
        found[0].file.close()
        return self.read_held(digest, memoryview(bytearray(found[0].size))) is not None

    def _open_held(self, digest: Digest) -> tuple[OpenChunk, Tier, Digest | None] | None:
        """The chunk, its tier, and the whole file that it lies in, if any."""
        file = self.tier.open(digest)
        if file is not None:
            return OpenChunk(file, 0, file.seek(0, os.SEEK_END)), "cluster", None
        places = self._places_of(digest)
        # Parts before files: B looks for a whole file and misses; A lets it appear; B looks for the part, which is gone.
        for place in places:
            if place.index in self._arrived.get(place.file, ()):
                chunk = _open_slice(self._places.part(place.file), place)
                if chunk is not None:
                    return chunk, "node", None
        for place in (ChunkPlace(digest, 0, 0), *places):
            if place.file in self._withheld:
                continue
            chunk = _open_slice(self._places.file(place.file), place)
            if chunk is not None:
                return chunk, "node", place.file
        return None

    def _places_of(self, digest: Digest) -> tuple[ChunkPlace, ...]:
        with self._lock:
            return tuple(self._slices.get(digest, ()))


def _open(path: Path) -> BinaryIO | None:
    with disk_errors(path):
        try:
            return path.open("rb", buffering=0)
        except FileNotFoundError:
            return None


def _open_slice(path: Path, place: ChunkPlace) -> OpenChunk | None:
    file = _open(path)
    if file is None:
        return None
    if place.size:
        part = chunk_range(place.size, place.index)
        return OpenChunk(file, part.start, part.size)
    size = file.seek(0, os.SEEK_END)
    if size <= CHUNK_SIZE:
        return OpenChunk(file, 0, size)
    file.close()  # the name of a larger file, which is not the name of a chunk
    return None


def _tail_of(chunk: OpenChunk) -> bytes:
    size = min(SEAL_SIZE, chunk.size)
    with disk_errors(Path(str(chunk.file.name))):
        return os.pread(chunk.file.fileno(), size, chunk.offset + chunk.size - size)
