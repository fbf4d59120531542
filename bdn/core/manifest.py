"""The authority on what a mirrored source contains: path, size and digest of every file, under a name of its own."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final, Self

from bdn.core.chunk import EMPTY, Digest, digest_of
from bdn.core.source.listing import UnsafePathError, check_tree, normalise_path

SCHEMA: Final = "bdn.manifest.v1"
_ENCODED_AT_ONCE: Final = 1000


class MalformedDocumentError(ValueError):
    """A manifest or layout whose bytes are not what their schema says."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file. ``path`` is normalised and relative to the mount, ``size`` is in bytes."""

    path: str
    size: int
    digest: Digest

    def __post_init__(self) -> None:
        if normalise_path(self.path) != self.path:
            msg = f"path {self.path!a} is not normalised"
            raise UnsafePathError(msg)
        if self.size < 0 or (self.size == 0) != (self.digest == EMPTY):
            msg = f"{self.path!a}: size {self.size} does not fit digest {self.digest}"
            raise ValueError(msg)


@dataclass(frozen=True)
class Manifest:
    """Immutable and canonical: equal trees have equal bytes and therefore one name, whatever source they came from.

    ``files`` is sorted by the UTF-8 bytes of the path, without a path twice or one inside another file.
    """

    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        if not self.files:
            msg = "a manifest names at least one file"
            raise ValueError(msg)
        paths = [entry.path for entry in self.files]
        check_tree(paths)
        if paths != sorted(paths):  # by code points, which is the order of the UTF-8 bytes
            msg = "a manifest's files are sorted by path"
            raise ValueError(msg)

    @classmethod
    def of(cls, files: Iterable[FileEntry]) -> Self:
        """From files in any order."""
        return cls(tuple(sorted(files, key=attrgetter("path"))))

    @cached_property
    def canonical(self) -> bytes:
        """JSON with sorted keys and no white space, in UTF-8."""
        # In pieces, because the dictionaries of a million files are half a gigabyte.
        starts = range(0, len(self.files), _ENCODED_AT_ONCE)
        files = b",".join(_canonical_files(self.files[start : start + _ENCODED_AT_ONCE]) for start in starts)
        return b'{"files":[%b],"schema":"%b"}' % (files, SCHEMA.encode())

    @cached_property
    def digest(self) -> Digest:
        """The manifest's name: the BLAKE3 of its canonical bytes."""
        return digest_of(self.canonical)

    @cached_property
    def bytes_total(self) -> int:
        """The sum of the files' sizes, a file counted once per path."""
        return sum(entry.size for entry in self.files)

    @cached_property
    def contents(self) -> dict[Digest, int]:
        """Size by digest: each distinct content once. What a cache has to hold."""
        return {entry.digest: entry.size for entry in self.files}

    @classmethod
    def parse(cls, canonical: bytes) -> Self:
        """Read canonical bytes.

        Raises:
            MalformedDocumentError: not a manifest, or not in canonical form (then its name would not be unique).
        """
        try:
            manifest = cls(tuple(map(_entry, json.loads(canonical, object_hook=_read)["files"])))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            msg = f"not a manifest: {error}"
            raise MalformedDocumentError(msg) from error
        if manifest.canonical != canonical:
            msg = "not a manifest in canonical form"
            raise MalformedDocumentError(msg)
        return manifest


def _canonical_files(entries: Iterable[FileEntry]) -> bytes:
    files = [{"digest": str(entry.digest), "path": entry.path, "size": entry.size} for entry in entries]
    return json.dumps(files, ensure_ascii=False, separators=(",", ":"), sort_keys=True)[1:-1].encode()


def _read(record: dict[str, object]) -> object:
    """A file's record becomes an entry as soon as it is read: a million dictionaries would be half a gigabyte."""
    if "path" not in record:
        return record
    return FileEntry(_text(record["path"]), _count(record["size"]), Digest.parse(_text(record["digest"])))


def _entry(value: object) -> FileEntry:
    if not isinstance(value, FileEntry):
        msg = f"expected a file, not {value!r:.80}"
        raise TypeError(msg)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        msg = f"expected a string, not {value!r:.80}"
        raise TypeError(msg)
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        msg = f"expected a whole number, not {value!r:.80}"
        raise TypeError(msg)
    return value
