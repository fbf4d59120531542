"""What a listing tells about files without reading them: which paths may become files, what is held already."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from blake3 import blake3

from bdn.core.chunk import Digest


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
    def of(cls, scope: str, *parts: str) -> Self:
        """The key is the BLAKE3 of scope and parts with their lengths, so that no two lists collide."""
        return cls(scope, blake3("".join([f"{len(part)}:{part}" for part in (scope, *parts)]).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class UpstreamFile:
    """One listed file. ``path`` is normalised and relative to the source; ``handle`` is the source's own name for it."""

    path: str
    size: int
    identity: Identity
    handle: str
    version: str  # pins every read: a commit, a version id, or an ETag
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class Diff:
    """Which listed files are held already, by path, and which have to be copied, each distinct identity once."""

    held: dict[str, Digest]
    missing: tuple[UpstreamFile, ...]


def diff(files: Iterable[UpstreamFile], known: Mapping[str, Digest]) -> Diff:
    """Compare a selection with what the store holds, by metadata alone.

    Args:
        files: the selected files.
        known: file digest by identity key, for the identities that the store holds completely.
    """
    held: dict[str, Digest] = {}
    missing: dict[str, UpstreamFile] = {}
    for file in files:
        digest = known.get(file.identity.key)
        if digest is not None:
            held[file.path] = digest
        else:
            missing.setdefault(file.identity.key, file)
    return Diff(held, tuple(missing.values()))


SEGMENT_LIMIT: Final = 255  # bytes; NAME_MAX of every Linux file system we know
PATH_LIMIT: Final = 3072  # bytes; PATH_MAX is 4096, and views add their own prefix
_SEGMENT: Final = r"[^/\\\0.][^/\\\0]*"  # which begins with no dot, so that it is neither "." nor ".."
_PLAIN: Final = re.compile(f"{_SEGMENT}(?:/{_SEGMENT})*")  # most paths are, and of a million each microsecond counts


class UnsafePathError(ValueError):
    """A listed path that must not become a file. Sources map it to INVALID_SOURCE with their own name."""


def normalise_path(path: str) -> str:
    """The path as a manifest holds it: relative, ``/`` between segments, no empty or ``.`` segment.

    Raises:
        UnsafePathError: absolute, empty, with ``..``, NUL, a backslash or a lone surrogate, or too long for a file system.
    """
    if len(path) <= SEGMENT_LIMIT and path.isascii() and _PLAIN.fullmatch(path):
        return path
    shown = ascii(path if len(path) <= 200 else f"{path[:200]}…")
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        msg = f"path {shown} is not valid Unicode"
        raise UnsafePathError(msg) from None
    if path.startswith("/"):
        msg = f"path {shown} is absolute"
        raise UnsafePathError(msg)
    if b"\0" in encoded or b"\\" in encoded:
        msg = f"path {shown} holds a NUL or a backslash"
        raise UnsafePathError(msg)
    segments = [segment for segment in path.split("/") if segment not in ("", ".")]
    if not segments or path.endswith("/"):
        msg = f"path {shown} names no file"
        raise UnsafePathError(msg)
    if ".." in segments:
        msg = f"path {shown} leaves its folder with '..'"
        raise UnsafePathError(msg)
    normal = "/".join(segments)
    if len(normal.encode()) > PATH_LIMIT or any(len(segment.encode()) > SEGMENT_LIMIT for segment in segments):
        msg = f"path {shown} is too long for a file system"
        raise UnsafePathError(msg)
    return normal


def check_tree(paths: Iterable[str]) -> None:
    """Refuse normalised paths that cannot all be files of one tree.

    Raises:
        UnsafePathError: one path twice, or one path that is both a file and a folder.
    """
    files: set[str] = set()
    for path in paths:
        if path in files:
            msg = f"path {path!a} stands twice in the listing"
            raise UnsafePathError(msg)
        files.add(path)
    folders: set[str] = set()
    for path in files:
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            if folder in files:
                msg = f"path {folder!a} is both a file and a folder"
                raise UnsafePathError(msg)
            folders.add(folder)
            folder = folder.rpartition("/")[0]
