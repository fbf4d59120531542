"""Whether a file holds what its name says: read past the page cache, which hides what the disk has become."""

from __future__ import annotations

import errno
import io
import os
from contextlib import suppress
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
