"""The interface of upstreams: listed files with identities and checksums, and locations of their bytes."""

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

    CRCs of parts can be combined, so they are computed per chunk in any order; the other kinds need the bytes in order.
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
        """Whether a whole's checksum follows from the checksums and sizes of its parts."""
        return self in (ChecksumKind.CRC32, ChecksumKind.CRC32C, ChecksumKind.CRC64NVME)


@dataclass(frozen=True, slots=True)
class Checksum:
    """A whole-file checksum as lower-case hexadecimal digits."""

    kind: ChecksumKind
    hex: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a file of one listing the same file in a later listing.

    An identity only maps *to* a digest that we computed: an ETag is not a content hash. ``scope`` limits the readers
    that may find content by it: ``public``, or one organisation for content that needs credentials. ``key`` is a
    fixed-size name for look-ups.
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
    """One listed file.

    ``path`` is relative to the source, see ``listed_path``; ``handle`` is the source's own name for it. ``git_name`` is
    a hub's git name of the file, or of its LFS pointer.
    """

    path: str
    size: int
    identity: Identity
    handle: str
    version: str  # pins every read: a commit, a version id, or an ETag
    checksum: Checksum | None = None
    git_name: str | None = None

    @property
    def is_one_chunk(self) -> bool:
        return self.size <= CHUNK_SIZE


def listed_path(name: str) -> str:
    """Normalise a listed name; return it unchanged where no file can have it.

    Such a file can be listed, and excluded by patterns. Selected files are checked (``mirror/ingest/survey.py``).
    """
    try:
        return normalise_path(name)
    except UnsafePathError:
        return name


class Listing:
    """Listed files in order, packed.

    A million objects would take 600 MB, and each garbage collection would traverse them.
    """

    def __init__(self, files: Iterable[UpstreamFile] = ()) -> None:
        self._packed: list[bytes] = []
        self._last: list[UpstreamFile] = []
        self._length = 0
        self._last_path = ""
        self.bytes_total = 0
        self.is_sorted = True  # by path, without duplicates
        for file in files:
            self.append(file)

    def append(self, file: UpstreamFile) -> None:
        self._last.append(file)
        self._length += 1
        self.bytes_total += file.size
        self.is_sorted &= self._last_path < file.path
        self._last_path = file.path
        if len(self._last) == _PAGE:
            self._packed.append(marshal.dumps([_packed(file) for file in self._last]))
            self._last = []

    def __len__(self) -> int:
        return self._length

    def pages(self) -> Iterator[Sequence[UpstreamFile]]:
        for packed in self._packed:
            yield [_unpacked(values) for values in marshal.loads(packed)]  # noqa: S302 - written by ``append``
        if self._last:
            yield self._last

    def __iter__(self) -> Iterator[UpstreamFile]:
        return chain.from_iterable(self.pages())


_PAGE: Final = 500  # files


_Packed = tuple[str, int, str, str, str, str, tuple[str, str] | None, str | None]


def _packed(file: UpstreamFile) -> _Packed:
    identity, checksum = file.identity, file.checksum
    stated = (checksum.kind.value, checksum.hex) if checksum else None
    return file.path, file.size, identity.scope, identity.key, file.handle, file.version, stated, file.git_name


def _unpacked(values: _Packed) -> UpstreamFile:
    path, size, scope, key, handle, version, stated, git_name = values
    checksum = Checksum(ChecksumKind(stated[0]), stated[1]) if stated else None
    return UpstreamFile(path, size, Identity(scope, key), handle, version, checksum, git_name)


@dataclass(frozen=True, slots=True)
class Resolution:
    """A source pinned to its current revision, or None where the upstream has no revisions."""

    revision: str | None


@dataclass(frozen=True, slots=True)
class Location:
    """Where ranges of one upstream file can be read with HTTP, until the location expires.

    ``url`` may be signed and ``headers`` may hold credentials: neither is ever logged, stored or shown.
    """

    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    etag: str | None = None  # every response must carry it; another ETag means that the file changed
    modified: str | None = None  # likewise, the Last-Modified of an upstream without ETags
    expires_at: float | None = None  # seconds since the epoch; None: unknown or never
    checksum: Checksum | None = None  # of the whole file, where only locating revealed it
    # Reads the whole file's checksum from a response's header, for upstreams that reveal it nowhere else for free. A
    # file of one chunk is then requested without a Range, because some upstreams (S3) send the checksum for whole
    # objects only.
    stated: Callable[[Headers], Checksum | None] | None = field(default=None, compare=False)
    # Maps a refusal (status 400 to 499) and the beginning of its body to an error. None: the status is all that is
    # known.
    refused: Callable[[int, bytes], BdnError | None] | None = field(default=None, compare=False)
    may_be_encoded: bool = False  # "Content-Encoding" describes the stored bytes, not an encoding by the server


class Headers(Protocol):
    """A response's header; names are looked up in lower case, as some libraries store them."""

    def get(self, name: str, /) -> str | None: ...


class Locator(Protocol):
    async def locate(self, file: UpstreamFile) -> Location:
        """Where this file's ranges can be read now. Callers request a new location when one expired."""


class Source(Locator, Protocol):
    """One upstream, opened with its credentials.

    Raises only ``BdnError``, mapped where the SDK is called and iterated.
    """

    async def resolve(self) -> Resolution:
        """Pin the source: a branch becomes a commit. All later calls use this resolution."""

    def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:
        """Every file whose path begins with one of ``within``, each once, by metadata alone.

        May list more where the upstream can only list folders. Paths are as in ``listed_path``. No text in ``within``
        is a prefix of another one.
        """


class Asker(Protocol):
    """Sends a source's requests one by one, so that a retry repeats a page and not a whole listing."""

    async def ask(self, url: str, request: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Run ``request``, which sends one request to the host of ``url`` and raises ``BdnError``."""


class AskOnce:
    async def ask(self, url: str, request: Callable[[], Awaitable[_Answer]]) -> _Answer:  # noqa: ARG002
        return await request()


ASK_ONCE: Final = AskOnce()
