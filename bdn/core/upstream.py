"""What a listing tells about a file without reading it, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from bdn.core.digest import Digest, digest_of


class ChecksumKind(StrEnum):
    """Whole-file checksums that upstreams offer."""

    SHA256 = "sha256"
    GIT_BLOB = "git-blob-sha1"  # sha1 over b"blob <size>\0" + bytes
    MD5 = "md5"


@dataclass(frozen=True, slots=True)
class Checksum:
    """A whole-file checksum as lower-case hexadecimal digits."""

    kind: ChecksumKind
    hex: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes an upstream file the same file when it is listed again.

    It only ever maps *to* a digest that we computed: an ETag is not a content hash. ``scope`` is who may find the content
    through it: ``public``, or one organisation for content that needs credentials.
    """

    scope: str
    parts: tuple[str, ...]

    @property
    def key(self) -> str:
        """A fixed-size name for look-ups: the BLAKE3 of the parts with their lengths, so that no two lists collide."""
        parts = (self.scope, *self.parts)
        return digest_of("".join(f"{len(part)}:{part}" for part in parts).encode()).hex


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
