"""The interface between the data plane's server and what holds chunks."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from bdn.core.chunk import Digest


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """Who asks for which chunk.

    ``manifest`` says more than a wish: the chunk belongs to it, the bearer's grant allows it, and the one who is asked owns
    the chunk and shall obtain it if it is not held. ``is_suspect``: it came with wrong content a moment ago. ``organisation`` is
    the caller's, known once the request is authorised.
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
    """Where a server finds chunks, and who may have them. Both methods may block: they run in the server's workers."""

    def authorize(self, request: ChunkRequest) -> str:
        """The organisation of the caller. Raise ``UnauthenticatedError``, ``GrantInvalidError`` or ``NotFoundError`` (the same for foreign and for missing chunks)."""

    def open_chunk(self, request: ChunkRequest) -> OpenChunk | Future[object]:
        """The chunk; ``NotFoundError`` when it is not held; or a Future, which holds no thread, when it is on its way.

        When the Future is done this is asked again, and may answer with another one; its exception is the answer if it has
        one. The same Future may be given to many requests. The server never cancels it.
        """


@dataclass(frozen=True, slots=True)
class PushedChunk:
    """The sender and the chunk of a push; ``size`` bytes, from the head of the request. ``organisation`` is set by authorisation."""

    push: str
    digest: Digest
    size: int
    bearer: str | None = field(default=None, repr=False)
    organisation: str = ""


class ReceivedChunks(Protocol):
    """Where a server puts chunks that are pushed. ``authorize`` and ``take`` may block: they run in the server's workers."""

    def authorize(self, request: PushedChunk) -> str:
        """The organisation that the push is for, before the body is read.

        Raise ``UnauthenticatedError``, ``GrantInvalidError``, ``GrantExpiredError``, ``NotFoundError`` or ``InUseError``.
        """

    def take(self, request: PushedChunk, content: memoryview) -> None:
        """Durable when it returns. The content has the request's digest; the buffer is the caller's again afterwards."""
