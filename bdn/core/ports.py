"""The Protocols at which parts meet. One to three methods each; every implementation passes the Protocol's contract suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, TypeVar

from bdn.core.chunk import Digest
from bdn.core.source.listing import Checksum, UpstreamFile

Buffer = bytearray | memoryview
OnBytes = Callable[[memoryview], object]  # such as a hash's own ``update``

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Resolution:
    """A source pinned to what it is now. ``revision`` is None where the upstream has no revisions."""

    revision: str | None


@dataclass(frozen=True, slots=True)
class Location:
    """Where ranges of one upstream file can be read with HTTP, for a while.

    ``url`` may be signed and ``headers`` may hold credentials: neither is ever logged, stored or shown.
    """

    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    etag: str | None = None  # every answer must carry this one; otherwise the file changed
    expires_at: float | None = None  # seconds since the epoch; None where it is not known to expire
    checksum: Checksum | None = None  # of the whole file, where it was only learned by locating
    # Reads the whole file's checksum from the head of an answer, for upstreams that tell it nowhere else for free. Then a
    # file of one chunk is asked for without a Range, because some (S3) tell it for whole objects alone.
    stated: Callable[[Headers], Checksum | None] | None = field(default=None, compare=False)
    may_be_encoded: bool = False  # "Content-Encoding" describes the stored bytes, and is not the server's own doing


class Headers(Protocol):
    """The head of an answer; names in any case."""

    def get(self, name: str, /) -> str | None:
        """The header's value, or None."""
        ...


class Locator(Protocol):
    """Tells where the bytes of a listed file are."""

    async def locate(self, file: UpstreamFile) -> Location:
        """Where this file's ranges can be read now; asked again when a location has expired."""
        ...


class Source(Locator, Protocol):
    """One upstream, opened with its credentials. Errors are ours, mapped where the SDK is called and iterated."""

    async def resolve(self) -> Resolution:
        """Pin the source: a branch becomes a commit. Everything later speaks of this resolution."""
        ...

    def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:
        """Every file whose path begins with one of ``within``, each once, by metadata alone.

        A source may list more than that where its upstream can only be asked for folders. Paths are normalised, unsafe
        ones are INVALID_SOURCE. No text in ``within`` begins with another one.
        """
        ...


class Asker(Protocol):
    """How a source asks its upstream: each request by itself, so that a page is asked for again and not a listing."""

    async def ask(self, url: str, request: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The answer of ``request``, which asks the host of ``url`` once and raises our errors."""
        ...


class ChunkStore(Protocol):
    """Where mirrored chunks rest. Blocking; called from byte threads."""

    def put(self, digest: Digest, content: Buffer) -> None:
        """Make the chunk durable under its name. An existing one is kept. Nothing partial is ever visible."""
        ...

    def open(self, digest: Digest) -> BinaryIO:
        """The chunk as a seekable file, which the caller closes. ``NotFoundError`` when it is not held."""
        ...

    def keep(self, digest: Digest) -> bool:
        """Count on a chunk that was put earlier: whoever looked at it before this does not collect it any more.

        False when it is not held, or is on its way out: then it has to be put again.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as somebody who collects has seen it."""

    digest: Digest
    size: int
    kept_at: float  # when it was last put or kept, in seconds since the epoch


class CollectableStore(ChunkStore, Protocol):
    """A store out of which chunks are collected while others put, keep and read."""

    def stored(self, digests: Iterable[Digest] | None = None) -> Iterator[StoredChunk]:
        """Those of these chunks that are held, or all that are held; one that comes or goes meanwhile may be missed."""
        ...

    def collect(self, chunk: StoredChunk) -> bool:
        """Remove the chunk, unless somebody put or kept it since it was seen, or somebody else removed it: then False.

        Who has it open can read it to its end.
        """
        ...

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Remove what was left half-written and last changed before then. How many there are, and their bytes."""
        ...


class Inspection(Protocol):
    """How a store finds out what has become of its chunks. Blocking; called from byte threads."""

    def fault(self, digest: Digest) -> str | None:
        """What is wrong with the chunk as it rests, or None. It is read past caches. ``BdnError``: cannot be found out now."""
        ...

    def set_aside(self, digest: Digest) -> bool:
        """Keep a wrong chunk as evidence, where no reader finds it. False when it is absent, or right after all."""
        ...

    def evidence(self) -> int:
        """How many wrong chunks are kept."""
        ...


class InspectedStore(ChunkStore, Inspection, Protocol):
    """A store that can be scrubbed."""


class MirrorStore(InspectedStore, CollectableStore, Protocol):
    """What a mirror rests on."""
