"""The interface between the data plane's server and the storage of chunks."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from bdn.core.chunk import Digest


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """A caller's request for a chunk.

    ``manifest`` asserts that the chunk belongs to it, that the bearer's grant allows it, and that this agent owns the
    chunk and has to obtain it if absent. ``is_suspect``: the caller just received wrong content for it.
    ``organisation`` is the caller's, known after authorisation.
    """

    digest: Digest
    bearer: str | None = field(default=None, repr=False)
    manifest: Digest | None = None
    is_suspect: bool = False
    organisation: str = ""


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """A chunk inside an open file, which the server closes."""

    file: BinaryIO
    offset: int
    size: int


class ServedChunks(Protocol):
    """Storage and authorisation of served chunks. Both methods may block: they run in the server's workers."""

    def authorize(self, request: ChunkRequest) -> str:
        """The organisation of the caller.

        Raises ``UnauthenticatedError``, ``GrantInvalidError`` or ``NotFoundError`` (for foreign and missing chunks
        alike).
        """

    def open_chunk(self, request: ChunkRequest) -> OpenChunk | Future[object]:
        """The chunk, or a Future while it is being fetched. Raises ``NotFoundError`` when it is not held.

        The Future occupies no thread. When it is done, the server calls this again, and may get another Future; the
        Future's exception, if any, becomes the response. Many requests may share one Future. The server never cancels
        it.
        """


@dataclass(frozen=True, slots=True)
class PushedChunk:
    """A chunk of a push, of ``size`` bytes. ``organisation`` is set by authorisation."""

    push: str
    digest: Digest
    size: int
    bearer: str | None = field(default=None, repr=False)
    organisation: str = ""


class ReceivedChunks(Protocol):
    """Storage of pushed chunks. ``authorize`` and ``take`` may block: they run in the server's workers."""

    def authorize(self, request: PushedChunk) -> str:
        """The organisation of the push, before the body is read.

        Raises ``UnauthenticatedError``, ``GrantInvalidError``, ``GrantExpiredError``, ``NotFoundError`` or
        ``InUseError``.
        """

    def take(self, request: PushedChunk, content: memoryview) -> None:
        """Store the content durably; its digest is verified. The buffer is invalid after the return."""
