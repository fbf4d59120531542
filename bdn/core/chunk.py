"""Chunks and the files that they make up, all named by BLAKE3-256, ``b3:<64 hex>``.

A chunk is a fixed, aligned piece of at most 8 MiB, never content-defined. A layout maps a file to its chunks in order,
or to a slice of a slab. A layout's chunk digests always add up to the file's digest; the bytes of a slice are checked
against that digest.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Self

from blake3 import blake3

from bdn.core.errors import InvalidRequestError

Buffer = bytearray | memoryview
OnBytes = Callable[[memoryview], object]  # such as the ``update`` of a hash

CHUNK_SIZE: Final = 8 * 1024 * 1024

_HEX: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = "b3:"

# A large file's name is a hash over hashes, in BLAKE3's key derivation mode, so no plain content can have the same
# name. A mere prefix is forgeable: an attacker could upload prefix, size and digests as a small file and own the name.
_FILE_CONTEXT: Final = "bdn:file:v1"


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """A BLAKE3-256 digest. ``hex`` is 64 lower-case hexadecimal digits."""

    hex: str

    def __post_init__(self) -> None:
        if not _HEX.fullmatch(self.hex):
            raise ValueError(f"not a digest: {self.hex[:80]!r}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``b3:<64 hex>``. Raises ``ValueError`` for anything else, upper case included."""
        if text.startswith(_PREFIX):
            return cls(text[len(_PREFIX) :])
        raise ValueError(f"not a digest: {text[:80]!r}; the form is b3:<64 hex>")

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        return cls(raw.hex())

    def to_bytes(self) -> bytes:
        return bytes.fromhex(self.hex)

    def __str__(self) -> str:
        return f"b3:{self.hex}"

    @property
    def fanout(self) -> str:
        """``aa/bb/aabb…``: the content's path in a directory tree."""
        return f"{self.hex[:2]}/{self.hex[2:4]}/{self.hex}"


def digest_in(text: str) -> Digest:
    """Like ``Digest.parse``, but raises ``InvalidRequestError``."""
    try:
        return Digest.parse(text)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def digest_of(content: bytes | bytearray | memoryview) -> Digest:
    """Hash content in memory. Releases the GIL for large buffers."""
    return Digest(blake3(content).hexdigest())


EMPTY: Final = digest_of(b"")


def file_digest(size: int, chunks: Iterable[Digest]) -> Digest:
    """Name a file of ``size`` bytes from the digests of its chunks in order.

    A file that fits one chunk has the chunk's name, so that equal bytes have one name. A larger file is named by a hash
    over its size and its chunk digests, so that chunks can be verified in any order and in parallel.
    """
    digests = list(chunks)
    if not digests:
        return EMPTY
    if len(digests) == 1:
        return digests[0]
    hasher = blake3(size.to_bytes(8, "big"), derive_key_context=_FILE_CONTEXT)
    for digest in digests:
        hasher.update(digest.to_bytes())
    return Digest(hasher.hexdigest())


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, stop)``, never empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"not a byte range: [{self.start}, {self.stop})")

    @property
    def size(self) -> int:
        return self.stop - self.start


def chunk_count(size: int) -> int:
    return -(-size // CHUNK_SIZE)


def chunk_range(size: int, index: int) -> ByteRange:
    """The byte range of chunk ``index`` of a file of ``size`` bytes; only the last chunk may be short."""
    if not 0 <= index < chunk_count(size):
        raise ValueError(f"a file of {size} bytes has no chunk {index}")
    return ByteRange(index * CHUNK_SIZE, min(size, (index + 1) * CHUNK_SIZE))


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk of a file, with the byte range that it covers."""

    digest: Digest
    index: int
    range: ByteRange


@dataclass(frozen=True, slots=True)
class Slice:
    """A small file's place: ``offset`` bytes into a slab of ``slab_size`` bytes."""

    slab: Digest
    slab_size: int
    offset: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The chunks of one file, checked against the file's digest on construction.

    ``slice`` is set when the file's only chunk is stored inside a slab.
    """

    digest: Digest
    size: int
    chunks: tuple[Digest, ...]
    slice: Slice | None = None

    def __post_init__(self) -> None:
        if self.slice is not None:
            stop = self.slice.offset + self.size
            if len(self.chunks) != 1 or self.slice.offset < 0 or not stop <= self.slice.slab_size <= CHUNK_SIZE:
                raise ValueError(f"{self.slice} cannot hold file {self.digest} of {self.size} bytes")
        fits = self.size >= 0 and len(self.chunks) == chunk_count(self.size)
        if not fits or file_digest(self.size, self.chunks) != self.digest:
            raise ValueError(f"{len(self.chunks)} chunks do not make up file {self.digest} of {self.size} bytes")

    @classmethod
    def of(cls, size: int, chunks: tuple[Digest, ...]) -> Self:
        return cls(file_digest(size, chunks), size, chunks)

    @property
    def fetched(self) -> tuple[Digest, ...]:
        """The chunks to fetch: the file's own, or its slab."""
        return (self.slice.slab,) if self.slice else self.chunks

    @property
    def fetched_size(self) -> int:
        return self.slice.slab_size if self.slice else self.size

    def placed(self) -> tuple[PlacedChunk, ...]:
        return tuple(
            PlacedChunk(digest, index, chunk_range(self.size, index)) for index, digest in enumerate(self.chunks)
        )


SEGMENT_LIMIT: Final = 255  # bytes; NAME_MAX of every known Linux file system
PATH_LIMIT: Final = 3072  # bytes; PATH_MAX is 4096, and views add their own prefix
_SEGMENT: Final = r"[^/\\\0.][^/\\\0]*"  # does not begin with a dot, so it is neither "." nor ".."
_PLAIN: Final = re.compile(f"{_SEGMENT}(?:/{_SEGMENT})*")  # fast path: a listing may have a million paths


class UnsafePathError(ValueError):
    """A listed path that must not become a file. Sources map it to INVALID_SOURCE with their own name."""


def normalise_path(path: str) -> str:
    """Return the path as in a manifest: relative, ``/`` between segments, no empty or ``.`` segment.

    Raises:
        UnsafePathError: absolute, empty, with ``..``, NUL, a backslash or a lone surrogate, or too long for a file system.
    """
    if len(path) <= SEGMENT_LIMIT and path.isascii() and _PLAIN.fullmatch(path):
        return path
    shown = ascii(path if len(path) <= 200 else f"{path[:200]}…")
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise UnsafePathError(f"path {shown} is not valid Unicode") from None
    if path.startswith("/"):
        raise UnsafePathError(f"path {shown} is absolute")
    if b"\0" in encoded or b"\\" in encoded:
        raise UnsafePathError(f"path {shown} holds a NUL or a backslash")
    segments = [segment for segment in path.split("/") if segment not in ("", ".")]
    if not segments or path.endswith("/"):
        raise UnsafePathError(f"path {shown} names no file")
    if ".." in segments:
        raise UnsafePathError(f"path {shown} leaves its folder with '..'")
    normal = "/".join(segments)
    if len(normal.encode()) > PATH_LIMIT or any(len(segment.encode()) > SEGMENT_LIMIT for segment in segments):
        raise UnsafePathError(f"path {shown} is too long for a file system")
    return normal


def tree_problems(paths: Iterable[str]) -> Iterator[str]:
    """Report normalised paths that cannot be in one tree: duplicates, and paths that are both a file and a folder."""
    files: set[str] = set()
    for path in paths:
        if path in files:
            yield f"path {path!a} is listed twice"
        files.add(path)
    folders: set[str] = set()
    for path in files:
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            if folder in files:
                yield f"path {folder!a} is both a file and a folder"
            folders.add(folder)
            folder = folder.rpartition("/")[0]


def check_tree(paths: Iterable[str]) -> None:
    for problem in tree_problems(paths):
        raise UnsafePathError(problem)


class MalformedDocumentError(ValueError):
    """A manifest's root or page whose bytes do not match its schema."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a manifest. ``path`` is normalised and relative to the mount; ``size`` is in bytes."""

    path: str
    size: int
    digest: Digest

    def __post_init__(self) -> None:
        if normalise_path(self.path) != self.path:
            raise UnsafePathError(f"path {self.path!a} is not normalised")
        if self.size < 0 or (self.size == 0) != (self.digest == EMPTY):
            raise ValueError(f"{self.path!a}: size {self.size} does not fit digest {self.digest}")
