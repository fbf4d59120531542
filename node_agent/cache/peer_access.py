"""What peers may read of what this node holds: chunks, manifests and layouts, over the data plane."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.core.store import SEAL_SIZE, is_closed_to
from bdn.disk.durable import disk_errors, open_existing
from bdn.net.chunk_server.served_chunks import ChunkRequest, DocumentRequest, OpenChunk
from bdn.wire.grants import Grant
from node_agent.cache.held_chunks import HeldChunks
from node_agent.disk.places import Places


@dataclass(frozen=True)
class PeerAccess:
    """A ``ServedChunks`` and a ``ServedDocuments``. Safe for any thread.

    ``verify`` checks a grant; None lets everybody read, which is right on loopback only.
    """

    places: Places
    held: HeldChunks
    verify: Callable[[str], Grant] | None

    def authorize(self, request: ChunkRequest) -> str:
        """The bearer's grant must allow the manifest of the request or, without one, a held manifest that names the chunk."""
        grant = self._grant(request.bearer)
        if grant is None:
            return ""
        manifests = self.held.named_by(request.digest) if request.manifest is None else (request.manifest,)
        if not any(grant.allows(manifest) for manifest in manifests):
            raise NotFoundError(f"chunk {request.digest}")
        return grant.organisation

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        """The chunk, wherever it lies; ``NotFoundError`` when it is not here, or is not the manifest's."""
        is_of_manifest = request.manifest is None or request.manifest in self.held.named_by(request.digest)
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
        if request.is_suspect and not self.held.is_right(request.digest) and self.held.holds(request.digest):
            raise NotFoundError(f"chunk {request.digest}")
        chunk = self.held.open(request.digest)
        if chunk is None:
            return None
        grant = self._grant(request.bearer)
        if grant is not None and is_closed_to(grant.reader, _tail_of(chunk)):
            chunk.file.close()
            raise NotFoundError(f"chunk {request.digest}")
        return chunk

    def open_document(self, request: DocumentRequest) -> OpenChunk:
        """The document as it lies on the disk, which whoever asks checks; not yours and not there look alike."""
        self.reader_of(request.bearer, request.manifest)
        place = self.places.manifest if request.kind == "manifest" else self.places.layout
        file = open_existing(place(request.manifest))
        if file is None:
            raise NotFoundError(f"manifest {request.manifest}")
        return OpenChunk(file, 0, file.seek(0, os.SEEK_END))

    def reader_of(self, bearer: str | None, manifest: Digest | None = None) -> str:
        """The organisation or team of the grant, which must allow ``manifest``; empty where grants are not checked."""
        grant = self._grant(bearer)
        if grant is not None and manifest is not None and not grant.allows(manifest):
            raise NotFoundError(f"manifest {manifest}")
        return grant.reader if grant else ""

    def _grant(self, bearer: str | None) -> Grant | None:
        """What the bearer may read; None where everybody may read everything."""
        if self.verify is None:
            return None
        if bearer is None:
            raise UnauthenticatedError
        return self.verify(bearer)


def _tail_of(chunk: OpenChunk) -> bytes:
    size = min(SEAL_SIZE, chunk.size)
    with disk_errors(Path(str(chunk.file.name))):
        return os.pread(chunk.file.fileno(), size, chunk.offset + chunk.size - size)
