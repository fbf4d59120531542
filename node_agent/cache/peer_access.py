"""What peers may read of what this node holds, over the data plane."""

from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk
from bdn.wire.grants import Grant
from node_agent.cache.held_chunks import HeldChunks


@dataclass(frozen=True)
class PeerAccess:
    """A ``ServedChunks``: a caller may read the chunks that a manifest of its grant names. Safe for any thread.

    ``verify`` checks a grant; None lets everybody read, which is right on loopback only.
    """

    held: HeldChunks
    verify: Callable[[str], Grant] | None

    def authorize(self, request: ChunkRequest) -> str:
        """The bearer's grant must allow the manifest of the request or, without one, a held manifest that names the chunk."""
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
        """The chunk, wherever it lies; ``NotFoundError`` when it is not here, or is not the manifest's."""
        is_of_manifest = request.manifest is None or request.manifest in self.held.named_by(request.digest)
        found = self.open_named(request) if is_of_manifest else None
        if found is None:
            raise NotFoundError(f"chunk {request.digest}")
        return found

    def open_named(self, request: ChunkRequest) -> OpenChunk | None:
        """The chunk, which the request's manifest names; None when it is not here.

        A reader that got wrong bytes once says so, and gets none before they have been read here and found right.

        Raises ``NotFoundError``: it is in a wrong file, which the scrub looks at now.
        """
        if request.is_suspect and not self.held.is_right(request.digest) and self.held.holds(request.digest):
            raise NotFoundError(f"chunk {request.digest}")
        return self.held.open(request.digest)
