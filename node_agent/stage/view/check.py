"""Is a directory still the view that we made? Asked before a view is trusted again, and before one is replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest, digest_of, file_digest
from bdn.core.manifest import FileEntry, Manifest
from node_agent.disk.places import Places


@dataclass(frozen=True, slots=True)
class Difference:
    """The first path that the view lacks, and the first that is there and is not what we put there. None: there is none."""

    lacking: str | None
    foreign: str | None

    @property
    def is_intact(self) -> bool:
        """Every file is there, and nothing else."""
        return self.lacking is None and self.foreign is None


def compare_view(manifest: Manifest, root: Path, places: Places) -> Difference:
    """Compare names and files. Blocking; two looks per file, as a rule. Folders without files are not looked at.

    A file is ours when it is the cache's own inode, or a read-only copy with the same size and time. Where the cache's file
    is another one by now, the bytes decide: that is slow, and happens after an eviction by force.
    """
    wanted = {entry.path.encode(): entry for entry in manifest.files}
    foreign: str | None = None
    for path, found in _files(os.fsencode(root)):
        entry = wanted.pop(path, None)
        if entry is None or not _is_ours(entry, found, places, os.fsencode(root) + b"/" + path):
            foreign = foreign or os.fsdecode(path)
    lacking = next(iter(wanted), None)
    return Difference(lacking.decode() if lacking is not None else None, foreign)


def _is_ours(entry: FileEntry, found: os.stat_result, places: Places, path: bytes) -> bool:
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
        return False
    try:
        content = places.file(entry.digest).stat()
    except FileNotFoundError:
        return _digest_of_file(path, entry.size) == entry.digest
    is_copy = not found.st_mode & 0o222 and found.st_mtime_ns == content.st_mtime_ns
    return is_copy or os.path.samestat(found, content) or _digest_of_file(path, entry.size) == entry.digest


def _digest_of_file(path: bytes, size: int) -> Digest:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        return file_digest(size, map(digest_of, iter(lambda: file.read(CHUNK_SIZE), b"")))


def _files(root: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, os.stat_result]]:
    """Everything that is not a folder, by its path below the root."""
    with os.scandir(root) as entries:
        for entry in entries:
            path = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, path + b"/")
            else:
                yield path, entry.stat(follow_symlinks=False)
