"""The files of one slab on their way to being whole: cut out, written aside, and made visible together.

The order is that of ``part``, for all of them at once: the bytes aside and the folders, one sync, all renames, one sync of
the folders. A kill at any point leaves parts, which are written anew, or whole files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bdn.core.digest import digest_of
from bdn.core.errors import InternalError
from bdn.core.layout import FileLayout
from node_agent.crew import in_thread
from node_agent.disk.durable import DurableFolders, disk_errors, write_all
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.places import Places


class PackedParts:
    """``filling/<hex>.part`` of each file. ``write`` blocks; all methods raise ``DiskFailedError``."""

    def __init__(self, places: Places, folders: DurableFolders, sync: GroupSync, files: Sequence[FileLayout]) -> None:
        self.files = files
        self.is_committed = False
        self._places = places
        self._folders = folders
        self._sync = sync
        self._mark = sync.mark()

    def write(self, slab: memoryview) -> None:
        """Cut a verified slab into the files, each checked against its own name before any is written.

        Raises:
            InternalError: the slab does not hold what the layout says; names the file.
        """
        pieces = [_cut(file, slab) for file in self.files]
        for file, piece in zip(self.files, pieces, strict=True):
            path = self._places.part(file.digest)
            with disk_errors(path):
                # What an earlier attempt left here was never synced for certain, so it is written anew.
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                descriptor = os.open(path, flags, 0o600)
                try:
                    write_all(descriptor, piece, 0)
                    os.fchmod(descriptor, 0o444)
                finally:
                    os.close(descriptor)

    async def commit(self) -> None:
        """All bytes are there: let the files appear under their names, read-only. Not to be canceled half-way."""
        targets = {file.digest: self._places.file(file.digest) for file in self.files}
        folders = list(dict.fromkeys(target.parent for target in targets.values()))
        fresh = await in_thread(self._make, folders)
        parts = [self._places.part(file.digest) for file in self.files]
        await self._sync.sync([*parts, *dict.fromkeys(folder.parent for folder in fresh)], self._mark)
        self._folders.remember(fresh)
        await in_thread(_rename, list(zip(parts, targets.values(), strict=True)))
        await self._sync.sync(folders, self._mark)
        self.is_committed = True

    def close(self) -> None:
        """Remove what did not become a file: nobody could go on from it."""
        if self.is_committed:
            return
        for file in self.files:
            with suppress(OSError):  # whoever closes after a failure knows why
                self._places.part(file.digest).unlink(missing_ok=True)

    def _make(self, folders: Sequence[Path]) -> list[Path]:
        with disk_errors(self._places.files):
            return self._folders.make_unsynced(folders, self._places.files)


def _cut(file: FileLayout, slab: memoryview) -> memoryview:
    lies = file.slice
    piece = slab[lies.offset : lies.offset + file.size] if lies else slab[:0]
    if digest_of(piece) != file.digest:
        raise InternalError(f"the layout of file {file.digest} is wrong: it does not lie in {lies}")
    return piece


def _rename(moves: Sequence[tuple[Path, Path]]) -> None:
    for part, target in moves:
        with disk_errors(part):
            part.rename(target)
