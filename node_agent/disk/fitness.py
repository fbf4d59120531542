"""Whether a disk takes anything new, as far as it can be told without writing to it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from bdn.core.errors import DiskFailedError
from bdn.disk.durable import disk_errors


def check_fitness(folder: Path) -> None:
    """Whether the disk of ``folder`` takes a new file. Blocking.

    Raises:
        DiskFailedError: it does not answer, is read-only, or has no block or no inode left for this process.
    """
    with disk_errors(folder):
        disk = os.statvfs(folder)
        if disk.f_flag & os.ST_RDONLY:
            raise DiskFailedError(str(folder), "it is mounted read-only")
        blocks, inodes = (disk.f_bfree, disk.f_ffree) if os.geteuid() == 0 else (disk.f_bavail, disk.f_favail)
        if blocks == 0 or (disk.f_files and inodes == 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
