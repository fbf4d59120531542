"""The files of one slab on their way to being whole: cut out, written aside, and made visible together.

The order is that of ``part``, for all of them at once: the bytes aside, one sync, all renames, one sync of the folders. A
kill at any point leaves files under dot names, which the next start removes, or whole files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from blake3 import blake3

from bdn.core.errors import InternalError
from bdn.core.store.layout import FileLayout
from bdn.disk.durable import disk_errors, open_folder, write_all
from node_agent.background_tasks import in_thread
from node_agent.disk.cache_directory import UnnamedBytes
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.places import Places, name_aside, name_in_files

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class PackedParts:
    """``files/<aa>/.<hex>`` of each file. ``write`` blocks; all methods raise ``DiskFailedError``.

    Each stands in its final folder from the beginning: a rename within one folder holds up nobody, while those between
    folders take turns on the whole file system.
    """

    def __init__(self, places: Places, sync: GroupSync, aside: UnnamedBytes, files: Sequence[FileLayout]) -> None:
        self.files = files
        self.is_committed = False
        self._places = places
        self._sync = sync
        self._mark = sync.mark()
        self._aside = aside
        self._written = 0  # bytes that ``aside`` counts for us

    def write(self, slab: memoryview) -> None:
        """Cut a verified slab into the files, each checked against its own name before any is written.

        Raises:
            InternalError: the slab does not hold what the layout says; names the file.
        """
        pieces = [_cut(file, slab) for file in self.files]
        self._count(sum(map(len, pieces)))
        with disk_errors(self._places.files), open_folder(self._places.files) as root:
            for file, piece in zip(self.files, pieces, strict=True):
                _write_file(root, name_aside(file.digest), piece)

    async def commit(self) -> None:
        """All bytes are there: let the files appear under their names, read-only. Not to be canceled half-way."""
        root = f"{self._places.files}/"
        await self._sync.sync([root + name_aside(file.digest) for file in self.files], self._mark)
        await in_thread(self._rename)
        folders = dict.fromkeys(file.digest.hex[:2] for file in self.files)
        await self._sync.sync([root + folder for folder in folders], self._mark)
        self._count(0)
        self.is_committed = True

    def close(self) -> None:
        """Remove what did not become a file: nobody could go on from it."""
        if self.is_committed:
            return
        with suppress(OSError), open_folder(self._places.files) as root:  # whoever closes after a failure knows why
            for file in self.files:
                with suppress(OSError):
                    os.unlink(name_aside(file.digest), dir_fd=root)
        self._count(0)

    def _count(self, size: int) -> None:
        self._aside.add(size - self._written)
        self._written = size

    def _rename(self) -> None:
        with disk_errors(self._places.files), open_folder(self._places.files) as root:
            for file in self.files:
                os.rename(name_aside(file.digest), name_in_files(file.digest), src_dir_fd=root, dst_dir_fd=root)
        self._drop_parts()

    def _drop_parts(self) -> None:
        """Where a file lay by itself in another layout, a fill that broke off has left a part of it."""
        with disk_errors(self._places.filling), os.scandir(self._places.filling) as entries:
            begun = {entry.name.partition(".")[0] for entry in entries}
        for file in self.files:
            if file.digest.hex in begun:
                with disk_errors(self._places.filling):
                    for path in (self._places.part(file.digest), self._places.bitmap(file.digest)):
                        path.unlink(missing_ok=True)


def _cut(file: FileLayout, slab: memoryview) -> memoryview:
    lies = file.slice
    piece = slab[lies.offset : lies.offset + file.size] if lies else slab[:0]
    if blake3(piece).hexdigest() != file.digest.hex:
        raise InternalError(f"the layout of file {file.digest} is wrong: it does not lie in {lies}")
    return piece


def _write_file(root: int, name: str, content: memoryview) -> None:
    try:
        descriptor = os.open(name, _NEW, 0o600, dir_fd=root)
    except FileExistsError:
        # What an earlier attempt left here was never synced for certain, so it is written anew.
        os.unlink(name, dir_fd=root)
        descriptor = os.open(name, _NEW, 0o600, dir_fd=root)
    try:
        write_all(descriptor, content, 0)
        os.fchmod(descriptor, 0o444)
    finally:
        os.close(descriptor)
