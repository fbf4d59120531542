"""What a listing tells about a file without reading it, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from blake3 import blake3

from bdn.core.digest import Digest


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
