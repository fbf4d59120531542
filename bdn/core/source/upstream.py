"""What an upstream is asked, and what it tells: files with their identities and checksums, and where their bytes are."""

from __future__ import annotations

import marshal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Final, Protocol, TypeVar

from blake3 import blake3

from bdn.core.chunk import CHUNK_SIZE, UnsafePathError, normalise_path
from bdn.core.errors import BdnError

_Answer = TypeVar("_Answer")


class ChecksumKind(StrEnum):
    """Whole-file checksums that upstreams offer.

    The CRCs of parts can be combined, so they are taken chunk by chunk in any order; the others need the bytes in order.
    """

    SHA256 = "sha256"
    SHA1 = "sha1"
    GIT_BLOB = "git-blob-sha1"  # sha1 over b"blob <size>\0" + bytes
    MD5 = "md5"
    CRC32 = "crc32"
    CRC32C = "crc32c"
    CRC64NVME = "crc64nvme"

    @property
    def is_combinable(self) -> bool:
        """Whether the checksum of a whole follows from those of its parts and their sizes."""
        return self in (ChecksumKind.CRC32, ChecksumKind.CRC32C, ChecksumKind.CRC64NVME)


@dataclass(frozen=True, slots=True)
class Checksum:
    """A whole-file checksum as lower-case hexadecimal digits."""

    kind: ChecksumKind
    hex: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes an upstream file the same file when it is listed again.

    It only ever maps *to* a digest that we computed: an ETag is not a content hash. ``scope`` is who may find the content
    through it: ``public``, or one organisation for content that needs credentials. ``key`` is a fixed-size name for
    look-ups.
    """

    scope: str
    key: str

    @classmethod
    def of(cls, scope: str, *parts: str) -> Identity:
        """The key is the BLAKE3 of scope and parts with their lengths, so that no two lists collide."""
        return cls(
            scope,
            blake3(
                "".join([f"{len(part)}:{part}" for part in (scope, *parts)]).encode("utf-8", "surrogatepass")
            ).hexdigest(),
        )


@dataclass(frozen=True, slots=True)
class UpstreamFile:
    """One listed file. ``path`` is relative to the source and as ``listed_path`` says; ``handle`` is the source's own name for it."""

    path: str
    size: int
    identity: Identity
    handle: str
    version: str  # pins every read: a commit, a version id, or an ETag
    checksum: Checksum | None = None

    @property
    def is_one_chunk(self) -> bool:
        """Whether one request brings it, so that nothing more has to be known before."""
        return self.size <= CHUNK_SIZE


def listed_path(name: str) -> str:
    """The path of what a source lists under this name; the name itself where no file can have it.

    Such a file can be listed and left out by patterns. What is selected is checked (``mirror/ingest/survey.py``).
    """
    try:
        return normalise_path(name)
    except UnsafePathError:
        return name


class Listing:
    """Listed files in their order. Kept packed: as objects, a million of them are 600 MB that each garbage collection walks through."""

    def __init__(self, files: Iterable[UpstreamFile] = ()) -> None:
        self._packed: list[bytes] = []
        self._last: list[UpstreamFile] = []
        self._length = 0
        self._last_path = ""
        self.bytes_total = 0
        self.is_sorted = True  # by path, and no path twice
        for file in files:
            self.append(file)

    def append(self, file: UpstreamFile) -> None:
        """Add a file at the end."""
        self._last.append(file)
        self._length += 1
        self.bytes_total += file.size
        self.is_sorted &= self._last_path < file.path
        self._last_path = file.path
        if len(self._last) == _PAGE:
            self._packed.append(marshal.dumps([_packed(file) for file in self._last]))
            self._last = []

    def __len__(self) -> int:
        """How many files."""
        return self._length

    def pages(self) -> Iterator[Sequence[UpstreamFile]]:
        """Some hundred files at a time."""
        for packed in self._packed:
            yield [_unpacked(values) for values in marshal.loads(packed)]  # noqa: S302 - we wrote it
        if self._last:
            yield self._last

    def __iter__(self) -> Iterator[UpstreamFile]:
        """Each file."""
        return chain.from_iterable(self.pages())


_PAGE: Final = 500  # files


_Packed = tuple[str, int, str, str, str, str, tuple[str, str] | None]


def _packed(file: UpstreamFile) -> _Packed:
    identity, checksum = file.identity, file.checksum
    stated = (checksum.kind.value, checksum.hex) if checksum else None
    return file.path, file.size, identity.scope, identity.key, file.handle, file.version, stated


def _unpacked(values: _Packed) -> UpstreamFile:
    path, size, scope, key, handle, version, stated = values
    checksum = Checksum(ChecksumKind(stated[0]), stated[1]) if stated else None
    return UpstreamFile(path, size, Identity(scope, key), handle, version, checksum)


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
    # Reads the body of a refusal (a status from 400 to 499), of which it gets the beginning. None: the status says all that is known.
    refused: Callable[[int, bytes], BdnError | None] | None = field(default=None, compare=False)
    may_be_encoded: bool = False  # "Content-Encoding" describes the stored bytes, and is not the server's own doing


class Headers(Protocol):
    """The head of an answer, in which names are looked up in lower case, as some libraries keep them."""

    def get(self, name: str, /) -> str | None:
        """The header's value, or None."""


class Locator(Protocol):
    """Tells where the bytes of a listed file are."""

    async def locate(self, file: UpstreamFile) -> Location:
        """Where this file's ranges can be read now; asked again when a location has expired."""


class Source(Locator, Protocol):
    """One upstream, opened with its credentials. Errors are ours, mapped where the SDK is called and iterated."""

    async def resolve(self) -> Resolution:
        """Pin the source: a branch becomes a commit. Everything later speaks of this resolution."""

    def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:
        """Every file whose path begins with one of ``within``, each once, by metadata alone.

        A source may list more than that where its upstream can only be asked for folders. Paths are as ``listed_path``
        says. No text in ``within`` begins with another one.
        """


class Asker(Protocol):
    """How a source asks its upstream: each request by itself, so that a page is asked for again and not a listing."""

    async def ask(self, url: str, request: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The answer of ``request``, which asks the host of ``url`` once and raises our errors."""


class AskOnce:
    """An ``Asker`` that knows no limits and never asks again."""

    async def ask(self, url: str, request: Callable[[], Awaitable[_Answer]]) -> _Answer:  # noqa: ARG002
        """The answer or the failure."""
        return await request()


ASK_ONCE: Final = AskOnce()
