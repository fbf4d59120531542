"""The cluster tier on disk: ``cluster/chunks/<manifest>/<chunk>``, whole chunks under every manifest that names them.

The folders are the whole truth: a manifest's chunks are what its folder holds, a chunk of two manifests is two links to one
file, and a folder's modification time says when the manifest was used last. So there is no record that could disagree with
the disk, and nothing to mend after a kill at any point: ``incoming`` holds rubbish then, and that is all.
"""

import itertools
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bdn.core.chunk import Digest
from bdn.disk.direct import DirectFile, DirectWrites
from bdn.disk.durable import disk_errors, make_folder, remove_tree


@dataclass(frozen=True)
class FoundChunks:
    """A manifest's folder as it was found: its chunks with their sizes, and its last use."""

    manifest: Digest
    chunks: dict[Digest, int]
    last_used: float


class ChunkFiles:
    """Everything below ``root``. Methods block, raise ``DiskFailedError``, and may run in several threads at once."""

    def __init__(self, root: Path, writes: DirectWrites) -> None:
        self._chunks = root / "chunks"
        self._incoming = root / "incoming"
        self._writes = writes
        self._numbers = itertools.count()  # a count can be shared by threads; a generator cannot

    def scan(self) -> list[FoundChunks]:
        """Make the folders, remove what a kill left half-written, and look at what is here."""
        with disk_errors(self._chunks):
            for folder in (self._chunks, self._incoming):
                make_folder(folder, 0o700)
            for path in self._incoming.iterdir():
                path.unlink()
            found = [self._look(folder) for folder in self._chunks.iterdir()]
        return [one for one in found if one is not None]

    def look_at(self, manifest: Digest) -> FoundChunks | None:
        """What a manifest's folder holds now; None when that is nothing."""
        with disk_errors(self._chunks / manifest.hex):
            return self._look(self._chunks / manifest.hex)

    def _look(self, folder: Path) -> FoundChunks | None:
        try:
            manifest = Digest(folder.name)
            with os.scandir(folder) as entries:
                chunks = {Digest(entry.name): entry.stat(follow_symlinks=False).st_size for entry in entries}
        except ValueError:  # nothing that we wrote
            remove_tree(folder)
            return None
        if not chunks:
            folder.rmdir()
            return None
        return FoundChunks(manifest, chunks, folder.stat().st_mtime)

    def write(self, content: memoryview) -> Path:
        """A verified chunk on disk, durable and read-only, under no name yet: the caller lets it ``appear``."""
        aside = self._incoming / str(next(self._numbers))
        with disk_errors(aside):
            try:
                file = DirectFile(aside, self._writes)
                try:
                    file.open()
                    file.write(content, 0)
                    os.fchmod(file.descriptor, 0o444)
                    os.fdatasync(file.descriptor)
                finally:
                    file.close()
            except OSError:
                with suppress(OSError):  # the first failure says more
                    aside.unlink()
                raise
        return aside

    def appear(self, aside: Path, chunk: Digest, manifests: Iterable[Digest]) -> None:
        """Let what was written be found under these manifests, or go. A name that a power cut takes is no harm.

        Not while a folder of theirs is removed: it would be removed with the chunk, or not be there for it.
        """
        with disk_errors(aside):
            try:
                for manifest in manifests:
                    self._link(aside, manifest, chunk)
            finally:
                aside.unlink()

    def link(self, chunk: Digest, holder: Digest, manifest: Digest) -> None:
        """The chunk that one manifest's folder holds shall stand in another's as well."""
        with disk_errors(self.path(manifest, chunk)):
            self._link(self.path(holder, chunk), manifest, chunk)

    def open(self, manifest: Digest, chunk: Digest) -> BinaryIO | None:
        """The chunk; None when it is not here."""
        path = self.path(manifest, chunk)
        with disk_errors(path):
            try:
                return path.open("rb", buffering=0)
            except FileNotFoundError:
                return None

    def has(self, manifest: Digest, chunk: Digest) -> bool:
        """Whether the chunk stands in this manifest's folder."""
        path = self.path(manifest, chunk)
        with disk_errors(path):
            return path.exists()

    def touch(self, manifest: Digest, now: float) -> None:
        """The manifest was used at ``now``, also after a restart."""
        folder = self._chunks / manifest.hex
        with disk_errors(folder), suppress(FileNotFoundError):
            os.utime(folder, ns=(int(now * 1e9), int(now * 1e9)))

    def remove(self, manifests: Iterable[Digest], chunk: Digest) -> None:
        """Remove one chunk from these manifests' folders."""
        for manifest in manifests:
            path = self.path(manifest, chunk)
            with disk_errors(path):
                path.unlink(missing_ok=True)

    def remove_all(self, manifest: Digest) -> None:
        """Remove a manifest's folder."""
        with disk_errors(self._chunks / manifest.hex):
            remove_tree(self._chunks / manifest.hex)

    def path(self, manifest: Digest, chunk: Digest) -> Path:
        """Where the chunk stands in this manifest's folder."""
        return self._chunks / manifest.hex / chunk.hex

    def _link(self, file: Path, manifest: Digest, chunk: Digest) -> None:
        path = self.path(manifest, chunk)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.link(file, path)
