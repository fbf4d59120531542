"""Authorizes peers' reads of this node's chunks on the data plane, and opens the chunks."""

from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.wire.grants import Grant
from node_agent.cache.held_chunks import HeldChunks


@dataclass(frozen=True)
class PeerAccess:
    """A ``ServedChunks``: a caller may read the chunks that a manifest of its grant names. Thread-safe.

    ``verify`` checks a grant. None allows every read, which is safe on loopback only.
    """

    held: HeldChunks
    verify: Callable[[str], Grant] | None

    def authorize(self, request: ChunkRequest) -> str:
        """The grant must allow the request's manifest or, if it names none, a held manifest that names the chunk."""
        if self.verify is None:
            return ""
        if request.bearer is None:
            raise UnauthenticatedError
        grant = self.verify(request.bearer)
        manifests = self.held.named_by(request.digest) if request.manifest is None else (request.manifest,)
        if not any(grant.allows(manifest) for manifest in manifests):
            raise NotFoundError(f"chunk {request.digest}")
        return grant.organisation

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        """Raises ``NotFoundError`` if the chunk is not here, or the request's manifest does not name it."""
        is_of_manifest = request.manifest is None or request.manifest in self.held.named_by(request.digest)
        found = self.open_named(request) if is_of_manifest else None
        if found is None:
            raise NotFoundError(f"chunk {request.digest}")
        return found

    def open_named(self, request: ChunkRequest) -> OpenChunk | None:
        """Open a chunk of the request's manifest without checking the manifest. None if the chunk is not here.

        A reader that got wrong bytes marks its next request as suspect; the chunk is then verified here before it is
        served.

        Raises ``NotFoundError``: a wrong file contains it, which the scrub now reads.
        """
        if request.is_suspect and not self.held.is_right(request.digest) and self.held.holds(request.digest):
            raise NotFoundError(f"chunk {request.digest}")
        return self.held.open(request.digest)
