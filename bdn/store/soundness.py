"""Whether a chunk's file holds what its name says, and the folder that keeps those that do not."""

from __future__ import annotations

import errno
import io
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest

_PIECE: Final = 1024 * 1024
# What a disk answers for a sector that it has lost, and a file system for a file that is not one of ours any more, or not for
# us, or that lies in no folder. Any other failure, such as that of a server or of a process without descriptors, says nothing
# about the bytes.
_LOST: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA})
_KEPT_FROM_US: Final = frozenset({errno.EPERM, errno.EACCES, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO})
_UNREADABLE: Final = _LOST | _KEPT_FROM_US | {errno.ENOTDIR}


def fault_of(file: BinaryIO, digest: Digest) -> str | None:
    """What is wrong with the chunk in this file, or None. Blocking; costs one read of it. Leaves nothing in the page cache.

    Raises:
        OSError: it could not be found out.
    """
    _leave_cache(file)
    hasher, piece, size = blake3(), bytearray(_PIECE), 0
    try:
        while size <= CHUNK_SIZE and (count := file.readinto(piece)):  # type: ignore[attr-defined] # as in the copier
            hasher.update(memoryview(piece)[:count])
            size += count
    except OSError as error:
        return unreadable(error)
    _leave_cache(file)
    if size > CHUNK_SIZE:
        return "it is longer than a chunk can be"
    actual = Digest(hasher.hexdigest())
    return None if actual == digest else f"its {size} bytes are {actual}"


def unreadable(error: OSError) -> str:
    """What is wrong with a chunk that cannot be opened or read. Raises the error when it says nothing about the chunk."""
    if error.errno not in _UNREADABLE:
        raise error
    return f"it cannot be read ({error.strerror})"


def _leave_cache(file: BinaryIO) -> None:
    with suppress(io.UnsupportedOperation, OSError):  # a file in memory; a file system that has no such thing
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


KEPT: Final = 64  # of at most a chunk each; the oldest go


class ChunkQuarantine:
    """A folder of files named ``<nanoseconds>-<digest>``: when they were found, and what they should have been."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def move_if_wrong(self, path: Path, digest: Digest) -> bool:
        """Move the file here if it is wrong. False when there is none, or it is right, and then it stays where it is.

        A and B read wrong bytes; A moves them, and right ones take their place; B comes to move what it has seen. So what was
        moved is read once more and, if it is right, given back. Meanwhile nobody finds it: readers take that for a failure
        that passes.
        """
        try:
            if not is_wrong(path, digest):
                return False
            self._folder.mkdir(exist_ok=True)
            taken = self._folder / f"{time.time_ns()}-{digest.hex}"
            path.rename(taken)
        except FileNotFoundError:
            return False
        was_wrong = is_wrong(taken, digest)
        if not was_wrong:
            with suppress(FileExistsError):
                path.hardlink_to(taken)
            taken.unlink()
        self._trim()
        return was_wrong

    def count(self) -> int:
        """How many there are."""
        return len(self._names())

    def _trim(self) -> None:
        for name in self._names()[:-KEPT]:
            (self._folder / name).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(path.name for path in self._folder.iterdir())
        return []


def is_wrong(path: Path, digest: Digest) -> bool:
    """Whether the file is not what its name says. Reads all of it."""
    with path.open("rb", buffering=0) as file:
        return fault_of(file, digest) is not None
