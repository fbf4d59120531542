"""Partial files: chunks are written at their offsets in any order, and one rename makes the whole file appear.

Order of a commit: chunk data, a batched fdatasync, the bitmap; once all chunks are there, fsync, rename, fsync of the
folder. A kill at any point leaves a part that the next fill resumes, or the whole file.

The small files of a slab are committed together: all bytes under dot names, one sync, all renames, one sync of the
folders. A kill leaves whole files, or files under dot names, which the next start removes.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, Self

from blake3 import blake3

from bdn.core.chunk import FileLayout, PlacedChunk, digest_of
from bdn.core.errors import InternalError
from bdn.disk.direct import DirectFile, DirectWrites
from bdn.disk.durable import disk_errors, open_folder, sync_folder, write_all
from bdn.disk.syscalls import REFUSED, allocate
from bdn.disk.threads import in_thread
from node_agent.disk.cache_directory import CacheDirectory
from node_agent.disk.places import temporary_name
from node_agent.disk.whole_files import WholeFiles

SYNC_CHUNKS: Final = 16  # 128 MiB between two fdatasyncs: the most that a kill costs, besides the chunks in flight
_MAGIC: Final = b"bdnbits1"
_HEADER_SIZE: Final = 16
_NO_ALLOCATION: Final = REFUSED | {errno.EINVAL}


class Bitmap:
    """A set of chunk indices below ``count``. On disk: 8 bytes of magic, the count, then the bits.

    A torn write does no harm: a bit changes from 0 to 1 only, after its chunk was synced, and a resumed fill verifies
    the chunk.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._bits = bytearray(-(-count // 8))

    @classmethod
    def parse(cls, content: bytes, count: int) -> Self:
        """Empty if ``content`` is of another format or count."""
        bitmap = cls(count)
        if content.startswith(bitmap._header()) and len(content) == _HEADER_SIZE + len(bitmap._bits):
            bitmap._bits[:] = content[_HEADER_SIZE:]
        return bitmap

    def to_bytes(self) -> bytes:
        return self._header() + self._bits

    def __contains__(self, index: int) -> bool:
        return bool(self._bits[index >> 3] & 1 << (index & 7))

    @property
    def is_empty(self) -> bool:
        return not any(self._bits)

    def add(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._bits[index >> 3] |= 1 << (index & 7)

    def _header(self) -> bytes:
        return _MAGIC + self.count.to_bytes(8, "big")


class PartialFile:
    """``filling/<hex>.part`` and its bitmap. Methods block; ``write`` and ``holds`` may run in several threads at once.

    Every method raises ``DiskFailedError``. A file of one chunk has no bitmap: there is nothing to resume.
    """

    def __init__(self, files: WholeFiles, layout: FileLayout, writes: DirectWrites) -> None:
        self.layout = layout
        self.is_committed = False
        self._files = files
        self._path = files.places.part(layout.digest)
        self._bitmap_path = files.places.bitmap(layout.digest)
        self._bitmap = Bitmap(len(layout.chunks))
        self._lock = threading.Lock()
        self._unsynced: list[int] = []
        self._file = DirectFile(self._path, writes)
        self._bitmap_descriptor = -1
        self._is_open = False
        self._is_suspect = False  # a sync failed: the kernel reports lost pages once, so later syncs prove nothing

    def open(self) -> None:
        """Resume the part of an earlier fill, or begin one, with all blocks allocated before the first write.

        If the disk has no room for them, a new part is removed, and an old part stays as it was.
        """
        with disk_errors(self._path):
            is_new = not self._path.exists()
            try:
                self._file.open()
                self._allocate()
                self._open_bitmap(is_new=is_new)
            except OSError:
                self.close()
                if is_new:
                    self._remove()
                raise
            self._is_open = True

    def holds(self, chunk: PlacedChunk, buffer: memoryview) -> bool:
        """Whether the chunk is here already: recorded as durable, and its bytes, read into ``buffer``, are right.

        False if it cannot be read; writing it again may succeed where reading failed.
        """
        if chunk.index not in self._bitmap:
            return False
        try:
            size = os.preadv(self._file.descriptor, [buffer], chunk.range.start)
        except OSError:
            return False
        return size == chunk.range.size and digest_of(buffer) == chunk.digest

    def write(self, chunk: PlacedChunk, buffer: memoryview) -> None:
        """Write a verified chunk at its offset. Durable with its batch, at the latest with ``close``."""
        with disk_errors(self._path):
            self._file.write(buffer, chunk.range.start)
            with self._lock:
                self._unsynced.append(chunk.index)
                if len(self._unsynced) < SYNC_CHUNKS:
                    return
                batch, self._unsynced = self._unsynced, []
            self._record(batch)

    def commit(self) -> None:
        """After all chunks: sync, and rename the file to its name, read-only."""
        with disk_errors(self._path):
            os.fchmod(self._file.descriptor, 0o444)
            self._sync(os.fsync)
            self._files.appear(self.layout.digest, self._path)
            sync_folder(self._files.places.file(self.layout.digest).parent)
            self.is_committed = True
            self._bitmap_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files. Uncommitted chunks are recorded first, if the disk still works.

        A part without any durable chunk is removed, so that it takes no space.
        """
        if self._is_open and not self.is_committed:
            with suppress(OSError):  # loses at most one batch, and the caller already has the first failure
                self._record(self._unsynced)
                if self._bitmap.is_empty:
                    self._remove()
        self._is_open = False
        self._file.close()
        if self._bitmap_descriptor >= 0:
            os.close(self._bitmap_descriptor)
            self._bitmap_descriptor = -1

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self._bitmap_path.unlink(missing_ok=True)

    def _allocate(self) -> None:
        size, descriptor = self.layout.size, self._file.descriptor
        if os.fstat(descriptor).st_size > size:
            os.ftruncate(descriptor, 0)  # not a part of this layout
        if not size:
            return
        try:
            allocate(descriptor, size)
        except OSError as error:
            if error.errno not in _NO_ALLOCATION:
                raise
            os.ftruncate(descriptor, size)

    def _open_bitmap(self, *, is_new: bool) -> None:
        if self._bitmap.count <= 1:
            return
        self._bitmap_descriptor = os.open(self._bitmap_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not is_new:
            content = os.pread(self._bitmap_descriptor, len(self._bitmap.to_bytes()) + 1, 0)
            self._bitmap = Bitmap.parse(content, self._bitmap.count)
        form = self._bitmap.to_bytes()
        write_all(self._bitmap_descriptor, memoryview(form), 0)
        os.ftruncate(self._bitmap_descriptor, len(form))  # after the write: a kill in between must not cost the fill
        sync_folder(self._path.parent)  # durable chunks are found again only if the name is durable

    def _record(self, batch: list[int]) -> None:
        if not batch or self._bitmap_descriptor < 0 or self._is_suspect:
            return
        self._sync(os.fdatasync)
        with self._lock:
            self._bitmap.add(batch)
            write_all(self._bitmap_descriptor, memoryview(self._bitmap.to_bytes()), 0)
        os.fdatasync(self._bitmap_descriptor)

    def _sync(self, sync: Callable[[int], None]) -> None:
        try:
            sync(self._file.descriptor)
        except OSError:
            self._is_suspect = True
            raise


_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class PackedParts:
    """``files/<aa>/.<hex>`` of each file. ``write`` blocks; all methods raise ``DiskFailedError``.

    Each file is in its final folder from the beginning: a rename within one folder blocks nothing, while renames
    between folders take turns on the whole file system.
    """

    def __init__(self, disk: CacheDirectory, files: Sequence[FileLayout]) -> None:
        self.files = files
        self.is_committed = False
        self._places = disk.places
        self._whole = disk.files
        self._sync = disk.sync
        self._mark = disk.sync.mark()
        self._unnamed = disk.unnamed
        self._written = 0  # bytes counted in ``unnamed`` for this object

    def write(self, slab: memoryview) -> None:
        """Cut a verified slab into the files, each verified before any is written.

        Raises ``InternalError``: the slab does not match the layout; names the file.
        """
        pieces = [cut(file, slab) for file in self.files]
        self._count(sum(map(len, pieces)))
        with disk_errors(self._places.files), open_folder(self._places.files) as root:
            for file, piece in zip(self.files, pieces, strict=True):
                _write_file(root, temporary_name(file.digest), piece)

    async def commit(self) -> None:
        """After ``write``: make the files appear under their names, read-only. Do not cancel half-way."""
        root = f"{self._places.files}/"
        await self._sync.sync([root + temporary_name(file.digest) for file in self.files], self._mark)
        await in_thread(self._rename)
        folders = dict.fromkeys(file.digest.hex[:2] for file in self.files)
        await self._sync.sync([root + folder for folder in folders], self._mark)
        self._count(0)
        self.is_committed = True

    def close(self) -> None:
        """Remove files that were not committed; they cannot be resumed."""
        if self.is_committed:
            return
        with suppress(OSError), open_folder(self._places.files) as root:  # the caller already has the first failure
            for file in self.files:
                with suppress(OSError):
                    os.unlink(temporary_name(file.digest), dir_fd=root)
        self._count(0)

    def _count(self, size: int) -> None:
        self._unnamed.add(size - self._written)
        self._written = size

    def _rename(self) -> None:
        with disk_errors(self._places.files):
            for file in self.files:
                self._whole.appear(file.digest, f"{self._places.files}/{temporary_name(file.digest)}")
        self._drop_parts()

    def _drop_parts(self) -> None:
        """Remove parts left by a broken-off fill with another layout, in which a file was not in a slab."""
        with disk_errors(self._places.filling), os.scandir(self._places.filling) as entries:
            begun = {entry.name.partition(".")[0] for entry in entries}
        for file in self.files:
            if file.digest.hex in begun:
                with disk_errors(self._places.filling):
                    for path in (self._places.part(file.digest), self._places.bitmap(file.digest)):
                        path.unlink(missing_ok=True)


def cut(file: FileLayout, slab: memoryview) -> memoryview:
    """The small file's bytes in its slab. Raises ``InternalError`` if they do not match its digest."""
    lies = file.slice
    piece = slab[lies.offset : lies.offset + file.size] if lies else slab[:0]
    if blake3(piece).hexdigest() != file.digest.hex:
        raise InternalError(f"the layout of file {file.digest} is wrong: {lies} does not contain it")
    return piece


def _write_file(root: int, name: str, content: memoryview) -> None:
    try:
        descriptor = os.open(name, _NEW, 0o600, dir_fd=root)
    except FileExistsError:
        # A file that an earlier attempt left may not be synced, so it is rewritten.
        os.unlink(name, dir_fd=root)
        descriptor = os.open(name, _NEW, 0o600, dir_fd=root)
    try:
        write_all(descriptor, content, 0)
        os.fchmod(descriptor, 0o444)
    finally:
        os.close(descriptor)
