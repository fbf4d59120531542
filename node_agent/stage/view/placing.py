"""How one whole file of the cache appears under another name: a link, shared blocks, or a copy."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import CanceledError
from bdn.disk.syscalls import clone_file
from bdn.wire.stage_schema import ViewKind
from node_agent.disk.places import name_in_files

_PIECE: Final = 64 * 1024 * 1024
_NO_LINKS: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NO_CLONES: Final = _NO_LINKS | {errno.ENOTTY, errno.EBADF, errno.EISDIR, errno.ETXTBSY}
_NO_KERNEL_COPY: Final = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO})


@dataclass(frozen=True, slots=True)
class Slot:
    """A name in an open folder, where a file shall appear."""

    folder: int  # descriptor
    name: bytes


class Placer:
    """Puts files into one tree, in the cheapest way that works between these two file systems.

    Tries hard links first, then reflinks, then copies, and stays with what works: what stops the first file stops all.
    A file with as many links as its file system allows (65,000 on ext4) is copied alone.
    """

    def __init__(self, files: int, stop: threading.Event) -> None:
        """``files`` is the descriptor of the cache's folder of whole files."""
        self.kind: ViewKind = "hardlink"
        self.reasons: list[str] = []
        self._files = files
        self._stop = stop
        self._too_many_links = 0

    @property
    def reason(self) -> str | None:
        """Why the view is not all hard links; None when it is."""
        alone = f"{self._too_many_links} files were copied: too many links" if self._too_many_links else None
        return "; ".join([*self.reasons, *([alone] if alone else [])]) or None

    def place(self, digest: Digest, slot: Slot) -> None:
        """Let the file appear. Raises ``OSError``, or ``CanceledError`` when ``stop`` is set."""
        if self.kind == "hardlink" and self._try_link(digest, slot):
            return
        source = os.open(name_in_files(digest), os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._files)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            target = os.open(slot.name, flags, 0o600, dir_fd=slot.folder)
            try:
                if not (self.kind == "reflink" and self._try_clone(source, target)):
                    _copy(source, target, self._stop)
                self._finish(source, target)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _try_link(self, digest: Digest, slot: Slot) -> bool:
        try:
            os.link(name_in_files(digest).encode(), slot.name, src_dir_fd=self._files, dst_dir_fd=slot.folder)
        except OSError as error:
            if error.errno == errno.EMLINK:
                self._too_many_links += 1
                return False
            if error.errno not in _NO_LINKS:
                raise
            self.kind = "reflink"
            self.reasons.append(f"no hard links: {error.strerror}")
            return False
        return True

    def _try_clone(self, source: int, target: int) -> bool:
        try:
            clone_file(source, target)
        except OSError as error:
            if error.errno not in _NO_CLONES:
                raise
            self.kind = "copy"
            self.reasons.append(f"no reflinks: {error.strerror}")
            return False
        return True

    @staticmethod
    def _finish(source: int, target: int) -> None:
        """Durable, read-only, and with the source's time, by which a later look knows that nobody wrote to it."""
        times = os.fstat(source)
        os.fchmod(target, 0o444)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
        os.fsync(target)


def _copy(source: int, target: int, stop: threading.Event) -> None:
    left = os.fstat(source).st_size
    copy: Callable[[int, int, int], int] = os.copy_file_range
    while left:
        if stop.is_set():
            raise CanceledError("the copy of a view")
        try:
            count = copy(source, target, min(left, _PIECE))
        except OSError as error:
            if copy is not os.copy_file_range or error.errno not in _NO_KERNEL_COPY:
                raise
            copy = _read_and_write  # between these file systems the kernel does not copy by itself
            continue
        if not count:
            raise OSError(errno.EIO, "the file in the cache is shorter than it was")
        left -= count


def _read_and_write(source: int, target: int, size: int) -> int:
    return os.sendfile(target, source, None, size)  # from the current position
