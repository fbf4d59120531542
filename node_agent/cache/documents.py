"""Manifests and layouts that this node holds, for peers that cannot ask the mirror."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.core.grant import Grant
from bdn.disk.durable import disk_errors
from bdn.net.chunk_server.served_chunks import DocumentRequest, OpenChunk
from node_agent.disk.places import Places


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
