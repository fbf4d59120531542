"""The Linux calls that the standard library does not have. Each raises ``OSError`` with the path it failed for."""

import ctypes
import fcntl
import os
from pathlib import Path
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_REMOUNT: Final = 0x20
MS_BIND: Final = 0x1000
MNT_DETACH: Final = 0x2
UMOUNT_NOFOLLOW: Final = 0x8
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 0x2
_FICLONE: Final = 0x40049409


def allocate(descriptor: int, size: int) -> None:
    """``fallocate(2)``: blocks for the first ``size`` bytes. Without glibc's emulation, which writes them all."""
    _check(_libc.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size)), "")


def sync_file_system(descriptor: int) -> None:
    """``syncfs(2)``: everything that was written to this file system is durable. Tells errors since Linux 5.8, once."""
    _check(_libc.syncfs(descriptor), "")


def file_system_magic(descriptor: int) -> int:
    """``f_type`` of ``fstatfs(2)``: which kind of file system this is."""
    found = (ctypes.c_long * 64)()  # struct statfs is 120 bytes and begins with it
    _check(_libc.fstatfs(descriptor, ctypes.byref(found)), "")
    return int(found[0])


def mount(source: Path | None, target: Path, flags: int) -> None:
    """``mount(2)`` without a file system type, for bind mounts."""
    _check(_libc.mount(os.fsencode(source) if source else None, os.fsencode(target), None, flags, None), str(target))


def unmount(target: Path, flags: int = 0) -> None:
    """``umount2(2)``, never through a symbolic link. ``EINVAL`` means that nothing is mounted there."""
    _check(_libc.umount2(os.fsencode(target), flags | UMOUNT_NOFOLLOW), str(target))


def exchange(first: Path, second: Path) -> None:
    """``renameat2(2)``: two names change places in one step."""
    names = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    _check(_libc.renameat2(*names, _RENAME_EXCHANGE), str(second))


def clone_file(source: int, target: int) -> None:
    """``FICLONE``: the target shares the source's blocks (xfs, btrfs, bcachefs, and others)."""
    fcntl.ioctl(target, _FICLONE, source)


def _check(result: int, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
